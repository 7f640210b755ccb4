"""Where an actor's code runs, and in which order: sync, async and concurrent endpoints."""

import asyncio
import json
import threading
import warnings

import pytest

from actors_for_tests import AsyncEcho, Echo
from conftest import WAIT, wait_until
from monarch.actor import (
    Actor,
    ActorError,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    this_proc,
)


def loop_is_visible():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Noted(Actor):
    """Notes what runs, on which thread, in a file."""

    def __init__(self, path, fail=()):
        self.path, self.fail, self.heard = path, fail, 0
        self.note("init")

    def note(self, what):
        thread = threading.current_thread()
        with open(self.path, "a") as f:
            f.write(json.dumps([what, thread.ident, thread.name, loop_is_visible()]) + "\n")
        if what in self.fail:
            raise ValueError(what)

    @endpoint
    def work(self):
        self.note("work")

    @endpoint
    def lose_a_child(self):
        self.note("lose_a_child")
        this_proc().spawn("child", Echo).fail.broadcast("child")

    @endpoint
    def times_heard(self):
        return self.heard

    @endpoint
    def base_exception(self):
        self.note("base_exception")
        raise NotAnException("out")

    def __supervise__(self, failure):
        self.note("supervise")
        self.heard += 1
        return True

    def __cleanup__(self, exc):
        self.note("cleanup")


class NotAnException(BaseException):
    pass


def notes(path):
    return [json.loads(line) for line in open(path)]


class ThreadsHere(Actor):
    @endpoint
    async def drivers(self):
        return sum(t.name == "monarch-actor-driver" for t in threading.enumerate())


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "notes")


def test_all_code_of_a_sync_actor_runs_on_one_thread_without_a_loop(procs, path):
    a = procs().spawn("a", Noted, path)
    a.lose_a_child.call_one().get(timeout=WAIT)
    wait_until(lambda: a.times_heard.call_one().get(timeout=WAIT) == 1)
    a.stop().get(timeout=WAIT)
    seen = notes(path)
    assert [n[0] for n in seen] == ["init", "lose_a_child", "supervise", "cleanup"]
    assert len({n[1] for n in seen}) == 1 and {(n[2], n[3]) for n in seen} == {("monarch-actor-driver", False)}


@pytest.mark.parametrize("fail", [(), ("cleanup",)])
def test_the_thread_of_a_sync_actor_ends_with_it(procs, faults, path, fail):
    p = procs()
    watch, a = p.spawn("w", ThreadsHere), p.spawn("a", Noted, path, fail)
    a.work.call_one().get(timeout=WAIT)
    assert watch.drivers.call_one().get(timeout=WAIT) == 1
    a.stop().get(timeout=WAIT)
    wait_until(lambda: watch.drivers.call_one().get(timeout=WAIT) == 0)


def test_the_thread_ends_after_a_failing_init_without_a_cleanup(procs, faults, path):
    p = procs()
    watch, a = p.spawn("w", ThreadsHere), p.spawn("a", Noted, path, ("init",))
    with pytest.raises(SupervisionError, match="init"):
        a.work.call_one().get(timeout=WAIT)
    wait_until(lambda: watch.drivers.call_one().get(timeout=WAIT) == 0)
    assert [n[0] for n in notes(path)] == ["init"]


def test_a_base_exception_ends_a_sync_actor_with_a_cleanup_and_no_further_message(procs, faults, path):
    p = procs()
    watch, a = p.spawn("w", ThreadsHere), p.spawn("a", Noted, path)
    first, second = a.base_exception.call_one(), a.work.call_one()
    for f in (first, second):
        with pytest.raises((SupervisionError, ActorError)):
            f.get(timeout=WAIT)
    wait_until(lambda: watch.drivers.call_one().get(timeout=WAIT) == 0)
    assert [n[0] for n in notes(path)] == ["init", "base_exception", "cleanup"]
    wait_until(lambda: faults)


class Parent(Actor):
    def __init__(self):
        self.log = []

    @endpoint
    def long_body(self):
        child = this_proc().spawn("child", Echo)
        child.fail.broadcast()
        try:
            child.echo.call_one(1).get(timeout=WAIT)
        except SupervisionError:
            pass
        threading.Event().wait(0.5)  # the body goes on after the failure
        self.log.append("body")

    @endpoint
    def queued(self, i):
        self.log.append(i)
        return list(self.log)

    def __supervise__(self, failure):
        self.log.append("supervise")
        return True


