"""The matrix of Future: every observer, every way of waiting too briefly; and returns_future."""

import asyncio
import contextvars
import gc
import math
import pickle
import threading
import warnings

import pytest

from actors_for_tests import AsyncEcho, Echo
from conftest import WAIT
from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Future,
    Port,
    PortReceiver,
    ValueMesh,
    endpoint,
    returns_future,
)


@pytest.fixture
def echo(procs):
    return procs().spawn("e", Echo)


class Gate(AsyncEcho):
    """`hold` answers when `release` was called."""


@pytest.fixture
def gate(procs):
    g = procs().spawn("g", Gate)
    g.echo.call_one(0).get(timeout=WAIT)
    return g


async def limited(awaitable):
    return await asyncio.wait_for(awaitable, WAIT)


def test_get_result_and_await_agree(echo):
    f = echo.echo.call_one([1])

    async def observe():
        return await f

    assert f.get(timeout=WAIT) is f.result(timeout=WAIT) is asyncio.run(observe()) is asyncio.run(observe())
    assert f.exception(timeout=WAIT) is None and f.done()


def test_the_same_exception_object_reaches_everyone(echo):
    f = echo.fail.call_one("x")

    async def observe():
        with pytest.raises(ActorError) as info:
            await f
        return info.value

    first = f.exception(timeout=WAIT)
    with pytest.raises(ActorError) as info:
        f.get(timeout=WAIT)
    assert first is info.value is asyncio.run(observe()) is f.exception()


def test_exception_returns_the_timeout(gate):
    f = gate.hold.call_one()
    assert isinstance(f.exception(timeout=0), TimeoutError) and not f.done()
    gate.release.call_one().get(timeout=WAIT)
    assert f.get(timeout=WAIT) == "released"


def test_a_zero_timeout_polls(gate):
    f = gate.hold.call_one()
    with pytest.raises(TimeoutError):
        f.get(timeout=0)
    gate.release.call_one().get(timeout=WAIT)
    f.get(timeout=WAIT)
    assert f.get(timeout=0) == "released"


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, -math.inf, "5"])
def test_an_invalid_timeout_consumes_nothing(timeout):
    port, inbox = Channel.open()
    f = inbox.recv()
    with pytest.raises(ValueError, match="invalid timeout"):
        f.get(timeout=timeout)
    port.send("first")
    assert inbox.recv().get(timeout=WAIT) == "first"


def test_a_cancelled_observer_leaves_the_work_alone(gate):
    f = gate.hold.call_one()

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(f.as_asyncio(), 0.01)
        view = f.as_asyncio()
        view.cancel()
        with pytest.raises(asyncio.CancelledError):
            await view
        gate.release.broadcast()
        return await limited(f.as_asyncio())

    assert asyncio.run(give_up()) == "released" == f.get(timeout=WAIT)


def test_cancelling_is_quiet(gate, caplog):
    f = gate.hold.call_one()

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(f.as_asyncio()), 0.01)
        await gate.release.call_one()
        return await limited(f.as_asyncio())

    assert asyncio.run(main()) == "released" and not caplog.records


def test_gather_shield_and_ensure_future_take_futures(echo):
    async def main():
        both = await asyncio.gather(echo.echo.call_one(1), echo.echo.call_one(2))
        return both, await asyncio.shield(echo.echo.call_one(3)), await asyncio.ensure_future(echo.echo.call_one(4))

    assert asyncio.run(limited(main())) == ([1, 2], 3, 4)


def test_a_future_is_no_coroutine(echo):
    async def main():
        with pytest.raises(TypeError):
            asyncio.get_running_loop().create_task(echo.echo.call_one(1))

    asyncio.run(main())


def test_as_asyncio_is_fresh_each_time_and_done_when_the_result_is_there(echo):
    f = echo.echo.call_one(1)
    f.get(timeout=WAIT)

    async def main():
        a, b = f.as_asyncio(), f.as_asyncio()
        return a is not b and a.done() and a.result() == 1

    assert asyncio.run(main())


