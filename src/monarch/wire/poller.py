"""The runtime thread: one loop per process that reads sockets, runs timers and posted callbacks.

It never runs user code and never blocks, so it answers however busy the actors are. Callbacks must not raise;
one that does is logged and the loop goes on.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger("monarch.runtime")

READ, WRITE = 1, 4  # EPOLLIN/POLLIN and EPOLLOUT/POLLOUT have these values everywhere


class Timer:
    __slots__ = ("when", "callback")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Poller:
    """Start it on a thread of its own with `start`, or on the current one with `run`."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll = None if self._epoll else select.poll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._awake = False
        self._stopping = False
        self.thread: threading.Thread | None = None
        self._ident = 0
        self.watch(self._wake_r.fileno(), READ, self._woken)

    # -- called from any thread

    def post(self, callback: Callable[[], None]) -> None:
        """Runs `callback` on the runtime thread soon, in posting order. Safe inside finalisers."""
        self._posted.append(callback)
        if not self._awake:
            self._awake = True
            try:
                self._wake_w.send(b"x")
            except OSError:  # full (the loop will wake) or closed (the process is ending)
                pass

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, callback)

        def add() -> None:
            heapq.heappush(self._timers, (timer.when, next(self._order), timer))

        if self.is_current():
            add()
        else:
            self.post(add)
        return timer

    def is_current(self) -> bool:
        """True on the runtime thread itself, which must not block."""
        return threading.get_ident() == self._ident

    def stop(self) -> None:
        def stop() -> None:
            self._stopping = True

        self.post(stop)

    def start(self, name: str) -> None:
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)
        self.thread.start()

    # -- called on the runtime thread (or before it starts)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        known = fd in self._handlers
        self._handlers[fd] = handler
        if self._epoll:
            (self._epoll.modify if known else self._epoll.register)(fd, events)
        elif self._poll:
            self._poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            try:
                if self._epoll:
                    self._epoll.unregister(fd)
                elif self._poll:
                    self._poll.unregister(fd)
            except OSError:
                pass

    def run(self) -> None:
        """Loops until `stop`. Waits no longer than the next timer."""
        self._ident = threading.get_ident()
        handlers = self._handlers
        epoll, poll = self._epoll, self._poll
        while not self._stopping:
            wait = self._run_timers()
            try:
                if epoll is not None:
                    events = epoll.poll(wait)
                else:
                    assert poll is not None
                    events = poll.poll(-1 if wait < 0 else wait * 1000)
            except InterruptedError:
                continue
            for fd, event in events:
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler(event)
                    except Exception:
                        log.exception("runtime thread: handler failed")
        self._close()

    def _run_timers(self) -> float:
        timers = self._timers
        while timers:
            wait = timers[0][0] - time.monotonic()
            if wait > 0:
                return wait
            callback = heapq.heappop(timers)[2].callback
            if callback is not None:
                self._guard(callback)
        return -1.0

    def _woken(self, event: int) -> None:
        try:
            self._wake_r.recv(4096)
        except BlockingIOError:
            pass
        self._awake = False
        posted = self._posted
        for _ in range(len(posted)):
            self._guard(posted.popleft())
        if posted and not self._awake:
            self._awake = True
            self._wake_w.send(b"x")

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            log.exception("runtime thread: callback failed")

    def _close(self) -> None:
        self._handlers.clear()
        if self._epoll:
            self._epoll.close()
        self._wake_r.close()
        self._wake_w.close()

    def close_in_child(self) -> None:
        """After a fork in user code: let go of the descriptors without touching the parent's loop."""
        for fd in (self._wake_r, self._wake_w):
            fd.close()
        if self._epoll:
            os.close(self._epoll.fileno())