def test_supervise_runs_before_queued_messages(procs):
    a = procs().spawn("a", Parent)
    a.long_body.broadcast()
    last = [a.queued.call_one(i) for i in range(3)][-1]
    log = last.get(timeout=WAIT)
    assert [x for x in log if x != "body"] == ["supervise", 0, 1, 2] and log.index("body") < log.index(0)


class Busy(Actor):
    def __init__(self, path):
        self.path = path

    @endpoint
    def body(self, started):
        started.send(None)
        threading.Event().wait(0.5)
        open(self.path, "a").write("body ")

    def __supervise__(self, failure):
        open(self.path, "a").write("supervise ")
        return True

    def __cleanup__(self, exc):
        open(self.path, "a").write("cleanup ")


def test_stop_lets_the_running_body_end_before_the_cleanup(procs, path):
    from monarch.actor import Channel

    a = procs().spawn("a", Busy, path)
    started, inbox = Channel.open()
    a.body.broadcast(started)
    inbox.recv().get(timeout=WAIT)
    a.stop().get(timeout=WAIT)
    assert open(path).read().split() == ["body", "cleanup"]


class Local(Actor):
    def __init__(self):
        self.local = threading.local()
        self.local.value = "kept"

    @endpoint
    def value(self):
        return self.local.value


class AsyncLocal(Local):
    @endpoint
    async def value(self):
        return self.local.value


@pytest.mark.parametrize("cls", [Local, AsyncLocal])
def test_thread_locals_of_init_are_there_in_every_call(procs, cls):
    a = procs().spawn("a", cls)
    assert [a.value.call_one().get(timeout=WAIT) for _ in range(4)] == ["kept"] * 4


class SyncCaller(Actor):
    @endpoint
    def ask(self, other):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return other.echo.call_one(1).get(timeout=WAIT), loop_is_visible()


class AsyncCaller(Actor):
    @endpoint
    async def ask(self, other):
        return await other.echo.call_one(1), loop_is_visible()


@pytest.mark.parametrize(("cls", "loop"), [(SyncCaller, False), (AsyncCaller, True)])
def test_sync_endpoints_get_without_a_warning_and_async_ones_await(procs, cls, loop):
    other = procs().spawn("e", Echo)
    assert procs().spawn("a", cls).ask.call_one(other).get(timeout=WAIT) == (1, loop)


class Helpers(AsyncEcho):
    def plain(self, x):
        return x, loop_is_visible()


class SyncHelpers(Echo):
    async def coroutine(self):
        return 1


def test_a_plain_method_of_an_async_actor_runs_as_an_endpoint_without_a_loop(procs):
    a = procs().spawn("a", Helpers)
    assert as_endpoint(a.plain).call_one(3).get(timeout=WAIT) == (3, False)


def test_an_async_method_of_a_sync_actor_is_refused_and_the_actor_lives(procs, faults):
    a = procs().spawn("a", SyncHelpers)
    with pytest.raises(ActorError, match="is an async def method") as info:
        as_endpoint(a.coroutine).call_one().get(timeout=WAIT)
    assert isinstance(info.value.exception, TypeError)
    assert a.echo.call_one(1).get(timeout=WAIT) == 1 and not faults


# -- concurrent endpoints