def test_without_a_loop_as_asyncio_and_await_refuse_and_consume_nothing():
    port, inbox = Channel.open()
    f = inbox.recv()
    with pytest.raises(RuntimeError):
        f.as_asyncio()
    with pytest.raises(RuntimeError, match="no running event loop"):
        f.__await__().send(None)
    with pytest.raises(ValueError, match="no active event loop"):
        f.__await__().send(None)
    port.send("first")
    assert inbox.recv().get(timeout=WAIT) == "first"


def test_several_loops_at_once_await_one_future(gate):
    f, out = gate.hold.call_one(), []

    async def observe():
        out.append(await f)

    threads = [threading.Thread(target=lambda: asyncio.run(limited(observe()))) for _ in range(4)]
    for t in threads:
        t.start()
    gate.release.call_one().get(timeout=WAIT)
    for t in threads:
        t.join(WAIT)
    assert out == ["released"] * 4


def test_a_future_outlives_the_loop_that_awaited_it_first(gate):
    f = gate.hold.call_one()

    async def briefly():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(f), 0.01)

    asyncio.run(briefly())
    gate.release.call_one().get(timeout=WAIT)
    assert asyncio.run(limited(asyncio.wait_for(_await(f), WAIT))) == "released"


async def _await(f):
    return await f


def test_get_on_a_loop_does_not_warn_about_what_was_read_already(echo):
    f = echo.echo.call_one(1)
    f.get(timeout=WAIT)

    async def main():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return f.get(timeout=WAIT)

    assert asyncio.run(main()) == 1


def test_one_warning_for_one_get_on_a_loop(echo):
    async def main():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert echo.echo.call_one(1).get(timeout=WAIT) == 1
        return [str(w.message) for w in seen if w.category is UserWarning]

    (text,) = asyncio.run(main())
    assert "active event loop" in text and "as_asyncio" in text


def stop_iteration(port):
    port.exception(StopIteration("end"))


def test_a_stop_iteration_surfaces_from_await_as_a_runtime_error(echo):
    port, inbox = Channel.open()
    f = inbox.recv()
    port.exception(StopIteration("end"))
    with pytest.raises(StopIteration):
        f.get(timeout=WAIT)
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(_await(f))


def test_a_base_exception_stays_observable():
    port, inbox = Channel.open()
    f = inbox.recv()
    port.exception(KeyboardInterrupt("mine"))
    seen = []
    for _ in range(2):
        try:
            f.get(timeout=WAIT)
        except KeyboardInterrupt as e:
            seen.append(e)
    assert len(seen) == 2 and seen[0] is seen[1]
    try:
        f.exception()
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("exception() must not return a BaseException")


def test_futures_are_made_by_the_framework():
    with pytest.raises(TypeError, match="^Future objects are returned by Monarch operations"):
        Future()
    with pytest.raises(TypeError, match="unexpected keyword argument 'coro'"):
        Future(coro=None)


def test_generic_classes_take_a_subscript():
    for cls in (Future, Port, PortReceiver, ValueMesh, Channel):
        assert cls[int]
    assert Channel[int].open()


def test_a_dropped_future_changes_nothing_at_the_actor(procs):
    class Count(Actor):
        def __init__(self):
            self.n = 0

        @endpoint
        def inc(self):
            self.n += 1
            return self.n

    c = procs().spawn("c", Count)
    for _ in range(5):
        c.inc.call_one()
    gc.collect()
    assert c.inc.call_one().get(timeout=WAIT) == 6


# -- returns_future

variable = contextvars.ContextVar("variable", default="default")


