"""One stream socket to one other process: handshake, frames in, frames out.

Senders write from their own thread under the connection's lock. What the socket does not take at once is copied
into a queue, which the runtime thread flushes; when the queue is over its limit, senders wait (the runtime thread
never does). Large parts to a process of the same host go through shared memory instead.
"""

from __future__ import annotations

import collections
import collections.abc
import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch.wire import addresses, auth
from monarch.wire.frames import RELEASE, SHM, Bytes, Frame, FrameError, FrameParser
from monarch.wire.poller import EDGE, HANGUP, READ, WRITE, Poller

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
    ) -> None:
        sock.setblocking(False)
        self.peer = peer  #: node id of the other end; 0 until the handshake told it
        self.peer_pid = 0
        self.address = address or addresses.of_peer(sock)  #: of the other end, for people; "" while unknown
        self.closed = False
        self.reason = ""
        self.heard = 0  #: how often something arrived
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
            if self._queue or not self._may_send:
                self._enqueue(head, parts)
            else:
                sent = self._write(head, parts, size)
                if sent < size:
                    self._enqueue(head, parts, skip=sent)
                elif self._tls is not None and self._tls.pending and not self._writing:
                    self._writing = True
                    self._poller.post(self._watch)
            if self._queued <= self._limits.send_queue or self._poller.is_current():
                return
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
            self._poller.post(lambda e=e: self.close(f"connection lost: {e.strerror}"))  # type: ignore[misc]
            raise ConnectionClosed(f"connection lost: {e.strerror}") from None

    def _enqueue(self, head: bytes, parts: collections.abc.Sequence[Bytes], skip: int = 0) -> None:
        for part in (head, *parts):
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            if skip >= view.nbytes:
                skip -= view.nbytes
                continue
            rest = memoryview(bytes(view[skip:]))  # a copy: the caller may change its memory after the call
            skip = 0
            self._queue.append(rest)
            self._queued += rest.nbytes
        if not self._writing and self._may_send:
            self._writing = True
            self._poller.post(self._watch)

    def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = threading.Condition(self._lock)
        while self._queued > self._limits.send_queue // 2 and not self.closed:
            self._room.wait(1.0)

    def _send_raw(self, data: bytes) -> None:
        """Handshake bytes go before any frame; they always fit a fresh socket's buffer."""
        try:
            self._sock.send(data)
        except OSError as e:
            reason = f"connection lost: {e.strerror}"
            self._poller.post(lambda: self.close(reason))

    # -- on the runtime thread

    def _watch(self) -> None:
        if not self.closed:
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
                while more and not self.closed:
                    more = self._receive(bool(event & HANGUP))
            finally:
                self._reading.release()
            if self.closed:
                return

    def _connected(self) -> bool:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            import os

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
                    reason = f"connection lost: {e.strerror}"
                    self._poller.post(lambda: self.close(reason))
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
            reason = f"connection lost: {e.strerror}"
            self._poller.post(lambda: self.close(reason))
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
                        self._on_frame(self, frame)
                    return to_the_end or n == room
            else:
                data = self._sock.recv(_CHUNK)
                if data:
                    if self._stage == _FRAMES:
                        for frame in self._parser.feed(data):
                            self._on_frame(self, frame)
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
            self.close(self._why_lost(e))
            return False
        self.close("connection closed by the peer")
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
                self._on_frame(self, frame)

    def _done(self) -> None:
        self._stage = _FRAMES
        if self._timer is not None:
            self._timer.cancel()
        if self._on_ready is not None:
            self._on_ready(self)
        self._open_gate()

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
            self.closed = True
            self.reason = reason
            self._queue.clear()
            self._queued = 0
            if self._room is not None:
                self._room.notify_all()
        if self._timer is not None:
            self._timer.cancel()
        self._poller.unwatch(self._fd)
        self._sock.close()
        self._on_close(self, reason)


def release_frame(dest: int, origin: int, segment: int) -> Frame:
    """Tells the owner of a segment that this process no longer uses it."""
    return Frame(RELEASE, dest, origin, segment)
