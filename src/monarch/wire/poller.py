"""The runtime thread: one loop per process that reads sockets, runs timers and posted callbacks.

It never runs user code and never blocks, so it answers however busy the actors are. Callbacks must not raise;
one that does is logged and the loop goes on.

Guests. Waking a sleeping thread costs more than everything else in a round trip. So a thread that would only wait
for a message (a caller in `Future.get`, an idle actor) may wait in the same epoll as the runtime thread: the kernel
wakes the latest waiter, which reads the socket itself and finds its own message there, without a hand-over. One
guest at a time; when it goes off to run user code, the runtime thread is still there. Sockets are edge-triggered, so
that one event wakes one thread. Measured on two cores: a round trip falls from 215 to about 110 microseconds.

Staying awake. Waking a processor that went to sleep costs more still. A guest whose last wait was short looks again
and again for up to `spin` seconds (yielding to whoever else can run) before it sleeps: a round trip then takes 35 to
75 microseconds. A wait that turns out long is followed by one that sleeps at once, so an idle process burns nothing.
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
EDGE = getattr(select, "EPOLLET", 0)
HANGUP = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLHUP", 0x10)
_PEER_CLOSED = getattr(select, "EPOLLRDHUP", 0)


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _nothing() -> None:
    """Only wakes the loop."""


class Timer:
    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Poller:
    """Start it on a thread of its own with `start`, or on the current one with `run`.

    `spin`: seconds that a guest stays awake before it sleeps, when an answer is likely within that time.
    """

    def __init__(self, spin: float = 0.0) -> None:
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
        self._timer_lock = threading.Lock()
        self._rearm = False
        self._slot = threading.Lock()
        self._guest = 0  #: ident of the guest thread, 0 for none
        self._guest_is_idle = False
        self._guest_since = 0.0
        self._spin = spin if _cpus() > 1 else 0.0
        self._spun = False
        self._last_wait = 1.0
        self._evict = False
        self._called = False
        self._call_r, self._call_w = socket.socketpair()
        self._call_r.setblocking(False)
        self._call_w.setblocking(False)
        self.watch(self._wake_r.fileno(), READ | EDGE, self._woken)
        self.watch(self._call_r.fileno(), READ, self._guest_called)

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
        with self._timer_lock:
            heapq.heappush(self._timers, (timer.when, next(self._order), timer))
            first = self._timers[0][2] is timer
        if first and threading.get_ident() != self._ident:
            self._rearm = True
            self.post(_nothing)
        return timer

    def is_current(self) -> bool:
        """True on a thread that is serving this loop now (the runtime thread, or its guest), which must not block."""
        ident = threading.get_ident()
        return ident == self._ident or ident == self._guest

    # -- guests

    def enter(self, idle: bool) -> bool:
        """Asks for the guest's place.

        A refused caller that waits for an answer sends an idle guest away, so that it finds the place free next time;
        so does an idle actor when the guest has been idle for a while.
        """
        if self._epoll is None or self._stopping:
            return False
        if not self._slot.acquire(blocking=False):
            long_idle = time.monotonic() - self._guest_since > 0.005
            if self._guest_is_idle and not self._evict and (long_idle or not idle):
                self._evict = True
                self.call_guest()
            return False
        self._evict = False
        self._guest_is_idle = idle
        if idle:
            self._guest_since = time.monotonic()
        self._guest = threading.get_ident()
        return True

    def leave(self) -> None:
        self._guest = 0
        self._slot.release()

    def wait(self, done: Callable[[], object], timeout: float | None, patient: bool = False) -> bool:
        """Serves the loop as its guest until `done()`; False after `timeout` seconds or when sent away.

        `patient`: sleeps at once, because many processes must run before this wait can end, and need the processors.
        """
        epoll, handlers = self._epoll, self._handlers
        assert epoll is not None
        end = None if timeout is None else time.monotonic() + timeout
        while not done():
            if self._evict or self._stopping:
                return False
            left = -1.0
            if end is not None:
                left = end - time.monotonic()
                if left <= 0:
                    return False
            for fd, event in epoll.poll(left) if patient else self._poll_briefly_awake(epoll, left):
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler(event)
                    except Exception:
                        log.exception("runtime guest: handler failed")
        return True

    def _poll_briefly_awake(self, epoll: select.epoll, left: float) -> list[tuple[int, int]]:
        """`epoll.poll(left)`, staying awake for the first `spin` seconds when an event is likely to come that soon."""
        began = time.perf_counter()
        spin = self._spin
        if left >= 0:
            spin = min(spin, left)
        # Likely: the last wait was that short; or it slept, and staying awake might have made it that short.
        if self._last_wait < self._spin or (not self._spun and self._last_wait < 2 * self._spin):
            self._spun = True
            while time.perf_counter() - began < spin:
                events = epoll.poll(0)
                if events:
                    self._last_wait = time.perf_counter() - began
                    return events
                os.sched_yield()
        else:
            self._spun = False
        events = epoll.poll(left)
        self._last_wait = time.perf_counter() - began
        return events

    def call_guest(self) -> None:
        """Makes the guest look again at what it waits for. Nothing when the caller is the guest."""
        if self._guest and self._guest != threading.get_ident():
            self._called = True
            try:
                self._call_w.send(b"x")
            except OSError:
                pass

    def _guest_called(self, event: int) -> None:
        if self._guest and threading.get_ident() != self._guest:
            time.sleep(20e-6)  # level-triggered: the guest sees it too, as soon as it looks
            return
        try:
            self._call_r.recv(4096)
        except OSError:
            pass

    def stop(self) -> None:
        self._stopping = True
        self.call_guest()
        self.post(_nothing)

    def start(self, name: str) -> None:
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)
        self.thread.start()

    # -- called on the runtime thread (or before it starts)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        known = fd in self._handlers
        self._handlers[fd] = handler
        if events & EDGE:
            events |= _PEER_CLOSED
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
        self._ident = 0
        self._close()

    def _run_timers(self) -> float:
        timers = self._timers
        self._rearm = False
        while timers:
            with self._timer_lock:
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
            try:
                callback = posted.popleft()
            except IndexError:  # the guest took it
                break
            self._guard(callback)
        again = posted and not self._awake
        if again or ((self._rearm or self._stopping) and threading.get_ident() != self._ident):
            self._awake = True
            try:
                self._wake_w.send(b"x")
            except OSError:
                pass

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            log.exception("runtime thread: callback failed")

    def _close(self) -> None:
        self._handlers.clear()
        if self._epoll and self._slot.acquire(timeout=1.0):  # a guest still polls it otherwise
            self._epoll.close()
        for sock in (self._wake_r, self._wake_w, self._call_r, self._call_w):
            sock.close()

    def close_in_child(self) -> None:
        """After a fork in user code: let go of the descriptors without touching the parent's loop."""
        for fd in (self._wake_r, self._wake_w):
            fd.close()
        if self._epoll:
            os.close(self._epoll.fileno())