def test_calling_starts_nothing_and_dropping_gives_no_warning():
    runs = []

    @returns_future
    async def body():
        runs.append(1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body()
        gc.collect()
    assert runs == []


def test_a_body_sees_the_variables_of_the_call_and_keeps_its_writes_inside():
    @returns_future
    async def body():
        seen = variable.get()
        variable.set("inside")
        return seen

    token = variable.set("at the call")
    f = body()
    variable.set("later")
    assert f.get(timeout=WAIT) == "at the call" and variable.get() == "later"
    variable.reset(token)


def test_only_async_functions_can_return_futures():
    with pytest.raises(TypeError):
        returns_future(lambda: 1)


def test_methods_of_all_kinds_can_return_futures():
    class Has:
        @returns_future
        async def method(self, x):
            return x

        @classmethod
        @returns_future
        async def of_class(cls, x):
            return cls, x

        @staticmethod
        @returns_future
        async def static(x):
            return x

    assert Has().method(1).get(timeout=WAIT) == 1
    assert Has.of_class(2).get(timeout=WAIT) == (Has, 2)
    assert Has.static(3).get(timeout=WAIT) == 3


def test_get_uses_no_helper_thread():
    @returns_future
    async def body():
        return threading.current_thread()

    assert body().get(timeout=WAIT) is threading.current_thread()


def test_get_inside_a_loop_warns_and_uses_a_short_lived_thread():
    @returns_future
    async def body():
        return threading.current_thread().name, threading.current_thread().daemon

    async def main():
        with pytest.warns(UserWarning, match="active event loop"):
            return body().get(timeout=WAIT)

    assert asyncio.run(main()) == ("returns_future", True)


def test_a_hidden_loop_gives_no_warning():
    from monarch._src.actor.sync_state import fake_sync_state

    @returns_future
    async def body():
        return 1

    async def main():
        with warnings.catch_warnings(), fake_sync_state():
            warnings.simplefilter("error")
            return body().get(timeout=WAIT)

    assert asyncio.run(main()) == 1


def test_a_warning_turned_into_an_error_leaves_the_body_unstarted():
    runs = []

    @returns_future
    async def body():
        runs.append(1)
        return "ran"

    f = body()

    async def main():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning):
                f.get(timeout=WAIT)

    asyncio.run(main())
    assert runs == [] and f.get(timeout=WAIT) == "ran"


def test_the_first_awaiting_loop_runs_the_body_as_a_task():
    @returns_future
    async def body():
        return asyncio.get_running_loop()

    async def main():
        return await body() is asyncio.get_running_loop()

    assert asyncio.run(main())


def test_a_cancelled_observer_leaves_the_body_alone():
    finished = []

    @returns_future
    async def body(go):
        await go.wait()
        finished.append(1)
        return "done"

    async def main():
        go = asyncio.Event()
        f = body(go)
        first = f.as_asyncio()
        await asyncio.sleep(0)
        first.cancel()
        go.set()
        return await limited(f.as_asyncio())

    assert asyncio.run(main()) == "done" and finished == [1]


def test_a_failing_body_gives_everyone_the_same_object():
    @returns_future
    async def body():
        raise ValueError("x")

    f = body()
    assert f.exception(timeout=WAIT) is f.exception(timeout=WAIT)
    assert isinstance(f.exception(), ValueError)


def test_leftover_tasks_are_cancelled_before_get_returns():
    seen = []

    @returns_future
    async def body():
        async def forever():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")

        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task is not None

    assert body().get(timeout=WAIT) and seen == ["cancelled"]


def test_get_on_the_thread_whose_loop_runs_the_body_is_refused():
    from monarch.runtime.errors import WouldBlockRuntime

    @returns_future
    async def body(go):
        await go.wait()
        return "done"

    async def main():
        go = asyncio.Event()
        f = body(go)
        view = f.as_asyncio()
        with warnings.catch_warnings(), pytest.raises(WouldBlockRuntime):
            warnings.simplefilter("ignore")
            f.get(timeout=5)
        go.set()
        return await limited(view)

    assert asyncio.run(main()) == "done"


def test_a_returned_future_is_not_picklable():
    @returns_future
    async def body():
        return 1

    with pytest.raises(TypeError):
        pickle.dumps(body())


