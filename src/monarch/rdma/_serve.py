"""Serves the memory of this host's processes to other hosts: in the host agent, or in an owner it may not look into.

The agent reaches an owner's memory through the kernel, so an owner that computes does not slow a transfer. What a
request may touch is decided by the owner's table alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from monarch.config import store
from monarch.rdma import _wire, _work
from monarch.rdma._manager import manager
from monarch.rdma._peer import Cancelled, Dropped, Gone, Move, Peer, Refused, _never
from monarch.rdma._runs import Runs
from monarch.rdma._table import CUDA, READONLY, Slot, Table
from monarch.runtime.failure import Exit
from monarch.runtime.node import Node, Port
from monarch.wire import addresses, pickling
from monarch.wire.frames import Frame
from monarch.wire.poller import READ

log = logging.getLogger("monarch.rdma")

#: connections whose handshake is not done
_MOST_STRANGERS = 64
#: seconds to wait for a new owner to say where its table is
_INTRODUCTION = 2.0


class Server:
    """One per process that serves; made by the first question."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.tables: dict[int, tuple[int, int, int]] = {}  #: owner -> pid, table, cookie
        self.sources: dict[int, Source] = {}
        self.known = threading.Condition()
        self._keys: dict[int, bytes] = {}
        self._key_of: dict[int, int] = {}
        self._listener: socket.socket | None = None
        self._port = 0
        self._open: set[socket.socket] = set()
        self._strangers = 0
        self._lock = threading.Lock()
        node.open_port(_End(self))
        node.on_node_down.append(self._on_node_down)

    # -- control messages

    def on_table(self, frame: Frame, pid: int, table: int, cookie: int) -> None:
        """An owner of this host says where its table is."""
        with self.known:
            self.tables[frame.origin] = (pid, table, cookie)
            self.known.notify_all()

    def on_dial(self, frame: Frame, owner: int) -> None:
        """A process wants a data connection: where to dial and what to prove; or "owner", to be asked instead."""
        _work.submit(lambda: self._dial(frame, owner))

    def _dial(self, frame: Frame, owner: int) -> None:
        if self.node.trust is not None and self.node.trust.kind == "tls":
            self.node.reply(frame, 0, (b"", pickling.dumps(("no", "data sockets are not encrypted")).stream()))
            return
        try:
            self.source(owner)
            answer: tuple[Any, ...] = ("ok", *self._ticket(frame.origin))
        except Refused:
            answer = ("owner",)
        except Gone as e:
            answer = ("gone", str(e))
        except OSError as e:
            answer = ("no", str(e))
        self.node.reply(frame, 0, (b"", pickling.dumps(answer).stream()))

    def on_get(self, frame: Frame, owner: int, at: int, ident: int, offset: int, n: int, *shape: int) -> None:
        """A read by message; of runs, when their length and stride are given."""

        def do() -> None:
            data = bytearray(min(n, 2 * _wire.CHUNK))
            try:
                source = self.source(owner)
                if shape:
                    runs = Runs(*shape)
                    slot = source.gather_slot(at, ident, offset, len(data), runs)
                    source.gather(slot, offset, memoryview(data), runs)
                else:
                    source.read(source.slot(at, ident, offset, len(data), False), offset, memoryview(data))
                status, body = _wire.OK, bytes(data)
            except Exception as e:
                status, body = _wire.status_of(e)
            self.node.reply(frame, 0, (bytes([status]), body))

        _work.submit(do)

    def on_put(self, frame: Frame, owner: int, at: int, ident: int, offset: int) -> None:
        """A write by message; the bytes are the frame's third part."""
        data = memoryview(bytearray(frame.parts[2]))

        def do() -> None:
            try:
                source = self.source(owner)
                source.write(source.slot(at, ident, offset, len(data), True), offset, data)
                status, body = _wire.OK, b""
            except Exception as e:
                status, body = _wire.status_of(e)
            self.node.reply(frame, 0, (bytes([status]), body))

        _work.submit(do)

    # -- whose memory

    def source(self, owner: int) -> Source:
        """The way to an owner's memory. Raises Refused (ask the owner itself), Gone."""
        found = self.sources.get(owner)
        if found is not None:
            return found
        if owner == self.node.id or owner in self.node.aliases:
            made: Source = Own(manager().table)
        else:
            agent = self.node.agent
            if agent is None or owner not in agent.processes:
                exit = self.node.down.get(owner)
                raise Gone(exit.describe() if exit is not None else "there is no such process on this host")
            if store.effective("rdma_disable_vm_access"):
                raise Refused("turned off by rdma_disable_vm_access")
            end = time.monotonic() + _INTRODUCTION
            with self.known:
                while owner not in self.tables:
                    if not self.known.wait(end - time.monotonic()) and time.monotonic() >= end:
                        raise Refused("the owner has not said where its registrations are")
            made = Foreign(Peer(*self.tables[owner]), self.node, owner)
        return self.sources.setdefault(owner, made)

    def _on_node_down(self, node: int, exit: Exit) -> None:
        self.tables.pop(node, None)
        source = self.sources.pop(node, None)
        if source is not None:
            source.close()
        with self._lock:
            self._keys.pop(self._key_of.pop(node, 0), None)

    # -- connections

    def _ticket(self, asker: int) -> tuple[int, int, bytes]:
        """(port, key id, key): what `asker` needs for a data connection."""
        with self._lock:
            if self._listener is None:
                self._listen()
            ident = self._key_of.setdefault(asker, random.getrandbits(60) | 1)
            key = self._keys.setdefault(ident, os.urandom(32))
            return self._port, ident, key

    def _listen(self) -> None:
        where = self.node.address or "ipc://"
        if not where.startswith("tcp:") and self.node.agent is None:
            from monarch.runtime import client

            where = str(client.current_host().address)
        host = "127.0.0.1"
        if where.startswith("tcp:"):
            address = addresses.parse(where)
            host = addresses.parse(address.bind).host if address.bind else address.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=64)
        sock.setblocking(False)
        self._listener, self._port = sock, sock.getsockname()[1]

        def accept(event: int) -> None:
            try:
                conn, _ = sock.accept()
            except OSError:
                return
            with self._lock:
                if self._strangers >= _MOST_STRANGERS:
                    conn.close()
                    return
                self._strangers += 1
                self._open.add(conn)
            threading.Thread(target=self._serve, args=(conn,), name="monarch-rdma-serve", daemon=True).start()

        self.node.poller.post(lambda: self.node.poller.watch(sock.fileno(), READ, accept))

    def _serve(self, conn: socket.socket) -> None:
        try:
            try:
                conn.setblocking(True)
                _wire.tune(conn)
                admitted = _wire.admit(conn, self._keys.get)
            finally:
                with self._lock:
                    self._strangers -= 1
            if admitted:
                conn.settimeout(None)
                _Session(self, conn).run()
        except (_wire.Lost, Cancelled, OSError) as e:
            log.debug("a data connection ended: %s", e)
        finally:
            with self._lock:
                self._open.discard(conn)
            conn.close()

    def close(self) -> None:
        if self._listener is not None:
            self.node.poller.unwatch(self._listener.fileno())
            self._listener.close()
        with self._lock:
            conns = list(self._open)
        for conn in conns:
            try:
                conn.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class _End(Port):
    """Closes the server when its node ends."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def deliver(self, frame: Frame) -> None:
        pass

    def node_down_all(self, reason: str) -> None:
        self.server.close()


class _Session:
    """One data connection."""

    def __init__(self, server: Server, conn: socket.socket) -> None:
        self.server, self.conn = server, conn
        self.bounce = memoryview(bytearray(_wire.CHUNK))

    def run(self) -> None:
        request = memoryview(bytearray(_wire.REQUEST.size))
        while True:
            _wire.receive(self.conn, request, _never)
            op, at, owner, ident, offset, n = _wire.REQUEST.unpack(request)
            if op == _wire.GATHER:
                shape = memoryview(bytearray(_wire.RUNS.size))
                _wire.receive(self.conn, shape, _never)
                self._gather(owner, at, ident, offset, n, Runs(*_wire.RUNS.unpack(shape)))
            else:
                (self._write if op == _wire.WRITE else self._read)(owner, at, ident, offset, n)

    def _gather(self, owner: int, at: int, ident: int, offset: int, n: int, runs: Runs) -> None:
        with self._saying_why():
            source = self.server.source(owner)
            slot = source.gather_slot(at, ident, offset, n, runs)
            whole, done = _wire.CHUNK // runs.length * runs.length, 0
            while done < n:
                size = min(whole, n - done)
                source.gather(slot, offset + done // runs.length * runs.stride, self.bounce[:size], runs)
                _wire.send(self.conn, [_wire.HEADER.pack(_wire.OK, size), self.bounce[:size]], _never)
                done += size

    def _read(self, owner: int, at: int, ident: int, offset: int, left: int) -> None:
        with self._saying_why():
            source = self.server.source(owner)
            slot = source.slot(at, ident, offset, left, False)
            while left:
                n = min(left, _wire.CHUNK)
                chunk = source.lend(slot, offset, n)
                if chunk is None:
                    chunk = self.bounce[:n]
                    source.read(slot, offset, chunk)
                _wire.send(self.conn, [_wire.HEADER.pack(_wire.OK, n), chunk], _never)
                offset += n
                left -= n

    @contextlib.contextmanager
    def _saying_why(self) -> Iterator[None]:
        """What fails in a read is said to who asked; the connection goes on."""
        try:
            yield
        except (_wire.Lost, Cancelled):
            raise
        except Exception as e:
            status, text = _wire.status_of(e)
            _wire.send(self.conn, [_wire.HEADER.pack(status, len(text)), text], _never)

    def _write(self, owner: int, at: int, ident: int, offset: int, left: int) -> None:
        error: Exception | None = None
        source, slot = None, None
        try:
            source = self.server.source(owner)
            slot = source.slot(at, ident, offset, left, True)
        except Exception as e:
            error = e
        while left:  # all of it, also after an error: the next request is behind it
            n = min(left, _wire.CHUNK)
            _wire.receive(self.conn, self.bounce[:n], _never)
            if error is None:
                try:
                    assert source is not None and slot is not None
                    source.write(slot, offset, self.bounce[:n])
                except Exception as e:
                    error = e
            offset += n
            left -= n
        status, text = (_wire.OK, b"") if error is None else _wire.status_of(error)
        _wire.send(self.conn, [_wire.HEADER.pack(status, len(text)), text], _never)


class Source:
    """An owner's memory, for the server. All raise Dropped, Gone, PermissionError."""

    def slot(self, at: int, ident: int, offset: int, n: int, write: bool) -> Slot:
        """The registration, after checking that the request stays inside it."""
        slot = self.find(at, ident)
        if offset + n > slot.size:
            raise PermissionError(f"bytes {offset} to {offset + n} are outside the buffer of {slot.size} bytes")
        if write and slot.flags & READONLY:
            raise PermissionError("the buffer is read-only memory")
        return slot

    def gather_slot(self, at: int, ident: int, offset: int, n: int, runs: Runs) -> Slot:
        """As `slot`, for a read of runs."""
        if not 0 < runs.length <= runs.stride or n % runs.length or runs.length > _wire.LONGEST_RUN:
            raise PermissionError(f"{n} bytes in runs of {runs.length}, {runs.stride} apart, are not a gather")
        return self.slot(at, ident, offset, runs.end(offset, n) - offset, False)

    def gather(self, slot: Slot, offset: int, view: memoryview, runs: Runs) -> None:
        at = 0
        for start, n in runs.parts(offset, 0, len(view)):
            self.read(slot, start, view[at : at + n])
            at += n

    def find(self, at: int, ident: int) -> Slot:
        raise NotImplementedError

    def lend(self, slot: Slot, offset: int, n: int) -> memoryview | None:
        """The bytes themselves, where they are in this process."""
        return None

    def read(self, slot: Slot, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def write(self, slot: Slot, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Foreign(Source):
    """Memory of another process of this host."""

    def __init__(self, peer: Peer, node: Node, owner: int) -> None:
        self.peer, self.node, self.owner = peer, node, owner

    def find(self, at: int, ident: int) -> Slot:
        slot = self.peer.slot(at, ident)
        if slot.flags & CUDA:
            raise Refused("GPU memory is served by its owner")
        return slot

    def read(self, slot: Slot, offset: int, view: memoryview) -> None:
        self.peer.read(Move(slot, offset, address_of(view), len(view)))

    def gather(self, slot: Slot, offset: int, view: memoryview, runs: Runs) -> None:
        self.peer.gather(Move(slot, offset, address_of(view), len(view)), runs)

    def write(self, slot: Slot, offset: int, view: memoryview) -> None:
        self.peer.write(Move(slot, offset, address_of(view), len(view)))

    def close(self) -> None:
        self.peer.close()


class Own(Source):
    """Memory of this very process."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def find(self, at: int, ident: int) -> Slot:
        slot = self.table.slot(ident)
        if slot is None or slot.at != at:
            raise Dropped("it was dropped")
        return slot

    def lend(self, slot: Slot, offset: int, n: int) -> memoryview | None:
        region = self.table.get(slot.id)
        if region is None:
            raise Dropped("it was dropped, or its memory released or moved")
        if region.device != "cpu":
            return None
        lent = (ctypes.c_char * n).from_address(region.address + offset)
        lent._keep = region  # type: ignore[attr-defined]
        return memoryview(lent).cast("B")

    def read(self, slot: Slot, offset: int, view: memoryview) -> None:
        region = self._region(slot)
        if region.device != "cpu":
            from monarch.rdma import _cuda

            _cuda.read(region, offset, view)
        else:
            ctypes.memmove(address_of(view), region.address + offset, len(view))

    def write(self, slot: Slot, offset: int, view: memoryview) -> None:
        region = self._region(slot)
        if region.device != "cpu":
            from monarch.rdma import _cuda

            _cuda.write(region, offset, view)
        else:
            ctypes.memmove(region.address + offset, address_of(view), len(view))

    def _region(self, slot: Slot) -> Any:
        region = self.table.get(slot.id)
        if region is None:
            raise Dropped("it was dropped, or its memory released or moved")
        return region


def install(node: Node) -> None:
    """Adds the handlers of this module to a node: called when the first of their messages arrives."""
    server = Server(node)
    node.control |= {
        "rdma_table": server.on_table,
        "rdma_dial": server.on_dial,
        "rdma_get": server.on_get,
        "rdma_put": server.on_put,
    }
