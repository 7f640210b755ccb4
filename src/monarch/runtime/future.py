"""Future: a result that may be waited for by threads and by coroutines, from one implementation.

A result is kept as it arrived and decoded by the first observer, so that user code in `__setstate__` never runs on
the runtime thread. Coroutines are woken through one `Bridge` per event loop, which turns a burst of results into one
wake-up.
"""

from __future__ import annotations

import asyncio
import collections
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from monarch.runtime.errors import WouldBlockRuntime

R = TypeVar("R")

_UNSET: Any = object()

#: the process's poller, in which one waiting thread may wait as a guest; set when the node exists
guest_poller: Any = None

#: set by executors: what a blocking wait on this thread must do (safe points); None elsewhere
thread_wait = threading.local()


class Bridge:
    """Runs callbacks on one event loop from other threads, with one wake-up for a burst."""

    _all: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._scheduled = False
        self.thread = 0  #: set for loops that wait as the poller's guest

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Bridge:
        bridge = cls._all.get(loop)
        if bridge is None:
            bridge = cls._all.setdefault(loop, cls(loop))
        return bridge

    def call(self, callback: Callable[[], None]) -> None:
        self._calls.append(callback)
        if not self._scheduled:
            self._scheduled = True
            loop = self._loop()
            try:
                if loop is None:
                    return
                if threading.get_ident() == self.thread:  # the loop's own thread, as the poller's guest
                    loop.call_soon(self._run)
                else:
                    loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # the loop is closed: nobody is waiting there any more
                pass

    def _run(self) -> None:
        self._scheduled = False
        calls = self._calls
        for _ in range(len(calls)):
            calls.popleft()()


class _NoLoop(RuntimeError, ValueError):
    """Awaiting outside an event loop; both types, since programs match either."""


def check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if not isinstance(timeout, (int, float)) or not math.isfinite(timeout) or timeout < 0:
        raise ValueError(f"invalid timeout {timeout!r}: expected a finite number of seconds >= 0, or None")


def on_runtime_thread() -> bool:
    """True on the process's runtime thread, which must not wait for anything it would itself bring about."""
    return guest_poller is not None and guest_poller._ident == threading.get_ident()


def running_loop() -> asyncio.AbstractEventLoop | None:
    return asyncio._get_running_loop()


