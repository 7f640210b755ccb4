"""The initiator's side of the paths to another host: sockets of our own, and the framework's messages.

tcp     a few connections per peer; large transfers are split over them
relay   chunks in control messages, several under way; works wherever an actor message gets through
"""

from __future__ import annotations

import collections
import ctypes
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch.config import store
from monarch.rdma import _nixl, _wire
from monarch.rdma._handle import Handle, machine
from monarch.rdma._paths import Op, Path
from monarch.rdma._peer import Cancelled, Dropped, Gone, Peer, Refused
from monarch.runtime.future import Future
from monarch.wire import addresses, pickling
from monarch.wire.frames import CONTROL, Frame

if TYPE_CHECKING:
    from monarch.rdma._manager import Manager

log = logging.getLogger("monarch.rdma")

#: requests of small reads that go out before the first answer is read: they fit into a socket buffer
_PIPELINE = 64
_RELAY_WINDOW = 4


def local_view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def wait_for(future: Future[Any], cancelled: Callable[[], bool]) -> Any:
    """The result, looking at `cancelled` now and then."""
    while True:
        try:
            return future.get(timeout=_wire.POLL)
        except TimeoutError:
            if future.done():
                raise
            if cancelled():
                raise Cancelled from None


class Sockets(Path):
    """See the module's text."""

    name = "tcp"

    def __init__(self, host: str, port: int, key_id: int, key: bytes) -> None:
        self._where = host, port
        self._key = key_id, key
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.closed = False
        self._give(self._dial())

    def _dial(self) -> socket.socket:
        try:
            sock = socket.create_connection(self._where, timeout=_wire.HANDSHAKE)
        except OSError as e:
            raise Refused(f"no data connection to {self._where[0]}:{self._where[1]}: {e}") from None
        try:
            _wire.tune(sock)
            _wire.greet(sock, *self._key)
        except _wire.Lost as e:
            sock.close()
            raise Refused(str(e)) from None
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._all.add(sock)
        return sock

    def _take(self) -> socket.socket:
        with self._lock:
            if self.closed:
                raise Gone
            if self._idle:
                return self._idle.pop()
        try:
            return self._dial()
        except Refused as e:
            raise Gone(str(e)) from None

    def _give(self, sock: socket.socket) -> None:
        with self._lock:
            if not self.closed and len(self._idle) < 2 * max(1, int(store.effective("rdma_tcp_fallback_parallelism"))):
                self._idle.append(sock)
                return
            self._all.discard(sock)
        sock.close()

    def _use(self, action: Callable[[socket.socket], None]) -> None:
        sock = self._take()
        try:
            action(sock)
        except (_wire.Lost, Cancelled) as e:
            with self._lock:
                self._all.discard(sock)
            sock.close()
            if isinstance(e, Cancelled):
                raise
            raise Gone(f"the data connection to its host was lost: {e}") from None
        except BaseException:
            self._give(sock)  # refused by the other side in good order
            raise
        self._give(sock)

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        stripes = self._stripes(op)
        if len(stripes) == 1:
            self._use(lambda sock: self._move(sock, op, 0, op.nbytes, cancelled))
            return
        errors: list[BaseException] = []

        def other(start: int, n: int) -> None:
            try:
                self._use(lambda sock: self._move(sock, op, start, n, cancelled))
            except BaseException as e:
                errors.append(e)

        threads = [
            threading.Thread(target=other, args=stripe, name="monarch-rdma-stripe", daemon=True)
            for stripe in stripes[1:]
        ]
        for t in threads:
            t.start()
        other(*stripes[0])
        for t in threads:
            t.join()
        if errors:
            raise errors[0]

    def _stripes(self, op: Op) -> list[tuple[int, int]]:
        if op.runs is not None:
            return [(0, op.nbytes)]
        smallest = max(1, int(store.effective("rdma_min_stripe_size_kb"))) << 10
        n = max(1, min(int(store.effective("rdma_tcp_fallback_parallelism")), op.nbytes // max(smallest, 1 << 20)))
        size = -(-op.nbytes // n)
        return [(start, min(size, op.nbytes - start)) for start in range(0, op.nbytes, size)]

    @staticmethod
    def _move(sock: socket.socket, op: Op, start: int, n: int, cancelled: Callable[[], bool]) -> None:
        h = op.handle
        if op.runs is not None:
            request = _wire.REQUEST.pack(_wire.GATHER, h.slot.at, h.node, h.slot.id, op.offset, n)
            _wire.send(sock, [request, _wire.RUNS.pack(*op.runs)], cancelled)
            _receive_all(sock, local_view(op.local.address, n), cancelled)
            return
        kind = _wire.WRITE if op.write else _wire.READ
        request = _wire.REQUEST.pack(kind, h.slot.at, h.node, h.slot.id, op.offset + start, n)
        local = local_view(op.local.address + start, n)
        if op.write:
            _wire.send(sock, [request, local], cancelled)
            _receive_header(sock, cancelled)
            return
        _wire.send(sock, [request], cancelled)
        _receive_all(sock, local, cancelled)

    def run_many(self, ops: Sequence[Op], cancelled: Callable[[], bool]) -> dict[int, Exception]:
        """Small reads, many requests ahead of the answers. The errors by position in `ops`."""
        failed: dict[int, Exception] = {}

        def do(sock: socket.socket) -> None:
            for first in range(0, len(ops), _PIPELINE):
                part = ops[first : first + _PIPELINE]
                requests = [(o.handle.slot, o) for o in part]
                _wire.send(
                    sock,
                    [b"".join(_wire.REQUEST.pack(_wire.READ, s.at, o.handle.node, s.id, o.offset, o.nbytes)
                              for s, o in requests)],
                    cancelled,
                )  # fmt: skip
                for i, op in enumerate(part):
                    try:
                        _receive_all(sock, local_view(op.local.address, op.nbytes), cancelled)
                    except (_wire.Lost, Cancelled):
                        raise
                    except Exception as e:
                        failed[first + i] = e

        self._use(do)
        return failed

    def close(self) -> None:
        with self._lock:
            self.closed = True
            socks = list(self._all)
            for sock in self._idle:
                self._all.discard(sock)
                sock.close()
            self._idle.clear()
        for sock in socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # who uses it now is woken, and closes it
            except OSError:
                pass


def _receive_header(sock: socket.socket, cancelled: Callable[[], bool]) -> int:
    """The bytes that follow; raises what the other side says instead."""
    head = memoryview(bytearray(_wire.HEADER.size))
    _wire.receive(sock, head, cancelled)
    status, n = _wire.HEADER.unpack(head)
    if status == _wire.OK:
        return int(n)
    text = memoryview(bytearray(min(n, 4096)))
    _wire.receive(sock, text, cancelled)
    _wire.raise_status(status, bytes(text).decode(errors="replace"))
    return 0


def _receive_all(sock: socket.socket, local: memoryview, cancelled: Callable[[], bool]) -> None:
    at = 0
    while at < len(local):
        n = _receive_header(sock, cancelled)
        if not 0 < n <= len(local) - at:
            raise _wire.Lost("the other side sends more than was asked for")
        _wire.receive(sock, local[at : at + n], cancelled)
        at += n


class Relay(Path):
    """See the module's text."""

    name = "relay"

    def __init__(self, manager: Manager, handle: Handle, dest: int) -> None:
        self.manager, self.handle, self.dest = manager, handle, dest

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        size = min(2 * _wire.CHUNK, max(1, int(store.effective("rdma_max_chunk_size_mb"))) << 20)
        if op.runs is not None:
            size = max(1, size // op.runs.length) * op.runs.length
        chunks = [(start, min(size, op.nbytes - start)) for start in range(0, op.nbytes, size)]
        flying: collections.deque[tuple[int, int, Any]] = collections.deque()
        todo = iter(chunks)
        while True:
            while len(flying) < _RELAY_WINDOW:
                chunk = next(todo, None)
                if chunk is None:
                    break
                flying.append((*chunk, self._ask(op, *chunk)))
            if not flying:
                return
            start, n, answer = flying.popleft()
            try:
                head, body = wait_for(answer.future, cancelled)
            except Cancelled:
                for _, _, other in flying:
                    other.settle(None)
                answer.settle(None)
                raise
            if head[0] != _wire.OK:
                _wire.raise_status(head[0], bytes(body).decode(errors="replace"))
            if not op.write:
                if len(body) != n:
                    raise OSError(f"{len(body)} bytes came where {n} were asked for")
                local_view(op.local.address + start, n)[:] = body

    def _ask(self, op: Op, start: int, n: int) -> Any:
        from monarch.rdma._manager import Answer

        h, node = op.handle, self.manager.node
        answer = Answer(node, (h.node, h.host.agent))
        offset = op.offset + (start if op.runs is None else start // op.runs.length * op.runs.stride)
        args = (h.node, h.slot.at, h.slot.id, offset)
        parts: list[Any] = [b""]
        if op.write:
            parts += [pickling.dump_bytes(("rdma_put", *args)), bytes(local_view(op.local.address + start, n))]
        else:
            parts.append(pickling.dump_bytes(("rdma_get", *args, n, *(op.runs or ()))))
        try:
            node.send(Frame(CONTROL, self.dest, node.id, 0, parts, reply=answer.ident), h.host)
        except Exception as e:
            answer.settle(error=Gone(str(e)))
        return answer


def find(manager: Manager, handle: Handle, cancelled: Callable[[], bool]) -> Path:
    """Asks the owner's host, and if it says so the owner, how to reach its memory. Raises Gone, Refused."""
    if handle.gpu and handle.machine == machine() != 0:
        return _ipc(manager, handle)
    if _nixl.usable():
        try:
            return _nixl.Nixl(manager, handle)
        except Refused as e:
            log.info("%s: no way by nixl (%s): taking the next path", handle.owner, e)
    if not store.effective("rdma_allow_tcp_fallback"):
        raise Refused("sockets are turned off (rdma_allow_tcp_fallback=False)")
    dest = handle.host.agent if not handle.gpu else handle.node
    answer = _question(manager, handle, dest, cancelled)
    if answer[0] == "owner":
        dest = handle.node
        answer = _question(manager, handle, dest, cancelled)
    if answer[0] == "gone":
        raise Gone(answer[1])
    where = _dial_host(manager, handle)
    if answer[0] == "ok" and where:
        try:
            return Sockets(where, *answer[1:])
        except Refused:
            pass
    return Relay(manager, handle, dest)


def _ipc(manager: Manager, handle: Handle) -> Path:
    from monarch.rdma._cuda import Ipc
    from monarch.rdma._manager import Answer

    def ask(handle: Handle) -> Any:
        answer = Answer(manager.node, (handle.node, handle.host.agent))
        if not manager.node.tell(handle.node, "rdma_ipc", handle.slot.id, host=handle.host, reply=answer.ident):
            answer.settle()
            raise Gone
        got = pickling.loads(answer.future.get(timeout=30)[1])
        if got is None:
            raise Dropped("it was dropped")
        return got

    return Ipc(Peer(handle.pid, handle.table, handle.cookie), ask)


def _question(manager: Manager, handle: Handle, dest: int, cancelled: Callable[[], bool]) -> tuple[Any, ...]:
    from monarch.rdma._manager import Answer

    node = manager.node
    answer = Answer(node, (handle.node, handle.host.agent))
    if not node.tell(dest, "rdma_dial", handle.node, host=handle.host, reply=answer.ident):
        answer.settle()
        raise Gone
    try:
        parts = wait_for(answer.future, cancelled)
    except Cancelled:
        answer.settle()
        raise
    got: tuple[Any, ...] = pickling.loads(parts[1])
    return got


def _dial_host(manager: Manager, handle: Handle) -> str:
    """Where data connections to the owner's host go; "" when sockets of our own cannot, or must not, be used."""
    if handle.host.agent == manager.host.agent:
        return "127.0.0.1"
    try:
        address = addresses.parse(handle.host.address)
    except ValueError:
        return ""
    return address.host if address.scheme == "tcp" else ""  # inside TLS, messages are what is encrypted
