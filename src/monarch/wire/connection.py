"""One stream socket to one other process: handshake, frames in, frames out.

Senders write from their own thread under the connection's lock. What the socket does not take at once is copied
into a queue, which the runtime thread flushes; when the queue is over its limit, senders wait (the runtime thread
never does). Large parts to a process of the same host go through shared memory instead.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch.wire import addresses, auth
from monarch.wire.frames import ACK, DEAD, HELLO, RELEASE, SHM, Bytes, Frame, FrameError, FrameParser
from monarch.wire.poller import EDGE, HANGUP, READ, WRITE, Poller
from monarch.wire.session import Revival, Session

if TYPE_CHECKING:
    import ssl

    from monarch.wire.segments import SegmentPool
    from monarch.wire.tls import TlsSocket

log = logging.getLogger("monarch.wire")

_CHUNK = 1 << 16  # below malloc's mmap threshold: a larger buffer costs page faults on every read
_JOIN = 1 << 14  # below this one copy is cheaper than a gathering write
_TLS, _GREETING, _PROOF, _FRAMES = range(4)  # what is expected next from the other end


class ConnectionClosed(Exception):
    """The other end is gone; nothing more can be sent."""


class Limits:
    """What one connection may use: frame size, queued bytes, seconds for the handshake, seconds of silence."""

    __slots__ = ("handshake", "max_frame", "send_queue", "silence")

    def __init__(self, max_frame: int, send_queue: int, handshake: float = 10.0, silence: float = 0.0) -> None:
        self.max_frame = max_frame
        self.send_queue = send_queue
        self.handshake = handshake
        self.silence = silence


class Connection:
    """A connection after `open`. `on_frame(conn, frame)` and `on_close(conn, reason)` run on the runtime thread."""

    def __init__(
        self,
        poller: Poller,
        sock: socket.socket,
        node: int,
        limits: Limits,
        on_frame: Callable[[Connection, Frame], None],
        on_close: Callable[[Connection, str], None],
        *,
        peer: int = 0,
        address: str = "",
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        dialled: bool = False,
        handshake: bool = True,
        connecting: bool = False,
        pool: SegmentPool | None = None,
        shm_threshold: int = 1 << 62,
        on_ready: Callable[[Connection], None] | None = None,
        reviving: Revival | None = None,
    ) -> None:
        sock.setblocking(False)
        self.peer = peer  #: node id of the other end; 0 until the handshake told it
        self.peer_pid = 0
        self.address = address or addresses.of_peer(sock)  #: of the other end, for people; "" while unknown
        self.closed = False
        self.reason = ""
        self.heard = 0  #: how often something arrived
        self.session: Session | None = None  #: to go on with when the socket is lost; see `begin_session`
        self.sessions: dict[bytes, Connection] = {}  #: at a listener: those that may be taken up again
        self.reviving = reviving  #: this is an attempt to get another connection back
        self.was_refused = False  #: the other end's kernel, or somebody in its place, said no
        self._suspended = False  #: there is no socket now
        self._held = False  #: there is one again, and the other end has not seen that yet
        self._node = node
        self._poller = poller
        self._sock: socket.socket = sock
        self._tls: TlsSocket | None = None
        if limits.silence:
            addresses.keep_alive(sock, limits.silence)
        self._fd = sock.fileno()
        if tls is not None:
            from monarch.wire.tls import TlsSocket

            self._tls = TlsSocket(sock, tls, not dialled)
            self._sock = self._tls  # type: ignore[assignment]
        self._limits = limits
        self._parser = FrameParser(limits.max_frame)
        self._on_frame = on_frame
        self._on_close = on_close
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._room: threading.Condition | None = None
        self._queue: collections.deque[memoryview] = collections.deque()
        self._queued = 0
        self._writing = False
        self._pool = pool if sock.family == socket.AF_UNIX else None
        self._threshold = shm_threshold
        self._secret = secret
        self._dialled = dialled
        self._connecting = connecting
        self._inbox = bytearray()
        self._reading = threading.Lock()
        self._unread = 0
        self._stage = _FRAMES if not handshake else _TLS if tls is not None else _GREETING
        self._may_send = not handshake
        self._mine = b""
        self._timer = None
        if handshake:
            self._mine = auth.greeting(node, secret)
            self._timer = poller.call_later(limits.handshake, self._too_slow)
            if dialled and secret is None and tls is None:
                self._may_send = not connecting
            if not connecting:
                self._begin()
        self._poller.watch(self._fd, READ | EDGE | (WRITE if connecting else 0), self._on_event)

    # -- sending, from any thread

    def send(self, frame: Frame) -> None:
        """Sends or queues `frame`. Raises ConnectionClosed. Waits only when the queue is over its limit."""
        size = frame.nbytes
        if size >= self._threshold and self._pool is not None:
            frame = self._through_memory(frame)
            size = frame.nbytes
        head = frame.head()
        parts = frame.parts
        with self._lock:
            if self.closed:
                raise ConnectionClosed(self.reason)
            if self.session is not None:
                parts = self.session.keep(head, parts)
            if self._suspended or self._held:
                pass  # sent from what is kept
            elif self._queue or not self._may_send:
                self._enqueue(head, parts)
            else:
                sent = self._write(head, parts, size)
                if sent < size:
                    self._enqueue(head, parts, skip=sent)
                elif self._tls is not None and self._tls.pending and not self._writing:
                    self._writing = True
                    self._poller.post(self._watch)
            if self._queued <= self._limits.send_queue and (self.session is None or not self.session.is_full):
                return
            if not self._poller.is_current():
                self._wait_for_room()

    def lend(self, frame: Frame, borrowers: list[int]) -> Frame | None:
        """Moves a frame's parts into one segment for several receivers of this host; None when it should not."""
        if self._pool is None or frame.nbytes < self._threshold:
            return None
        ticket = self._pool.pack(frame.parts, borrowers)
        if ticket is None:
            return None
        frame.parts = (ticket,)
        frame.flags |= SHM
        return frame

    def _through_memory(self, frame: Frame) -> Frame:
        if frame.flags & SHM:
            return frame
        assert self._pool is not None
        ticket = self._pool.pack(frame.parts, [frame.dest])  # a relay passes the ticket on
        if ticket is not None:
            frame.parts = (ticket,)
            frame.flags |= SHM
        return frame

    def _write(self, head: bytes, parts: collections.abc.Sequence[Bytes], size: int) -> int:
        try:
            if size < _JOIN:
                return self._sock.send(b"".join((head, *parts)))
            if self._tls is not None:
                return 0  # in pieces, from the queue
            if len(parts) < 512:
                return self._sock.sendmsg((head, *parts))
            return self._sock.send(head)
        except BlockingIOError:
            return 0
        except OSError as e:
            self._lost_soon(f"connection lost: {e.strerror}")
            if self.session is not None:
                return size  # it is kept
            raise ConnectionClosed(f"connection lost: {e.strerror}") from None

    def _lost_soon(self, reason: str) -> None:
        sock = self._sock
        self._poller.post(lambda: self._lost(reason) if self._sock is sock else None)

    def _enqueue(self, head: bytes, parts: collections.abc.Sequence[Bytes], skip: int = 0) -> None:
        for part in (head, *parts):
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            if skip >= view.nbytes:
                skip -= view.nbytes
                continue
            rest = view[skip:]
            if type(part) is not bytes:
                rest = memoryview(bytes(rest))  # a copy: the caller may change its memory after the call
            skip = 0
            self._queue.append(rest)
            self._queued += rest.nbytes
        if not self._writing and self._may_send:
            self._writing = True
            self._poller.post(self._watch)

    def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = threading.Condition(self._lock)
        while not self.closed and (
            self._queued > self._limits.send_queue // 2 or (self.session is not None and self.session.is_full)
        ):
            self._room.wait(1.0)

    def _send_raw(self, data: bytes) -> None:
        """Handshake bytes go before any frame; they always fit a fresh socket's buffer."""
        try:
            self._sock.send(data)
        except OSError as e:
            self._lost_soon(f"connection lost: {e.strerror}")

    # -- on the runtime thread

    def _watch(self) -> None:
        if not self.closed and not self._suspended:
            writing = WRITE if self._writing or self._connecting else 0
            self._poller.watch(self._fd, READ | EDGE | writing, self._on_event)

    def _on_event(self, event: int) -> None:
        if event & WRITE and not self.closed:
            if self._connecting and not self._connected():
                return
            self._flush()
        if event & ~WRITE:
            self._read(event)

    def _read(self, event: int) -> None:
        """Reads all there is. Two threads may get events for one socket: the first reads for both."""
        self._unread |= event
        self.heard += 1
        while self._unread and self._reading.acquire(blocking=False):
            try:
                event, self._unread = self._unread, 0
                more = True
                while more and not self.closed and not self._suspended:
                    more = self._receive(bool(event & HANGUP))
            finally:
                self._reading.release()
            if self.closed:
                return

    def _connected(self) -> bool:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.was_refused = error == errno.ECONNREFUSED
            self.close(f"cannot connect: {os.strerror(error)}")
            return False
        self._connecting = False
        self._begin()
        if self._secret is None and self._tls is None:
            self._open_gate()
        self._watch()
        return True

    def _begin(self) -> None:
        """The socket is connected: the first words."""
        if self._tls is None:
            self._send_raw(self._mine)
        else:
            self._poller.post(lambda: self._on_event(READ))

    def _open_gate(self) -> None:
        with self._lock:
            self._may_send = True
            if self._queue and not self._writing:
                self._writing = True
                self._poller.post(self._watch)

    def _flush(self) -> None:
        with self._lock:
            queue = self._queue
            if self._tls is not None and not self._flush_tls():
                return
            while queue and self._may_send:
                try:
                    n = self._sock.sendmsg([queue[i] for i in range(min(len(queue), 64))])
                except BlockingIOError:
                    return
                except OSError as e:
                    self._lost_soon(f"connection lost: {e.strerror}")
                    return
                self._queued -= n
                while n:
                    if n >= queue[0].nbytes:
                        n -= queue.popleft().nbytes
                    else:
                        queue[0] = queue[0][n:]
                        n = 0
            self._writing = self._tls is not None and self._tls.pending
            if self._room is not None and self._queued <= self._limits.send_queue // 2:
                self._room.notify_all()
        self._watch()

    def _flush_tls(self) -> bool:
        assert self._tls is not None
        try:
            self._tls.flush()
        except OSError as e:
            self._lost_soon(f"connection lost: {e.strerror}")
            return False
        return not self._tls.pending

    def _receive(self, to_the_end: bool = True) -> bool:
        """Reads once. False when nothing more is there; a short read says so too, unless the peer hung up."""
        try:
            if self._tls is not None:
                to_the_end = True  # a record is shorter than what is asked for
                if self._stage == _TLS:
                    if self._tls.handshake():
                        self._stage = _GREETING
                        self._send_raw(self._mine)
                        if self._dialled and self._secret is None:
                            self._open_gate()
                    return True
            into = self._parser.want()
            if into is not None:
                room = len(into)
                n = self._sock.recv_into(into)
                into.release()
                if n:
                    frame = self._parser.received_into(n)
                    if frame is not None:
                        self._deliver(frame)
                    return to_the_end or n == room
            else:
                data = self._sock.recv(_CHUNK)
                if data:
                    if self._stage == _FRAMES:
                        for frame in self._parser.feed(data):
                            self._deliver(frame)
                    else:
                        self._shake(data)
                    return to_the_end or len(data) == _CHUNK
        except BlockingIOError:
            return False
        except (FrameError, auth.AuthError) as e:
            log.warning("connection from node %x closed: %s", self.peer, e)
            self.close(str(e))
            return False
        except OSError as e:
            self.was_refused = isinstance(e, ConnectionError)
            self._lost(self._why_lost(e))
            return False
        self.was_refused = True
        self._lost("connection closed by the peer")
        return False

    def _why_lost(self, e: OSError) -> str:
        if self._tls is None or not hasattr(e, "reason"):
            return f"connection lost: {e.strerror}"
        text = getattr(e, "verify_message", "") or str(getattr(e, "reason", "") or e).replace("_", " ").lower()
        return f"TLS: {text}"

    def _shake(self, data: bytes) -> None:
        """Advances the handshake; whatever follows it is frames."""
        self._inbox += data
        if self._stage == _GREETING:
            if len(self._inbox) < auth.GREETING.size:
                return
            theirs = bytes(self._inbox[: auth.GREETING.size])
            del self._inbox[: auth.GREETING.size]
            mode, node, pid = auth.read_greeting(theirs)
            if (mode == auth.SECRET) != (self._secret is not None):
                raise auth.AuthError(
                    "this end needs a shared secret and the peer has none"
                    if self._secret is not None
                    else "the peer needs a shared secret and this end has none"
                )
            if self.peer and self.peer != node:
                raise auth.AuthError(f"expected node {self.peer:x} at this address, found {node:x}")
            self.peer, self.peer_pid = node, pid
            self._pair = (self._mine, theirs) if self._dialled else (theirs, self._mine)
            if self._secret is None:
                self._done()
            else:
                if self._dialled:
                    self._send_raw(auth.proof(self._secret, b"dialler", *self._pair))
                self._stage = _PROOF
        if self._stage == _PROOF:
            if len(self._inbox) < auth.PROOF_SIZE:
                return
            given = bytes(self._inbox[: auth.PROOF_SIZE])
            del self._inbox[: auth.PROOF_SIZE]
            assert self._secret is not None
            auth.check(self._secret, b"listener" if self._dialled else b"dialler", *self._pair, given)
            if not self._dialled:
                self._send_raw(auth.proof(self._secret, b"listener", *self._pair))
            self._done()
        if self._stage == _FRAMES and self._inbox and not self.closed:
            rest, self._inbox = self._inbox, bytearray()
            for frame in self._parser.feed(rest):
                self._deliver(frame)

    def _done(self) -> None:
        self._stage = _FRAMES
        if self._timer is not None:
            self._timer.cancel()
        if self._on_ready is not None:
            self._on_ready(self)
        self._open_gate()

    # -- sessions

    def begin_session(self, session: Session, own_address: str) -> None:
        """At the end that dialled, before anything is sent: when the socket is lost, this connection goes on."""
        hello = Frame(HELLO, 0, self._node, 0, (session.ident, own_address.encode()))
        with self._lock, contextlib.suppress(ConnectionClosed):
            self._say(hello)
        self.session = session

    def _say(self, frame: Frame) -> None:
        """Sends a frame that is not counted. Under the lock."""
        if self._queue or not self._may_send:
            self._enqueue(frame.head(), frame.parts)
        else:
            sent = self._write(frame.head(), frame.parts, frame.nbytes)
            if sent < frame.nbytes:
                self._enqueue(frame.head(), frame.parts, skip=sent)

    def _deliver(self, frame: Frame) -> None:
        if frame.kind == HELLO:
            self._on_hello(frame)
            return
        if frame.kind == ACK:
            self._on_ack(frame.key)
            return
        session = self.session
        if session is not None:
            if session.got(frame.nbytes):
                self._tell()
            elif not session.telling:
                session.telling = True
                self._poller.call_later(session.terms.after, self._tell_late)
        self._on_frame(self, frame)

    def _tell_late(self) -> None:
        session = self.session
        assert session is not None
        session.telling = False
        if session.told < session.received:
            self._tell()

    def _tell(self) -> None:
        assert self.session is not None
        with self._lock:
            if not self.closed and not self._suspended and not self._held:
                self._say(Frame(ACK, 0, self._node, self.session.tell()))

    def _on_ack(self, count: int) -> None:
        with self._lock:
            session = self.session
            valid = session is not None and session.confirm(count)
            if valid and self._held:
                self._held = False
                self._send_again()
            if self._room is not None:
                self._room.notify_all()
        if not valid:
            self.close("the peer confirmed what was never sent")

    def _on_hello(self, frame: Frame) -> None:
        """A session begins, is taken up again, or is over."""
        if frame.flags & DEAD:
            revival, self.reviving = self.reviving, None
            self.close("connection closed by the peer")
            if revival is not None and not revival._over():
                revival.conn.close("the other end does not know this connection any more")
        elif self.reviving is not None:  # the answer to an attempt
            revival, self.reviving = self.reviving, None
            if not revival._over():
                revival.conn._take_over(self, frame.key, False)
            self.close("another attempt was faster")
        elif frame.reply:  # somebody wants to take up a session
            old = self.sessions.get(bytes(frame.parts[0]))
            if old is None or old.closed or old.peer != self.peer:
                with self._lock, contextlib.suppress(ConnectionClosed):
                    self._say(Frame(HELLO, 0, self._node, flags=DEAD))
                self.close("it wants to go on with a connection that is over")
            else:
                old._take_over(self, frame.key, True)
        elif self.session is None and self.session_of is not None:
            session = self.session_of(bytes(frame.parts[0]))
            session.peer_address = bytes(frame.parts[1]).decode(errors="replace")
            self.session = session
            self.sessions[session.ident] = self

    session_of: Callable[[bytes], Session] | None = None  #: at a listener: makes its end of a session

    def attempt(self, session: Session) -> None:
        """This is a new socket for `session`: says so, and how much came over the former ones."""
        with self._lock, contextlib.suppress(ConnectionClosed):
            self._say(Frame(HELLO, 0, self._node, session.received, (session.ident, b""), reply=1))

    @property
    def is_attempt(self) -> bool:
        return self.reviving is not None

    def _take_over(self, made: Connection, count: int, answer: bool) -> None:
        """Goes on over the socket of `made`; the other end got `count` frames."""
        session = self.session
        assert session is not None
        self._suspend()
        with self._reading, self._lock:
            valid = session.confirm(count)
            if valid and not self.closed:
                made._poller.unwatch(made._fd)
                made.closed = True
                if made._timer is not None:
                    made._timer.cancel()
                self._sock, self._tls, self._fd = made._sock, made._tls, made._fd
                self._parser = FrameParser(self._limits.max_frame)
                self._queue.clear()
                self._queued = 0
                self._suspended, self._may_send, self._writing = False, True, True
                self._held = answer  # frames right behind the answer would still reach the other end's attempt
                session.resumed += 1
                self._poller.watch(self._fd, READ | EDGE | WRITE, self._on_event)
                kind = HELLO if answer else ACK
                self._say(Frame(kind, 0, self._node, session.tell()))
                if not answer:
                    self._send_again()
        if valid:  # an event that came while we held `_reading` was only noted
            self._poller.post(lambda: self._on_event(READ))
        else:
            self.close("the two ends disagree on what was sent")

    def _send_again(self) -> None:
        """Queues all that was not confirmed. Under the lock."""
        assert self.session is not None
        for parts in self.session.kept:
            for part in parts:
                if len(part):
                    self._queue.append(memoryview(part).cast("B"))
                    self._queued += len(part)
        if not self._writing:
            self._writing = True
            self._poller.post(self._watch)

    def _suspend(self) -> None:
        with self._lock:
            if self.closed or self._suspended:
                return
            self._suspended, self._may_send, self._writing, self._held = True, False, False, False
            self._queue.clear()
            self._queued = 0
        self._poller.unwatch(self._fd)
        self._sock.close()

    def _lost(self, reason: str) -> None:
        """The socket is of no more use."""
        if self.session is None or self._stage != _FRAMES:
            self.close(reason)
        elif not self.closed and not self._suspended:
            self._suspend()
            Revival(self, self.session, reason)

    def _too_slow(self) -> None:
        if self._stage != _FRAMES:
            self.close("handshake timed out")

    @property
    def is_stranger(self) -> bool:
        """The other end has not proved yet who it is."""
        return self._stage != _FRAMES

    def keep_alive(self, seconds: float) -> None:
        """The kernel closes a connection whose other machine is silent for that long; 0 leaves its defaults."""
        addresses.keep_alive(self._sock, seconds)

    def drain(self) -> None:
        """Reads what a dead process left in the socket, then closes."""
        if self._reading.acquire(timeout=1.0):
            try:
                while not self.closed and self._receive():
                    pass
            finally:
                self._reading.release()
        self.close("process ended")

    def close(self, reason: str) -> None:
        """Idempotent. Tells `on_close` once, wakes blocked senders."""
        with self._lock:
            if self.closed:
                return
            if self.session is not None and not self._suspended and not self._queue and self._stage == _FRAMES:
                with contextlib.suppress(OSError):
                    self._sock.send(Frame(HELLO, 0, self._node, flags=DEAD).head())  # no need to wait for us
            self.closed = True
            self.reason = reason
            self._queue.clear()
            self._queued = 0
            if self._room is not None:
                self._room.notify_all()
        if self._timer is not None:
            self._timer.cancel()
        if not self._suspended:
            self._poller.unwatch(self._fd)
            self._sock.close()
        if self.session is not None and self.sessions.get(self.session.ident) is self:
            del self.sessions[self.session.ident]
        if self.reviving is not None:
            revival, self.reviving = self.reviving, None
            revival.ended(self, reason)
        self._on_close(self, reason)


def release_frame(dest: int, origin: int, segment: int) -> Frame:
    """Tells the owner of a segment that this process no longer uses it."""
    return Frame(RELEASE, dest, origin, segment)
