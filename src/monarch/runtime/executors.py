"""The two kinds of actors, as cells: one on a thread, one on an asyncio loop in a thread.

SyncCell    `__init__`, endpoints and hooks run on one thread for life; no loop is visible there
AsyncCell   they run on one asyncio loop, on one thread for life; plain endpoints one at a time,
            concurrent endpoints as tasks that overlap
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from monarch.runtime.cell import (
    Cell,
    Event,
    View,
    cleanup_limit,
    format_failure,
    hook_for,
    overrides,
    stop_limit,
    supervise,
    view_of,
)
from monarch.runtime.errors import SupervisionError
from monarch.runtime.failure import MeshFailure
from monarch.runtime.future import Bridge, Future, thread_wait
from monarch.runtime.loops import new_guest_loop
from monarch.wire.frames import Frame

log = logging.getLogger("monarch.runtime")


class Ended(BaseException):
    """Unwinds an actor's thread out of a wait when an unhandled failure ends the actor. Not for users to catch."""


class _Stop:
    """Queued behind the messages that a stopping actor still carries out."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Mark:
    """Queued behind other messages: calls back when they were handled."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback


class _Running(Cell):
    """What both kinds share: construction, ending, and the texts."""

    build: Callable[[], tuple[type, tuple[Any, ...], dict[str, Any]]]
    thread: threading.Thread

    def start(self, build: Callable[[], tuple[type, tuple[Any, ...], dict[str, Any]]]) -> None:
        """`build` unpickles (class, args, kwargs) on the actor's thread."""
        self.build = build
        self.thread = threading.Thread(target=self._main, name=self.thread_name, daemon=True)
        self.thread.start()

    thread_name = "monarch-actor"

    def _main(self) -> None:
        raise NotImplementedError

    def _construct(self) -> None:
        cls, args, kwargs = self.build()
        del self.build
        new: Any = cls.__new__
        obj = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        self.obj = obj
        obj.__init__(*args, **kwargs)

    def _refuse(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.node.reply_dead(frame, self.report)

    def _ending(self, reason: str, failed: bool) -> None:
        self._refuse(self.died(reason, failed=failed))

    def _finish(self) -> None:
        self.obj = None
        self.node.tree.closed(self.id)
        self.node.actor_ended(self.id, self.report)
        self.node.ending.pop(self.id, None)
        self.stopped._settle(None)

    def when_idle(self, callback: Callable[[], None]) -> None:
        lock = threading.Lock()
        called = False

        def once() -> None:
            nonlocal called
            with lock:
                if called:
                    return
                called = True
            callback()

        self.stopped._on_ready(once)  # an actor that ends says so after its owner was told of a failure
        self._queue_mark(_Mark(once))

    def _queue_mark(self, mark: _Mark) -> None:
        raise NotImplementedError


class SyncCell(_Running):
    """See the module's text."""

    thread_name = "monarch-actor-driver"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: collections.deque[Event] = collections.deque()
        self._guesting = False
        self._gate: Any = None  #: the lock a wait inside an endpoint sleeps on
        self._frame: Frame | None = None
        self._end_reason: tuple[str, bool] | None = None

    def _take(self) -> Any:
        """The next item; waits for it in the poller when that place is free."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            pass
        poller = self.node.poller
        if poller.enter(idle=True):
            self._guesting = True
            try:
                poller.wait(self._has_work, None)
            finally:
                self._guesting = False
                poller.leave()
        return self._queue.get()

    def _has_work(self) -> bool:
        return not self._queue.empty()

    def deliver(self, frame: Frame) -> None:
        self._queue.put(frame)
        if self._guesting:
            self.node.poller.call_guest()
        if self.state == "failed" or self.state == "stopped":
            self._refuse(self.pending())

    def post_event(self, event: Event) -> None:
        self._events.append(event)
        self._nudge()

    def _nudge(self) -> None:
        gate = self._gate
        if gate is not None:
            with contextlib.suppress(RuntimeError):
                gate.release()
        self._queue.put(None)
        self.node.poller.call_guest()

    def request_stop(self, reason: str, drain: bool = True) -> Future[None]:
        if drain:
            self._queue.put(_Stop(reason))
            self.node.poller.call_guest()
        else:
            self._end_reason = self._end_reason or (reason, False)
            self._nudge()
        limit = stop_limit() if drain else cleanup_limit()
        self.node.poller.call_later(limit, lambda: self._overdue(reason))
        return self.stopped

    def _queue_mark(self, mark: _Mark) -> None:
        self._queue.put(mark)
        self.node.poller.call_guest()

    def _overdue(self, reason: str) -> None:
        """A busy endpoint does not hold up a stop for ever; its thread is left behind, the actor is gone."""
        if self.state not in ("failed", "stopped"):
            frame = self._frame
            self._ending(reason, failed=False)
            if frame is not None:
                self.node.reply_dead(frame, self.report)
            self.stopped._settle(None)

    def handles_a_message(self) -> bool:
        return self._frame is not None and threading.current_thread() is self.thread

    def end_now(self, reason: str, failed: bool) -> None:
        """abort/kill/stop from inside: takes effect when the current call returns."""
        self._end_reason = (reason, failed)

    def pending(self) -> list[Frame]:
        frames = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Frame):
                    frames.append(item)
        return frames

    def _main(self) -> None:
        thread_wait.safe_point = self._wait_here
        self.set_here(None, 0)
        try:
            self._construct()
        except Ended:
            return self._close_down()
        except BaseException as e:
            self._end_reason = (format_failure(e), True)
            return self._close_down(constructed=False)
        if self.state == "starting":
            self.state = "running"
        take = self._take
        while self.state == "running" and self._end_reason is None:
            item = take()
            try:
                if self._events:
                    self._handle_events()
                if item is None:
                    continue
                if type(item) is Frame:
                    self._invoke(item)
                elif type(item) is _Mark:
                    item.callback()
                else:
                    self._end_reason = (item.reason, False)
                item = None
            except Ended:
                break
        self._close_down()

    def _invoke(self, frame: Frame) -> None:
        view = view_of(frame.parts[0])
        self.set_here(view, frame.rank)
        self._frame = frame
        self.running = view.method
        try:
            try:
                method, explicit, _, is_async = self.lookup(view)
                args, kwargs = self.arguments(frame)
                if explicit:
                    method(make_port(self, frame), *args, **kwargs)
                else:
                    if is_async:
                        raise TypeError(f"{self.call_name(view)} is an async def method, and this is a sync actor")
                    self.answer(frame, method(*args, **kwargs))
            except Exception as e:
                if frame.reply and not _is_explicit(self, view):
                    self.answer_error(frame, e, f"Actor call {self.call_name(view)} failed.")
                else:
                    self._fail_with(e, frame)
            except Ended:
                raise
            except BaseException as e:
                self._fail_with(e, frame)
        finally:
            self._frame = None
            self.running = ""
        if self._end_reason is not None:
            raise Ended

    def _fail_with(self, error: BaseException, frame: Frame) -> None:
        self._end_reason = (format_failure(error), True)
        self._ending(*self._end_reason)
        self.node.reply_dead(frame, self.report)

    def _handle_events(self) -> None:
        """Runs __supervise__ for each event; raises Ended when one is not handled."""
        while self._events:
            event = self._events.popleft()
            hook = overrides(self.obj, hook_for(event)) if self.obj is not None else None
            outcome: Any = None
            raised: BaseException | None = None
            if hook is not None:
                from monarch.runtime.cell import here

                before = here.get()
                self.set_here(None, 0)
                try:
                    outcome = hook(event)
                except Ended:
                    raise
                except BaseException as e:
                    raised = e
                here.set(before)
            reason = supervise(self, event, outcome, raised)
            if reason is not None:
                self._end_reason = (reason, True)
                self._chain = event.report() if isinstance(event, MeshFailure) else ""
                raise Ended

    _chain = ""

    def _wait_here(self, gate: Any, timeout: float | None, future: Future[Any]) -> bool:
        """A blocking wait on the actor's thread: a safe point, where pending __supervise__ calls run."""
        end = None if timeout is None else time.monotonic() + timeout
        outer, self._gate = self._gate, gate
        try:
            while True:
                if self._events:
                    frame = self._frame
                    try:
                        self._handle_events()
                    except Ended:
                        assert self._end_reason is not None
                        self._ending(*self._end_reason)
                        if frame is not None:
                            self.node.reply_dead(frame, self.report)
                        raise
                if future._ready:
                    return True
                left = -1.0 if end is None else end - time.monotonic()
                if end is not None and left <= 0:
                    return future._ready
                if gate is not None:
                    gate.acquire(timeout=left)
                    continue
                poller = self.node.poller
                some = None if end is None else left
                arrived = poller.wait(lambda: future._ready or self._events, some, future._patient)
                if not arrived and poller._stopping:
                    return future._ready
        finally:
            self._gate = outer

    def _close_down(self, constructed: bool = True) -> None:
        reason, failed = self._end_reason or ("stopped", False)
        self._ending(reason, failed)
        thread_wait.safe_point = None
        if failed:
            self.tell_owner(reason, self._chain)
        self.set_here(None, 0)
        self.stop_owned("its owner ended", stop_limit())
        hook = overrides(self.obj, "__cleanup__") if constructed and self.obj is not None else None
        if hook is not None:
            try:
                hook(RuntimeError(self.report) if failed else None)
            except BaseException as e:
                self.tell_owner(f"cleanup error: {format_failure(e)}", self.report if failed else "", again=True)
        self._finish()


class AsyncCell(_Running):
    """See the module's text."""

    thread_name = "monarch-actor-event-loop"
    #: with a backlog, the actor lets its loop run other tasks at least this often, in messages
    BURST = 64

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inbox: collections.deque[Any] = collections.deque()
        self._events: collections.deque[Event] = collections.deque()
        self._bridge: Bridge | None = None
        self._idle: asyncio.Future[None] | None = None
        self._current: Frame | None = None
        self._tasks: dict[asyncio.Task[Any], Frame] = {}
        self._end_reason: tuple[str, bool] | None = None
        self._driver: asyncio.Task[None] | None = None
        self._supervising = False
        self._chain = ""

    def deliver(self, frame: Frame) -> None:
        self._inbox.append(frame)
        if self.state == "failed" or self.state == "stopped":
            self._refuse(self.pending())
            return
        bridge = self._bridge
        if bridge is not None:
            if bridge.thread == threading.get_ident():
                self._wake()  # the loop's own thread, as the poller's guest
            else:
                bridge.call(self._wake)

    def post_event(self, event: Event) -> None:
        self._events.append(event)
        if self._bridge is not None:
            self._bridge.call(self._start_supervising)

    def request_stop(self, reason: str, drain: bool = True) -> Future[None]:
        if drain:
            self._inbox.append(_Stop(reason))
            if self._bridge is not None:
                self._bridge.call(self._wake)
        else:
            self._on_loop(lambda: self._end(reason, False))
        limit = stop_limit() if drain else cleanup_limit()
        self.node.poller.call_later(limit, lambda: self._overdue(reason))
        return self.stopped

    def _queue_mark(self, mark: _Mark) -> None:
        self._inbox.append(mark)
        self._on_loop(self._wake)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if self._bridge is not None:
            self._bridge.call(callback)

    def _overdue(self, reason: str) -> None:
        if self.state not in ("failed", "stopped"):
            self._on_loop(lambda: self._end(reason, False))
            self.node.poller.call_later(cleanup_limit(), self._give_up)

    def _give_up(self) -> None:
        if not self.stopped.done():
            self._ending("it did not stop in time", failed=False)
            self.stopped._settle(None)

    def end_now(self, reason: str, failed: bool) -> None:
        self._end_reason = (reason, failed)
        self._on_loop(lambda: self._end(reason, failed))

    def handles_a_message(self) -> bool:
        if self._current is None or threading.current_thread() is not self.thread:
            return False
        try:
            return asyncio.current_task() is self._driver
        except RuntimeError:  # a plain method of an async actor: no loop is visible
            return True

    def pending(self) -> list[Frame]:
        frames = []
        with contextlib.suppress(IndexError):
            while True:
                item = self._inbox.popleft()
                if isinstance(item, Frame):
                    frames.append(item)
        return frames

    # -- on the loop's thread

    def _main(self) -> None:
        loop = new_guest_loop(self.node.poller)
        self._bridge = Bridge.of(loop)
        self._bridge.thread = threading.get_ident()
        try:
            loop.run_until_complete(self._life())
            left = [t for t in asyncio.all_tasks(loop) if not t.done()]
            for t in left:
                t.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=cleanup_limit()))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException:
            log.exception("actor loop failed")
        finally:
            self._bridge = None
            self._finish()
            with contextlib.suppress(Exception):
                loop.close()

    async def _life(self) -> None:
        self.set_here(None, 0)
        constructed = True
        try:
            self._construct()
        except BaseException as e:
            constructed = False
            self._end_reason = (format_failure(e), True)
        if self.state == "starting":
            self.state = "running"
        if self._end_reason is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            if self._events:
                self._start_supervising()
            await asyncio.wait([self._driver])
            if not self._driver.cancelled() and self._driver.exception() is not None:
                error = self._driver.exception()
                assert error is not None
                self._end_reason = self._end_reason or (format_failure(error), True)
        await self._close_down(constructed)

    async def _drive(self) -> None:
        inbox = self._inbox
        loop = asyncio.get_running_loop()
        burst = 0
        while self._end_reason is None:
            if not inbox:
                self._idle = loop.create_future()
                try:
                    await self._idle
                finally:
                    self._idle = None
                continue
            if burst >= self.BURST:
                burst = 0
                await asyncio.sleep(0)  # before taking the message, so that a cancellation loses none
                continue
            burst += 1
            item = inbox.popleft()
            if type(item) is Frame:
                self._current = item
                try:
                    await self._invoke(item)
                finally:
                    self._current = None
            elif type(item) is _Mark:
                item.callback()
            else:
                self._end_reason = (item.reason, False)

    def _wake(self) -> None:
        idle = self._idle
        if idle is not None and not idle.done():
            idle.set_result(None)

    async def _invoke(self, frame: Frame) -> None:
        view = view_of(frame.parts[0])
        self.set_here(view, frame.rank)
        self.running = view.method
        try:
            method, explicit, concurrent, is_async = self.lookup(view)
            args, kwargs = self.arguments(frame)
            if explicit:
                args = (make_port(self, frame), *args)
            if concurrent:
                task = asyncio.get_running_loop().create_task(self._run_concurrent(frame, view, method, args, kwargs))
                self._tasks[task] = frame
                task.add_done_callback(lambda t: self._tasks.pop(t, None))
                return
            if is_async:
                value = await method(*args, **kwargs)
            else:
                value = self._without_loop(method, args, kwargs)
            if not explicit:
                self.answer(frame, value)
        except asyncio.CancelledError as e:
            if self._end_reason is not None:
                self.node.reply_dead(frame, self.report)
                raise
            self._fail_with(e, frame)  # raised by the endpoint itself
        except Exception as e:
            if frame.reply and not _is_explicit(self, view):
                self.answer_error(frame, e, f"Actor call {self.call_name(view)} failed.")
            else:
                self._fail_with(e, frame)
        except BaseException as e:
            self._fail_with(e, frame)
        finally:
            self.running = ""

    @staticmethod
    def _without_loop(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a plain method as if no loop were running here."""
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return method(*args, **kwargs)
        finally:
            asyncio._set_running_loop(loop)

    async def _run_concurrent(
        self, frame: Frame, view: View, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        explicit = _is_explicit(self, view)
        try:
            value = await method(*args, **kwargs)
            if not explicit:
                self.answer(frame, value)
        except BaseException as e:
            if isinstance(e, asyncio.CancelledError) and self._end_reason is not None:
                self.node.reply_dead(frame, self.report)
                raise
            if explicit or not frame.reply:
                self._fail_with(e, frame)
            else:
                how = "failed." if isinstance(e, Exception) else "failed with BaseException."
                self.answer_error(frame, e, f"Actor call {self.call_name(view)} {how}")

    def _fail_with(self, error: BaseException, frame: Frame) -> None:
        reason = format_failure(error)
        self._end_reason = (reason, True)
        self._ending(reason, True)
        self.node.reply_dead(frame, self.report)
        self._end(reason, True)

    def _end(self, reason: str, failed: bool) -> None:
        """Ends the actor at the next suspension point of what it is running."""
        if self._end_reason is None:
            self._end_reason = (reason, failed)
        self._ending(*self._end_reason)
        driver = self._driver
        if driver is not None and not driver.done() and driver is not asyncio.current_task():
            driver.cancel()
        self._wake()

    def _start_supervising(self) -> None:
        if not self._supervising and self._events and self._end_reason is None and self._driver is not None:
            self._supervising = True
            self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def _supervise(self) -> None:
        try:
            while self._events and self._end_reason is None:
                event = self._events.popleft()
                self.set_here(None, 0)
                outcome: Any = None
                raised: BaseException | None = None
                hook = overrides(self.obj, hook_for(event))
                try:
                    if hook is not None:
                        if inspect.iscoroutinefunction(hook):
                            outcome = await hook(event)
                        else:
                            outcome = self._without_loop(hook, (event,), {})
                except BaseException as e:
                    raised = e
                reason = supervise(self, event, outcome, raised)
                if reason is not None:
                    self._chain = event.report() if isinstance(event, MeshFailure) else ""
                    self._end_reason = (reason, True)
                    self._end(reason, True)
        finally:
            self._supervising = False

    async def _close_down(self, constructed: bool) -> None:
        reason, failed = self._end_reason or ("stopped", False)
        self._ending(reason, failed)
        if failed:
            self.tell_owner(reason, self._chain)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=cleanup_limit())
        if self._to_stop:
            await asyncio.to_thread(self.stop_owned, "its owner ended", stop_limit())
        self.set_here(None, 0)
        hook = overrides(self.obj, "__cleanup__") if constructed else None
        if hook is not None:
            exc = RuntimeError(self.report) if failed else None
            try:
                if inspect.iscoroutinefunction(hook):
                    await asyncio.wait_for(hook(exc), cleanup_limit())
                else:
                    self._without_loop(hook, (exc,), {})
            except BaseException as e:
                self.tell_owner(f"cleanup error: {format_failure(e)}", self.report if failed else "", again=True)


def _is_explicit(cell: Cell, view: View) -> bool:
    try:
        return cell.lookup(view)[1]
    except AttributeError:
        return False


def make_port(cell: Cell, frame: Frame) -> Any:
    """The response port of an explicit-port endpoint."""
    from monarch.runtime.ports import ResponsePort

    return ResponsePort._for_call(cell.kept, frame)


def current_cell_or_raise() -> Cell:
    from monarch.runtime.cell import here

    now = here.get()
    if now is None:
        raise SupervisionError("no actor is running here")
    return now.cell
