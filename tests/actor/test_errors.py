"""Where each kind of failure surfaces, and what is left of an exception on the way."""

import asyncio
import pickle
import re
import threading

import pytest

from actors_for_tests import Echo
from conftest import WAIT
from monarch.actor import Actor, ActorError, endpoint


class RefusesPickling:
    def __reduce__(self):
        raise RuntimeError("will not be pickled")


class RefusesUnpickling:
    def __reduce__(self):
        return eval, ("1/0",)


class LockedError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Custom(Exception):
    def __init__(self, text, code):
        super().__init__(text, code)
        self.code = code


@pytest.fixture(params=[1, 2])
def mesh(request, procs):
    return procs(request.param).spawn("e", Echo)


def test_an_argument_that_refuses_pickling_is_an_error_at_the_call(mesh):
    for adverb in ("call", "choose", "stream", "broadcast"):
        with pytest.raises(RuntimeError, match="will not be pickled"):
            getattr(mesh.echo, adverb)(RefusesPickling())
    assert set(mesh.echo.call(1).get(timeout=WAIT).values()) == {1}


def test_an_argument_that_refuses_unpickling_fails_the_call_only(mesh, faults):
    with pytest.raises(ActorError) as info:
        mesh.echo.call(RefusesUnpickling()).get(timeout=WAIT)
    assert isinstance(info.value.exception, ZeroDivisionError)
    assert set(mesh.echo.call(1).get(timeout=WAIT).values()) == {1} and not faults


def result(kind):
    if kind == "refuses pickling":
        return RefusesPickling()
    if kind == "generator":
        return (i for i in range(3))
    return RefusesUnpickling()


@pytest.mark.parametrize("kind", ["refuses pickling", "generator"])
def test_a_result_that_refuses_pickling_is_an_actor_error(mesh, faults, kind):
    with pytest.raises(ActorError):
        mesh.apply.call(result, kind).get(timeout=WAIT)
    assert set(mesh.echo.call(1).get(timeout=WAIT).values()) == {1} and not faults


def test_a_result_that_refuses_unpickling_raises_when_it_is_read(procs, faults):
    e = procs(2).spawn("e", Echo)
    with pytest.raises(ZeroDivisionError):
        e.slice(gpus=0).apply.call_one(result, "refuses unpickling").get(timeout=WAIT)
    values = e.apply.call(result, "refuses unpickling").get(timeout=WAIT)
    with pytest.raises(ZeroDivisionError):
        values.item(gpus=1)
    assert not faults


def test_an_unpicklable_spawn_argument_is_an_error_at_spawn(procs):
    p = procs()
    with pytest.raises(TypeError):
        p.spawn("e", Echo, threading.Lock())
    assert p.spawn("e", Echo).echo.call_one(1).get(timeout=WAIT) == 1


def raise_locked():
    raise LockedError("holds a lock")


def test_an_exception_that_refuses_pickling_is_replaced_by_its_text(mesh, faults):
    with pytest.raises(ActorError, match="LockedError: holds a lock"):
        mesh.apply.call(raise_locked).get(timeout=WAIT)
    assert set(mesh.echo.call(1).get(timeout=WAIT).values()) == {1} and not faults


def explicit_chain():
    try:
        {}["missing"]
    except KeyError as e:
        raise ValueError("outer") from e


def implicit_chain():
    try:
        {}["missing"]
    except KeyError:
        raise ValueError("outer")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (explicit_chain, "The above exception was the direct cause of the following exception"),
        (implicit_chain, "During handling of the above exception, another exception occurred"),
    ],
)
def test_chained_exceptions_are_in_the_text(procs, function, sentence):
    with pytest.raises(ActorError) as info:
        procs().spawn("e", Echo).apply.call_one(function).get(timeout=WAIT)
    text = str(info.value)
    assert sentence in text and "KeyError: 'missing'" in text and function.__name__ in text
    head = r"Traceback of where the remote call failed, in .*Echo.*, pid \d+, on \S+ \(most recent call last\):"
    assert re.search(head, text)


def raise_this(error):
    raise error