class Meeting(Actor):
    def __init__(self, path=None):
        self.here, self.full, self.path = 0, asyncio.Event(), path
        self.log = []

    @concurrent_endpoint
    async def meet(self, n):
        self.here += 1
        if self.here == n:
            self.full.set()
        await self.full.wait()
        return current_rank().rank, self.here

    @concurrent_endpoint(explicit_response_port=True)
    async def answer_early(self, port):
        port.send("early")
        await self.full.wait()

    @concurrent_endpoint(explicit_response_port=True)
    async def fail_with_port(self, port):
        raise ValueError("explicit")

    @concurrent_endpoint
    async def fail(self, error):
        raise error

    @concurrent_endpoint
    async def start(self, i):
        self.log.append(i)
        await asyncio.sleep(0)

    @endpoint
    async def serial(self):
        self.log.append("in")
        await asyncio.sleep(0.3)
        self.log.append("out")

    @endpoint
    async def read_log(self):
        self.log.append("read")
        return self.log

    @concurrent_endpoint
    async def hang(self, started):
        started.send(None)
        try:
            await asyncio.Event().wait()
        finally:
            open(self.path, "a").write("body ")

    async def __cleanup__(self, exc):
        if self.path:
            open(self.path, "a").write("cleanup ")

    @concurrent_endpoint
    async def ask_myself(self, me):
        return await me.start.call_one("self")

    @concurrent_endpoint
    async def my_point(self, other_first):
        before = context().message_rank
        self.here += 1
        if self.here == 2:
            self.full.set()
        await self.full.wait()
        return before == context().message_rank, str(before)


class Inherited(Meeting):
    pass


@pytest.mark.parametrize("cls", [Meeting, Inherited])
def test_concurrent_calls_overlap(procs, cls):
    a = procs().spawn("a", cls)
    both = [a.meet.call_one(2) for _ in range(2)]
    assert [f.get(timeout=WAIT) for f in both] == [(0, 2), (0, 2)]


def test_a_concurrent_call_may_answer_before_it_ends(procs):
    a = procs().spawn("a", Meeting)
    assert a.answer_early.call_one().get(timeout=WAIT) == "early"
    assert a.meet.call_one(1).get(timeout=WAIT) == (0, 1)


def test_plain_async_endpoints_never_overlap(procs):
    a = procs().spawn("a", Meeting)
    a.serial.broadcast()
    assert a.read_log.call_one().get(timeout=WAIT) == ["in", "out", "read"]


def test_concurrent_bodies_start_in_the_order_they_were_sent(procs):
    a = procs().spawn("a", Meeting)
    sent = [a.start.call_one(i) for i in range(100)]
    for f in sent:
        f.get(timeout=WAIT)
    assert a.read_log.call_one().get(timeout=WAIT) == [*range(100), "read"]


def test_a_concurrent_endpoint_may_call_its_own_actor(procs):
    a = procs().spawn("a", Meeting)
    assert a.ask_myself.call_one(a).get(timeout=WAIT) is None


def test_each_concurrent_body_keeps_its_own_context(procs):
    a = procs(2).spawn("a", Meeting).slice(gpus=1)
    whole = a.my_point.call_one(True)
    part = a.my_point.call_one(False)
    assert whole.get(timeout=WAIT)[0] and part.get(timeout=WAIT)[0]


def test_a_concurrent_failure_names_the_call_and_the_actor_lives(procs, faults):
    a = procs().spawn("a", Meeting)
    with pytest.raises(ActorError, match=r"Actor call a\.fail failed\.") as info:
        a.fail.call_one(ValueError("mine")).get(timeout=WAIT)
    assert isinstance(info.value.exception, ValueError)
    assert a.meet.call_one(1).get(timeout=WAIT) == (0, 1) and not faults


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_concurrent_base_exception_fails_the_call_only(procs, faults, error):
    a = procs().spawn("a", Meeting)
    with pytest.raises(ActorError, match="failed with BaseException"):
        a.fail.call_one(error).get(timeout=WAIT)
    assert a.meet.call_one(1).get(timeout=WAIT) == (0, 1) and not faults


def test_a_concurrent_failure_with_an_explicit_port_fails_the_actor(procs, faults):
    a = procs().spawn("a", Meeting)
    with pytest.raises(SupervisionError, match="explicit"):
        a.fail_with_port.call_one().get(timeout=WAIT)
    wait_until(lambda: len(faults) == 1)


def test_stop_cancels_concurrent_bodies_before_the_cleanup(procs, faults, path):
    from monarch.actor import Channel

    a = procs().spawn("a", Meeting, path)
    started, inbox = Channel.open()
    call = a.hang.call_one(started)
    inbox.recv().get(timeout=WAIT)
    a.stop().get(timeout=WAIT)
    assert open(path).read().split() == ["body", "cleanup"]
    with pytest.raises((SupervisionError, ActorError)):
        call.get(timeout=WAIT)
    assert not faults