# -- Accumulator


class Numbers(Actor):
    @endpoint
    def number(self, base=0):
        from monarch.actor import current_rank

        return base + current_rank().rank

    @endpoint
    def fail_at(self, rank):
        from monarch.actor import current_rank

        if current_rank().rank == rank:
            raise ValueError("at rank")
        return 1

    @endpoint
    def total(self, others):
        before = threading.active_count()
        f = Accumulator(others.number, 0, lambda a, b: a + b).accumulate()
        names = []

        def combine(a, b):
            names.append(threading.current_thread() is threading.main_thread() or threading.current_thread().name)
            return a + b

        total = Accumulator(others.number, 0, combine).accumulate().get(timeout=WAIT)
        return f.get(timeout=WAIT), total, set(names), threading.active_count() - before


def add(a, b):
    return a + b


def test_a_fold_starts_from_the_identity_and_takes_every_answer(procs):
    m = procs(3).spawn("m", Numbers)
    assert Accumulator(m.number, 100, add).accumulate(10).get(timeout=WAIT) == 133
    assert sorted(Accumulator(m.number, [], lambda a, b: [*a, b]).accumulate().get(timeout=WAIT)) == [0, 1, 2]


def test_a_fold_is_awaited_too(procs):
    m = procs(2).spawn("m", Numbers)
    assert asyncio.run(limited(_await(Accumulator(m.number, 0, add).accumulate()))) == 1


def test_a_fold_runs_once_for_many_observers(procs):
    steps = []
    m = procs(2).spawn("m", Numbers)
    f = Accumulator(m.number, 0, lambda a, b: steps.append(b) or a + b).accumulate()
    assert f.get(timeout=WAIT) == asyncio.run(_await(f)) == f.get(timeout=WAIT) == 1 and len(steps) == 2


def test_a_fold_that_nobody_observes_never_combines_but_the_calls_are_made(procs):
    steps = []
    m = procs(2).spawn("m", Numbers)
    Accumulator(m.number, 0, lambda a, b: steps.append(b)).accumulate()
    assert len(m.number.call().get(timeout=WAIT)) == 2 and steps == []


def test_wrong_arguments_of_a_fold_are_refused_at_the_call(procs):
    with pytest.raises(TypeError):
        Accumulator(procs().spawn("m", Numbers).number, 0, add).accumulate(1, 2, 3)


def test_a_failing_answer_ends_the_fold_with_the_same_error_for_everyone(procs):
    f = Accumulator(procs(2).spawn("m", Numbers).fail_at, 0, add).accumulate(1)
    first = f.exception(timeout=WAIT)
    assert isinstance(first, ActorError) and first is f.exception()
    with pytest.raises(ActorError) as info:
        asyncio.run(_await(f))
    assert info.value is first


def test_a_failing_combine_ends_the_fold_and_is_not_repeated(procs):
    steps = []

    def combine(a, b):
        steps.append(b)
        raise ZeroDivisionError("combine")

    f = Accumulator(procs(3).spawn("m", Numbers).number, 0, combine).accumulate()
    first = f.exception(timeout=WAIT)
    assert isinstance(first, ZeroDivisionError) and f.exception() is first and len(steps) == 1


def test_a_cancelled_observer_does_not_stop_a_started_fold(procs):
    m = procs(2).spawn("m", Numbers)

    async def main():
        f = Accumulator(m.number, 0, add).accumulate()
        view = f.as_asyncio()
        await asyncio.sleep(0)
        view.cancel()
        return await limited(f.as_asyncio())

    assert asyncio.run(main()) == 1


def test_a_fold_inside_a_sync_endpoint_starts_no_thread(procs):
    p = procs(2)
    m = p.spawn("m", Numbers)
    total = p.slice(gpus=0).spawn("t", Numbers).total.call_one(m).get(timeout=WAIT)
    assert total == (1, 1, {"monarch-actor-driver"}, 0)
