"""A stretch of network that can be cut, delayed and mended: a TCP relay in this process."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import threading
import time

from monarch.wire import addresses


class _Way:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.waiting: collections.deque[tuple[float, bytes]] = collections.deque()  #: (when it may go on, data)
        self.queued = 0
        self.ended = False


class Link:
    """Relays TCP connections to `address`; connect to `link.address` instead. A context manager.

    cut()        silence: nothing passes in either direction, no connection closes (a dead switch)
    delay(s)     each byte arrives `s` seconds later
    mend()       passes everything on again, also what waited; no delay
    sever()      closes all connections, accepts new ones at once
    drop()       closes all connections, refuses new ones until `mend` (a machine that went down)
    """

    MOST = 1 << 20  #: bytes held back a direction before the relay stops reading

    def __init__(self, address: str) -> None:
        self._to = addresses.parse(address)
        if self._to.scheme != "tcp":
            raise ValueError(f"Link: {address!r} is not a tcp:// address; links are between hosts")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        #: what to connect to instead
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_r, self._wake_w = socket.socketpair()
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._ways: list[_Way] = []
        self._lock = threading.Lock()
        self._cut = self._dropped = self._closed = False
        self._delay = 0.0
        self._severed = False
        self._thread = threading.Thread(target=self._run, name="monarch-link", daemon=True)
        self._thread.start()

    # -- from any thread

    def cut(self) -> None:
        self._change(cut=True)

    def delay(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"delay: seconds must not be negative, got {seconds}")
        self._change(delay=float(seconds))

    def mend(self) -> None:
        self._change(cut=False, dropped=False, delay=0.0)

    def drop(self) -> None:
        self._change(dropped=True)

    def sever(self) -> None:
        self._change(severed=True)

    def close(self) -> None:
        """Closes everything. Idempotent."""
        if not self._closed:
            self._change(closed=True)
            self._thread.join(5)

    def _change(self, **values: object) -> None:
        with self._lock:
            for name, value in values.items():
                setattr(self, "_" + name, value)
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- on the relay's thread

    def _run(self) -> None:
        while not self._closed:
            self._watch()
            for key, _ in self._selector.select(self._next()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_r:
                    self._wake_r.recv(4096)
                else:
                    self._read(key.data)
            if self._dropped or self._severed:
                self._severed = False
                for way in list(self._ways):
                    self._end(way)
            self._pass_on()
        for way in list(self._ways):
            self._end(way)
        for sock in (self._listener, self._wake_r, self._wake_w):
            sock.close()
        self._selector.close()

    def _next(self) -> float | None:
        """Seconds until something delayed is due; short while a full receiver must be tried again."""
        if self._cut:
            return None
        due = [way.waiting[0][0] for way in self._ways if way.waiting]
        return max(0.001, min(due) - time.monotonic()) if due else None

    def _watch(self) -> None:
        watched = {key.fileobj for key in list(self._selector.get_map().values())}
        for way in self._ways:
            wanted = not self._cut and not way.ended and way.queued < self.MOST
            if wanted and way.source not in watched:
                self._selector.register(way.source, selectors.EVENT_READ, way)
            elif not wanted and way.source in watched:
                self._selector.unregister(way.source)

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        if self._dropped:
            near.close()
            return
        try:
            far = addresses.dial(self._to, 5.0)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            addresses.tune(sock)
            sock.setblocking(False)
        self._ways += [_Way(near, far), _Way(far, near)]

    def _read(self, way: _Way) -> None:
        try:
            data = way.source.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        way.waiting.append((time.monotonic() + self._delay, data))
        way.queued += len(data)
        way.ended = not data

    def _pass_on(self) -> None:
        now = time.monotonic()
        for way in list(self._ways):
            while way.waiting and not self._cut and way in self._ways:
                when, data = way.waiting[0]
                if when > now and self._delay:
                    break
                if not data:
                    self._end(way)
                    break
                try:
                    sent = way.sink.send(data)
                except BlockingIOError:
                    break
                except OSError:
                    self._end(way)
                    break
                way.queued -= sent
                if sent < len(data):
                    way.waiting[0] = (when, data[sent:])
                    break
                way.waiting.popleft()

    def _end(self, way: _Way) -> None:
        """Ends a connection, both ways."""
        ends = {way.source, way.sink}
        self._ways = [w for w in self._ways if w.source not in ends]
        for sock in ends:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