class PlainCancelled(Actor):
    @endpoint
    async def cancelled(self):
        raise asyncio.CancelledError

    @endpoint
    async def ping(self):
        return 1


class SyncCancelled(Actor):
    @endpoint
    def cancelled(self):
        raise asyncio.CancelledError

    @endpoint
    def ping(self):
        return 1


@pytest.mark.parametrize("cls", [PlainCancelled, SyncCancelled])
def test_a_cancellation_that_escapes_fails_the_actor_and_nobody_hangs(procs, faults, cls):
    a = procs().spawn("a", cls)
    for f in (a.cancelled.call_one(), a.ping.call_one()):
        with pytest.raises(SupervisionError):
            f.get(timeout=WAIT)
    wait_until(lambda: len(faults) == 1)


# -- decorators


def test_a_concurrent_endpoint_must_be_async():
    with pytest.raises(ValueError, match="concurrent_endpoint can only wrap async endpoints"):

        @concurrent_endpoint
        def plain(self): ...


def test_decorators_do_not_stack():
    with pytest.raises(ValueError, match="does not wrap @endpoint"):

        @concurrent_endpoint
        @endpoint
        async def f(self): ...


@pytest.mark.parametrize("use", [endpoint, endpoint(), endpoint(instrument=False)])
def test_a_decorator_is_used_bare_or_with_options(procs, use):
    class Used(Actor):
        f = use(lambda self, x: x + 1)

    assert procs().spawn("a", Used).f.call_one(1).get(timeout=WAIT) == 2


def test_properties_of_the_decorators_are_readable():
    assert Meeting.meet._explicit_response_port and not Echo.echo._explicit_response_port
    assert Echo.echo._method(Echo(), 5) == 5


def test_an_endpoint_is_not_callable_inside_its_actor():
    with pytest.raises(TypeError, match="'EndpointProperty' object is not callable"):
        Echo().echo(1)


# -- what may be spawned


class Mixed(Actor):
    @endpoint
    def a(self): ...

    @endpoint
    async def b(self): ...


class AsyncChild(Echo):
    @endpoint
    async def more(self): ...


class WrongCleanup(Echo):
    async def __cleanup__(self, exc): ...


class WrongSupervise(Echo):
    async def __supervise__(self, failure): ...


class Collides(Actor):
    @endpoint
    def slice(self): ...


class NotAnActor:
    pass


class AsyncInit(Actor):
    async def __init__(self): ...

    @endpoint
    def f(self): ...


@pytest.mark.parametrize(
    ("cls", "error", "text"),
    [
        (Mixed, ValueError, "mixes both async and sync"),
        (AsyncChild, ValueError, "mixes both async and sync"),
        (WrongCleanup, ValueError, "__cleanup__"),
        (WrongSupervise, ValueError, "__supervise__"),
        (Collides, ValueError, "collides with an endpoint name"),
        (NotAnActor, ValueError, "must subclass .*Actor to spawn it"),
        (Echo(), TypeError, "class"),
        (AsyncInit, TypeError, "__init__"),
    ],
)
def test_what_cannot_be_an_actor_is_refused_at_spawn(procs, faults, cls, error, text):
    p = procs()
    with pytest.raises(error, match=text):
        p.spawn("a", cls)
    assert p.spawn("e", Echo).echo.call_one(1).get(timeout=WAIT) == 1 and not faults


def test_wrong_arguments_of_init_are_refused_at_spawn(procs):
    p = procs()
    with pytest.raises(TypeError):
        p.spawn("a", Noted)
    with pytest.raises(TypeError):
        p.spawn("a", AsyncEcho, 1)


class Assigning(Actor):
    def __init__(self):
        self.sizes, self.extent, self.initialized, self.stop, self.size, self.name = 1, 2, 3, 4, 5, 6

    @endpoint
    def all(self):
        return self.sizes, self.extent, self.initialized, self.stop, self.size, self.name


def test_an_actor_may_use_any_attribute_name(procs):
    assert procs().spawn("a", Assigning).all.call_one().get(timeout=WAIT) == (1, 2, 3, 4, 5, 6)


def test_mesh_operations_on_a_local_instance_say_it_is_none():
    with pytest.raises(NotImplementedError):
        Echo().slice(gpus=0)
    with pytest.raises(NotImplementedError):
        Echo().stop()
