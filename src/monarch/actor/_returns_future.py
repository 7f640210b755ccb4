"""`@returns_future`: one async implementation that threads and coroutines can both use.

The body runs once, driven by its first observer: a task on the loop that awaits it, or a private loop of the thread
that calls `get()`. A future that nobody observes runs nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

from monarch.runtime.client import current_here
from monarch.runtime.errors import WouldBlockRuntime
from monarch.runtime.future import Future, _NoLoop, check_timeout, running_loop

P = ParamSpec("P")
R = TypeVar("R")

_tasks: set[asyncio.Task[Any]] = set()
_thread = threading.local()


class _BodyFuture(Future[R]):
    """A future whose work is a coroutine that an observer drives."""

    __slots__ = ("_context", "_coroutine", "_driver", "_loop")

    def _begin(self, coroutine: Coroutine[Any, Any, R], context: contextvars.Context) -> None:
        self._coroutine: Coroutine[Any, Any, R] | None = coroutine
        self._context = context
        self._driver = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __del__(self) -> None:
        coroutine = getattr(self, "_coroutine", None)
        if coroutine is not None:
            coroutine.close()

    def _claim(self) -> Coroutine[Any, Any, R] | None:
        with self._lock:
            coroutine, self._coroutine = self._coroutine, None
            if coroutine is not None:
                self._driver = threading.get_ident()
            return coroutine

    async def _run(self, coroutine: Coroutine[Any, Any, R]) -> None:
        try:
            value = await coroutine
        except BaseException as e:
            self._settle(error=e)
            if not isinstance(e, Exception) and not isinstance(e, asyncio.CancelledError):
                raise
        else:
            self._settle(value)

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, R]) -> asyncio.Task[None]:
        self._loop = loop
        task = self._context.run(loop.create_task, self._run(coroutine))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        return task

    def get(self, timeout: float | None = None) -> R:
        check_timeout(timeout)
        if self._ready:
            return super().get(timeout)
        if running_loop() is not None:
            if self._coroutine is None and running_loop() is self._loop:
                raise WouldBlockRuntime("get() here would wait for a task of this thread's own event loop; await it")
            warnings.warn(
                "Future.get() called with an active event loop: it blocks the loop until the result arrives. Use "
                "`await future` or `future.as_asyncio()`.",
                UserWarning,
                stacklevel=2,
            )
            coroutine = self._claim()
            if coroutine is not None:
                helper = threading.Thread(
                    target=self._drive, args=(coroutine, timeout), name="returns_future", daemon=True
                )
                helper.start()
                helper.join()
                return self._result()
            self._wait(timeout)
            return self._result()
        coroutine = self._claim()
        if coroutine is None:
            if self._driver == threading.get_ident() and bool(getattr(_thread, "driving", False)):
                raise WouldBlockRuntime("get() from the code that another get() of this future is driving")
            self._wait(timeout)
            return self._result()
        self._drive(coroutine, timeout)
        return self._result()

    result = get

    def _drive(self, coroutine: Coroutine[Any, Any, R], timeout: float | None) -> None:
        """Runs the body on this thread's private loop; a timeout or interrupt cancels it and drives its cleanup."""
        loop = _private_loop()
        task = self._task(loop, coroutine)
        _thread.driving = int(getattr(_thread, "driving", 0)) + 1
        try:
            try:
                loop.run_until_complete(asyncio.wait({task}, timeout=timeout))
            except BaseException:
                self._settle(error=asyncio.CancelledError())
                self._cancel(loop, task)
                raise
            if not task.done():
                self._settle(error=TimeoutError(f"no result within {timeout} s; the operation was cancelled"))
                self._cancel(loop, task)
            left = [t for t in asyncio.all_tasks(loop) if not t.done()]
            for t in left:
                t.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=5))
        finally:
            _thread.driving -= 1

    @staticmethod
    def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        task.cancel()
        loop.run_until_complete(asyncio.wait({task}, timeout=5))

    def _ensure_task(self, loop: asyncio.AbstractEventLoop) -> None:
        coroutine = self._claim()
        if coroutine is not None:
            self._task(loop, coroutine)

    def __await__(self) -> Generator[Any, None, R]:
        if not self._ready:
            loop = running_loop()
            if loop is None:
                raise _NoLoop("no running event loop: there is no active event loop on this thread to await on")
            self._ensure_task(loop)
        return (yield from super().__await__())

    def as_asyncio(self) -> asyncio.Future[R]:
        loop = running_loop()
        if loop is not None and not self._ready:
            self._ensure_task(loop)
        return super().as_asyncio()


class _LoopHolder:
    """One private loop per thread, closed when the thread ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        if not self.loop.is_running() and not self.loop.is_closed():
            self.loop.close()


def _private_loop() -> asyncio.AbstractEventLoop:
    import os

    holder: _LoopHolder | None = getattr(_thread, "holder", None)
    if holder is None or _thread.pid != os.getpid() or holder.loop.is_closed():
        holder = _thread.holder = _LoopHolder()
        _thread.pid = os.getpid()
    return holder.loop


def returns_future(async_fn: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Future[R]]:
    """Makes an `async def` return a Future. TypeError for anything else. Goes below classmethod/staticmethod."""
    if not inspect.iscoroutinefunction(async_fn):
        raise TypeError(f"returns_future wraps an async def, not {async_fn!r}")

    @functools.wraps(async_fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        coroutine = async_fn(*args, **kwargs)
        try:
            current_here()
        except BaseException:
            coroutine.close()
            raise
        future: Any = _BodyFuture._make()
        future._begin(coroutine, contextvars.copy_context())
        out: Future[R] = future
        return out

    return call