def test_class_arguments_and_attributes_of_an_exception_survive(procs):
    with pytest.raises(ActorError) as info:
        procs().spawn("e", Echo).apply.call_one(raise_this, Custom("text", 7)).get(timeout=WAIT)
    inner = info.value.exception
    assert type(inner) is Custom and inner.args == ("text", 7) and inner.code == 7


def test_an_actor_error_reads_the_same_after_travelling(procs):
    e = procs().spawn("e", Echo)
    with pytest.raises(ActorError) as info:
        e.fail.call_one("x").get(timeout=WAIT)
    copy = e.echo.call_one(info.value).get(timeout=WAIT)
    assert str(copy) == str(info.value) == str(pickle.loads(pickle.dumps(copy)))
    assert copy.message == info.value.message and copy.exception_formatted == info.value.exception_formatted


def raise_actor_error():
    raise ActorError(ValueError("inner"), "mine")


def test_a_raised_actor_error_is_wrapped_again(procs):
    with pytest.raises(ActorError) as info:
        procs().spawn("e", Echo).apply.call_one(raise_actor_error).get(timeout=WAIT)
    assert isinstance(info.value.exception, ActorError) and isinstance(info.value.exception.exception, ValueError)


def test_an_endpoints_timeout_is_not_the_callers(procs):
    f = procs().spawn("e", Echo).apply.call_one(raise_this, TimeoutError("remote"))
    with pytest.raises(ActorError) as info:
        f.get(timeout=WAIT)
    assert isinstance(info.value.exception, TimeoutError)


class AsyncRaises(Actor):
    @endpoint
    async def raises(self, error):
        raise error


def test_stop_iteration_is_wrapped(procs):
    with pytest.raises(ActorError) as info:
        procs().spawn("e", Echo).apply.call_one(raise_this, StopIteration("s")).get(timeout=WAIT)
    assert isinstance(info.value.exception, StopIteration)
    with pytest.raises(ActorError) as info:
        procs().spawn("a", AsyncRaises).raises.call_one(StopIteration("s")).get(timeout=WAIT)
    assert isinstance(info.value.exception, RuntimeError)


def test_returning_an_exception_is_not_raising_it(procs):
    assert isinstance(procs().spawn("e", Echo).echo.call_one(ValueError("v")).get(timeout=WAIT), ValueError)


def fail_by_rank():
    from monarch.actor import current_rank

    raise ValueError(f"rank {current_rank().rank}")


def test_a_mesh_call_raises_the_error_of_the_lowest_rank(procs):
    with pytest.raises(ActorError, match="rank 0"):
        procs(3).spawn("e", Echo).apply.call(fail_by_rank).get(timeout=WAIT)


def test_a_stream_raises_for_the_rank_that_failed_only(procs):
    class Half(Actor):
        @endpoint
        def f(self):
            from monarch.actor import current_rank

            if current_rank().rank == 1:
                raise ValueError("rank 1")
            return "fine"

    outcomes = [f.exception(timeout=WAIT) or f.get() for f in procs(3).spawn("h", Half).f.stream()]
    assert sorted(isinstance(o, ActorError) for o in outcomes) == [False, False, True]


def test_a_timeout_of_the_caller_is_its_own(procs):
    class Never(Actor):
        @endpoint(explicit_response_port=True)
        def f(self, port): ...

    never = procs().spawn("n", Never)
    with pytest.raises(TimeoutError) as info:
        never.f.call_one().get(timeout=0.05)
    assert not isinstance(info.value, ActorError)

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(never.f.call_one().as_asyncio(), 0.05)

    asyncio.run(main())


def test_results_of_different_ranks_are_different_objects(procs):
    values = procs(3).spawn("e", Echo).echo.call([]).get(timeout=WAIT).values()
    values[0].append(1)
    assert values == [[1], [], []]


def test_arguments_and_results_are_copies_even_inside_one_process():
    from monarch.actor import this_proc

    local = this_proc().spawn("local", Echo)
    data = [1]
    assert local.echo.call_one(data).get(timeout=WAIT) is not data
    local.stop().get(timeout=WAIT)