class Future(Generic[R]):
    """The result of a call, a receive, a stop. Made by the framework only.

    `get(timeout)` blocks a thread, `await` suspends a coroutine; both may be used many times, from many threads and
    loops, and give the same value or raise the same exception object. Waiting too briefly (`TimeoutError`) or
    cancelling an observer never cancels the work.
    """

    __slots__ = (
        "__weakref__",
        "_decode",
        "_error",
        "_lock",
        "_observe",
        "_on_timeout",
        "_patient",
        "_ready",
        "_seen",
        "_self_call",
        "_value",
        "_waiters",
    )
    _lock: threading.Lock
    _ready: bool
    _value: Any
    _error: BaseException | None
    _decode: Callable[[], Any] | None
    _waiters: list[Callable[[], None]] | None
    _observe: Callable[[], None] | None
    _patient: bool  #: many must answer: whoever waits sleeps at once
    _seen: bool
    _self_call: Any  #: a call of an actor to itself: where it was made
    _on_timeout: Callable[[Any], None] | None  #: called with this future when a wait timed out and nobody waits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"Future.__init__() got an unexpected keyword argument '{next(iter(kwargs))}'")
        raise TypeError("Future objects are returned by Monarch operations; they cannot be made directly")

    @classmethod
    def _make(cls, observe: Callable[[], None] | None = None) -> Future[Any]:
        """An unsettled future. `observe` is called once, by the first observer, before it waits."""
        self = cls.__new__(cls)
        self._lock = threading.Lock()
        self._ready = False
        self._value = _UNSET
        self._error = None
        self._decode = None
        self._waiters = None
        self._observe = observe
        self._seen = self._patient = False
        self._self_call = None
        self._on_timeout = None
        return self

    @classmethod
    def _of(cls, value: Any) -> Future[Any]:
        self = cls._make()
        self._settle(value)
        return self

    # -- settling, by the framework, from any thread

    def _settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        return self._finish(value, error, None)

    def _settle_lazily(self, decode: Callable[[], Any]) -> bool:
        return self._finish(_UNSET, None, decode)

    def _finish(self, value: Any, error: BaseException | None, decode: Callable[[], Any] | None) -> bool:
        with self._lock:
            if self._ready:
                return False
            self._value, self._error, self._decode = value, error, decode
            self._ready = True
            waiters, self._waiters = self._waiters, None
        if waiters:
            for wake in waiters:
                wake()
        return True

    def _on_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when settled (now, if it is)."""
        with self._lock:
            if not self._ready:
                if self._waiters is None:
                    self._waiters = []
                self._waiters.append(callback)
                return
        callback()

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._waiters and callback in self._waiters:
                self._waiters.remove(callback)

    # -- observing

    def _start(self) -> None:
        observe = self._observe
        if observe is not None:
            with self._lock:
                observe, self._observe = self._observe, None
            if observe is not None:
                observe()

    def _result(self) -> R:
        if self._decode is not None:
            with self._lock:
                decode = self._decode
                if decode is not None:
                    try:
                        self._value = decode()
                    except BaseException as e:
                        self._error = e
                    self._decode = None
        self._seen = True
        if self._error is not None:
            raise self._error
        value: R = self._value
        return value

    def done(self) -> bool:
        """True when the result is there (a receive that nobody observes is never done)."""
        return self._ready

    def get(self, timeout: float | None = None) -> R:
        """Blocks until the result is there; at most `timeout` seconds, then TimeoutError (the work goes on).

        Raises ValueError for a negative, NaN or infinite timeout, and what the work raised. On a thread whose
        asyncio loop is running it works but blocks that loop, and warns.
        """
        if timeout is not None:
            check_timeout(timeout)
        if not self._ready:
            if on_runtime_thread():
                raise WouldBlockRuntime("Future.get() on the framework's runtime thread would block it")
            if running_loop() is not None:
                warnings.warn(
                    "Future.get() called with an active event loop: it blocks the loop until the result arrives. "
                    "Use `await future` or `future.as_asyncio()`.",
                    UserWarning,
                    stacklevel=2,
                )
            self._start()
            if self._self_call is not None and timeout is None and not self._ready:
                self._self_call.cell.refuse_to_wait_for_itself(self._self_call)
            if not self._ready:
                self._wait(timeout)
        elif not self._seen and running_loop() is not None:
            warnings.warn(
                "Future.get() called with an active event loop. Use `await future` or `future.as_asyncio()`.",
                UserWarning,
                stacklevel=2,
            )
        return self._result()

    def _wait(self, timeout: float | None) -> None:
        safe_point = getattr(thread_wait, "safe_point", None)
        poller = guest_poller
        if poller is not None and poller.enter(idle=False):
            wake = poller.call_guest
            try:
                self._on_ready(wake)
                if safe_point is not None:
                    arrived = safe_point(None, timeout, self)
                else:
                    arrived = poller.wait(self._is_ready, timeout, self._patient)
            finally:
                poller.leave()
                self._forget(wake)
            if not arrived and not self._ready:
                if poller._stopping:
                    return self._wait_plainly(timeout, safe_point)
                self._timed_out(timeout)
            return
        self._wait_plainly(timeout, safe_point)

    def _is_ready(self) -> bool:
        return self._ready

    def _timed_out(self, timeout: float | None) -> None:
        if self._on_timeout is not None and not self._waiters:
            self._on_timeout(self)
        raise TimeoutError(f"no result within {timeout} s; the operation goes on, get() or await it again")

    def _wait_plainly(self, timeout: float | None, safe_point: Any) -> None:
        gate = threading.Lock()
        gate.acquire()
        wake = gate.release
        with self._lock:
            if self._ready:
                return
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(wake)
        try:
            if safe_point is not None:
                arrived = safe_point(gate, timeout, self)
            else:
                arrived = gate.acquire(timeout=-1 if timeout is None else timeout)
        except BaseException:
            self._forget(wake)
            raise
        if not arrived and not self._ready:
            self._forget(wake)
            self._timed_out(timeout)

    result = get

    def exception(self, timeout: float | None = None) -> Exception | None:
        """None on success, else the exception (also a TimeoutError); a BaseException is raised."""
        try:
            self.get(timeout)
        except Exception as e:
            return e
        return None

    def __await__(self) -> Generator[Any, None, R]:
        if not self._ready:
            if on_runtime_thread():
                raise RuntimeError("cannot await on the framework's runtime thread")
            loop = running_loop()
            if loop is None:
                raise _NoLoop("no running event loop: there is no active event loop on this thread to await on")
            yield from self._on_loop(loop)
        try:
            return self._result()
        except StopIteration as e:
            raise RuntimeError(f"the awaited operation raised StopIteration: {e!r}") from e

    def _on_loop(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A loop-local future that is set when this one is settled."""
        local: asyncio.Future[None] = loop.create_future()
        bridge = Bridge.of(loop)

        def set_it() -> None:
            if not local.done():
                local.set_result(None)

        self._start()
        self._on_ready(lambda: bridge.call(set_it))
        return local

    def as_asyncio(self) -> asyncio.Future[R]:
        """A new asyncio future on the running loop, with this one's outcome. RuntimeError without a loop."""
        loop = running_loop()
        if loop is None:
            raise RuntimeError("as_asyncio() needs a running event loop on this thread; use get() elsewhere")
        out: asyncio.Future[R] = loop.create_future()

        def copy() -> None:
            if out.cancelled():
                return
            try:
                out.set_result(self._result())
            except StopIteration as e:
                out.set_exception(RuntimeError(f"the awaited operation raised StopIteration: {e!r}"))
            except BaseException as e:
                out.set_exception(e)

        if self._ready:
            copy()
        else:
            self._on_loop(loop).add_done_callback(lambda _: copy())
        return out

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a Future: get() it and send its value, or send a Port")

    def __repr__(self) -> str:
        return f"<Future {'done' if self._ready else 'pending'}>"


def wait_all(futures: list[Future[Any]], seconds: float) -> None:
    """Waits for all of them, outcome ignored, `seconds` in total at most. For the framework's own teardown."""
    end = time.monotonic() + seconds
    for f in futures:
        f._start()
        gate = threading.Lock()
        gate.acquire()
        f._on_ready(gate.release)
        gate.acquire(timeout=max(0.0, end - time.monotonic()))


def when_all(futures: Iterable[Future[Any]], then: Callable[[], object]) -> None:
    """Calls `then` once when all of them are settled: on the thread that settles the last, or now."""
    waits = list(futures)
    left = len(waits) + 1
    lock = threading.Lock()

    def one() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    for f in waits:
        f._on_ready(one)
    one()


assert sys.version_info >= (3, 10)
