"""Stops and `__cleanup__`: order, reasons, limits; and what happens to nested actors."""

import asyncio
import os
import signal
import threading

import pytest
from owners import AsyncFrail, AsyncKeeper, Frail, Keeper, Leaf, note, notes
from watching import fence, heard, less_than, short_limits

from actors_for_tests import Echo
from conftest import WAIT, gone, run_script, wait_until
from monarch.actor import Actor, ActorError, Channel, SupervisionError, context, endpoint, this_host, this_proc
from monarch.config import configured

KINDS = pytest.mark.parametrize("cls", [Frail, AsyncFrail])


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "notes")


# -- stop


def stop_child(self):
    self.child.stop("no longer needed").get(timeout=WAIT)


def stop_procs(self):
    self.procs.stop().get(timeout=WAIT)


@pytest.mark.parametrize("stop", [stop_child, stop_procs])
def test_a_stop_is_told_to_callers_not_to_the_owner(procs, faults, stop):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one(2).get(timeout=WAIT)
    assert child.echo.call(1).get(timeout=WAIT).values() == [1, 1]
    k.do.call_one(stop).get(timeout=WAIT)
    for call in (lambda: child.echo.call(1), lambda: child.slice(gpus=1).echo.call_one(1)):
        with pytest.raises(SupervisionError, match=r"has status:[\s\S]*stopped"):
            call().get(timeout=WAIT)
    fence(procs, faults)
    assert not heard(k, 0) and not faults


@pytest.mark.parametrize("what", ["actors", "processes"])
@KINDS
def test_a_stop_answers_queued_calls_first(procs, faults, cls, what):
    p = procs()
    m = p.spawn("m", cls)
    queued = [m.nap.call_one(0.05), *[m.echo.call_one(i) for i in range(20)]]
    (m if what == "actors" else p).stop().get(timeout=WAIT)
    assert all(f.done() for f in queued)
    assert [f.get(timeout=WAIT) for f in queued] == ["rested", *range(20)]


@pytest.mark.parametrize("what", ["actors", "processes"])
@KINDS
@short_limits()
def test_the_stop_of_a_busy_actor_is_bounded_and_no_fault(procs, faults, cls, what):
    p = procs()
    m, started = p.spawn("m", cls), Channel.open()
    m.apply.broadcast(started[0].send, None)
    pending = m.nap.call_one(20)
    started[1].recv().get(timeout=WAIT)
    with less_than(3):
        (m if what == "actors" else p).stop().get(timeout=WAIT)
    with pytest.raises((SupervisionError, ActorError)):
        pending.get(timeout=WAIT)
    if what == "processes":
        fence(procs, faults)
    assert not faults


def test_processes_that_are_all_dead_can_be_stopped_at_once(procs, faults):
    p = procs(3)
    m = p.spawn("m", Frail)
    pids = m.pid.call().get(timeout=WAIT).values()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(faults) == 3)
    with less_than(1):
        m.stop().get(timeout=WAIT)
        p.stop().get(timeout=WAIT)
    assert procs(1).spawn("m", Echo).echo.call_one(1).get(timeout=WAIT) == 1


def test_processes_that_die_during_a_stop_do_not_hold_it_up(procs, faults):
    p = procs(2)
    m = p.spawn("m", Frail)
    pids = m.pid.call().get(timeout=WAIT).values()
    m.nap.broadcast(20)
    stopped = p.stop()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with less_than(2):
        stopped.get(timeout=WAIT)
    fence(procs, faults)
    assert not faults


class NeverMade(Actor):
    def __init__(self):
        raise FileNotFoundError("no such model")

    @endpoint
    def f(self): ...


class NeverReady(Actor):
    def __init__(self, port):
        port.send(os.getpid())
        threading.Event().wait()

    @endpoint
    def f(self): ...


def test_a_stop_right_after_spawns_works_whatever_becomes_of_them(procs, faults):
    for _ in range(3):
        p = procs()
        p.spawn("bad", NeverMade)
        good = p.spawn("good", Echo)
        assert p.stop().get(timeout=WAIT) is None
        with pytest.raises(SupervisionError):
            good.echo.call_one(1).get(timeout=WAIT)
    this = this_host().spawn_procs({"gpus": 2})
    with less_than(5):
        this.stop().get(timeout=WAIT)


@short_limits()
def test_an_actor_whose_init_never_returns_can_be_stopped(procs, faults):
    port, inbox = Channel.open()
    p = procs()
    m = p.spawn("never", NeverReady, port)
    inbox.recv().get(timeout=WAIT)
    with less_than(3):
        m.stop().get(timeout=WAIT)
    assert p.spawn("e", Echo).echo.call_one(1).get(timeout=WAIT) == 1 and not faults


def test_a_refused_stop_changes_nothing(procs):
    p = procs(2)
    m = p.spawn("m", Frail)

    def refuse(self, procs, mesh):
        out = []
        for handle in (procs, procs.slice(gpus=0), this_proc(), mesh, mesh.slice(gpus=0), this_host()):
            try:
                handle.stop()
            except Exception as e:
                out.append((type(e), str(e)))
        return out

    k = procs().spawn("k", Keeper)
    got = k.do.call_one(refuse, p, m).get(timeout=WAIT)
    assert [t for t, _ in got] == [ValueError] * 3 + [NotImplementedError] * 2 + [RuntimeError]
    assert all("ProcMesh is not owned; must be stopped by an owner" in text for _, text in got[:3])
    assert all("requires an owned ActorMesh" in text for _, text in got[3:5])
    assert "cannot stop/shut down `HostMesh` that is a reference instead of owned" in got[5][1]
    assert m.echo.call(1).get(timeout=WAIT).values() == [1, 1]
    m.stop().get(timeout=WAIT)
    m.stop().get(timeout=WAIT)


def test_calls_under_way_during_a_graceful_stop_are_no_faults(procs, faults):
    with configured(message_delivery_timeout="200ms"):
        p = procs(2)
        m, k = p.spawn("m", Frail), procs().spawn("k", Keeper)

        def flood(self, mesh):
            for i in range(200):
                mesh.echo.broadcast(i)
            return [mesh.echo.call(i) for i in range(200)] and None

        k.do.call_one(flood, m).get(timeout=WAIT)
        p.stop().get(timeout=WAIT)
        fence(procs, faults)
        assert not faults and not heard(k, 0)


# -- cleanup


class Cleans(Frail):
    def __init__(self, path, friend=None, fail=""):
        self.path, self.friend, self.fail_with = path, friend, fail
        self.thread = threading.get_ident()

    @endpoint
    def leave(self):
        raise SystemExit(3)

    @endpoint
    def lose_a_child(self):
        this_proc().spawn("child", Frail).ruin.broadcast("of the child")

    def __cleanup__(self, exc):
        try:
            asyncio.get_running_loop()
            loop = "loop"
        except RuntimeError:
            loop = "no-loop"
        said = self.friend.echo.call_one("hello").get(timeout=WAIT) if self.friend is not None else "-"
        same = threading.get_ident() == self.thread
        text = "" if exc is None else str(exc).replace("\n", " ")
        note(self.path, f"{type(exc).__name__} {loop} {said} {same} {isinstance(exc, (Exception, type(None)))} {text}")
        if self.fail_with:
            raise ValueError(self.fail_with)


class AsyncCleans(AsyncFrail):
    def __init__(self, path, friend=None, fail=""):
        self.path, self.friend, self.fail_with = path, friend, fail
        self.thread = threading.get_ident()

    @endpoint
    async def leave(self):
        raise SystemExit(3)

    @endpoint
    async def lose_a_child(self):
        this_proc().spawn("child", Frail).ruin.broadcast("of the child")

    async def __cleanup__(self, exc):
        loop = "loop" if asyncio.get_running_loop() else ""
        said = await self.friend.echo.call_one("hello") if self.friend is not None else "-"
        same = threading.get_ident() == self.thread
        text = "" if exc is None else str(exc).replace("\n", " ")
        note(self.path, f"{type(exc).__name__} {loop} {said} {same} {isinstance(exc, (Exception, type(None)))} {text}")
        if self.fail_with:
            raise ValueError(self.fail_with)


CLEANERS = pytest.mark.parametrize(("cls", "loop"), [(Cleans, "no-loop"), (AsyncCleans, "loop")])


@CLEANERS
@pytest.mark.parametrize("what", ["actors", "processes", "itself"])
def test_a_normal_stop_cleans_up_without_an_exception_and_may_call_others(procs, faults, path, cls, loop, what):
    friend = procs().spawn("friend", Echo)
    p = procs()
    m = p.spawn("m", cls, path, friend)
    m.echo.call_one(1).get(timeout=WAIT)
    if what == "itself":
        m.end.broadcast("stop")
    else:
        (m if what == "actors" else p).stop().get(timeout=WAIT)
    wait_until(lambda: notes(path))
    assert notes(path) == [f"NoneType {loop} hello True True "] and not faults


def ruin(m):
    m.ruin.broadcast("why")


def raise_unanswered(m):
    m.fail.broadcast("why")


def abort(m):
    m.end.broadcast("abort", "why")


def leave(m):
    m.leave.call_one()


def lose_a_child(m):
    m.lose_a_child.broadcast()


@CLEANERS
@pytest.mark.parametrize(
    ("how", "text"),
    [(ruin, "why"), (raise_unanswered, "why"), (abort, "why"), (leave, "SystemExit"), (lose_a_child, "of the child")],
)
def test_every_failure_that_leaves_the_process_alive_cleans_up_with_its_reason(
    procs, faults, path, cls, loop, how, text
):
    m = procs().spawn("m", cls, path)
    how(m)
    wait_until(lambda: notes(path))
    (line,) = notes(path)
    assert f"{loop} - True True" in line and text in line and not line.startswith("NoneType")
    wait_until(lambda: faults)


@pytest.mark.parametrize(("cls", "how"), [(Cleans, "exit"), (AsyncCleans, "exit 0"), (Cleans, "kill")])
def test_a_process_that_dies_cleans_nothing_up(procs, faults, path, cls, how):
    m = procs().spawn("m", cls, path)
    if how == "kill":
        os.kill(m.pid.call_one().get(timeout=WAIT), signal.SIGKILL)
    else:
        m.exit_process.broadcast(0 if how == "exit 0" else 1)
    wait_until(lambda: faults)
    assert not notes(path)


@CLEANERS
def test_a_cleanup_that_raises_on_a_stop_is_a_failure_for_the_owner(procs, faults, path, cls, loop):
    m = procs().spawn("m", cls, path, None, "cannot clean up")
    m.echo.call_one(1).get(timeout=WAIT)
    m.stop().get(timeout=WAIT)
    wait_until(lambda: faults)
    assert "cannot clean up" in faults[0].report() and faults[0].mesh_name == m.name


@CLEANERS
def test_a_cleanup_that_raises_after_a_failure_is_a_second_failure_chained_to_the_first(procs, faults, path, cls, loop):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one(1, cls, path, None, "cannot clean up").get(timeout=WAIT)
    child.ruin.broadcast("the first reason")
    first, second = heard(k, 2)
    assert "the first reason" in first.report and "cannot clean up" not in first.report
    assert "the first reason" in second.report and "cannot clean up" in second.report
    assert first.mesh == second.mesh == child.name and not faults


class SlowCleanup(AsyncFrail):
    def __init__(self, path):
        self.path = path

    async def __cleanup__(self, exc):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            note(self.path, "cancelled")
            raise


@short_limits()
def test_a_cleanup_that_takes_too_long_is_cancelled_and_reported(procs, faults, path):
    m = procs().spawn("m", SlowCleanup, path)
    m.ruin.broadcast("the first reason")
    wait_until(lambda: len(faults) == 2)
    assert notes(path) == ["cancelled"] and "the first reason" in faults[0].report()
    assert "cleanup" in faults[1].report() and "the first reason" in faults[1].report()


class LeavesATask(Actor):
    def __init__(self, path):
        self.path = path

    @endpoint
    async def start(self):
        async def background():
            try:
                await asyncio.Event().wait()
            finally:
                note(self.path, "task cancelled")

        self.task = asyncio.create_task(background())
        await asyncio.sleep(0)

    async def __cleanup__(self, exc):
        await asyncio.sleep(0)
        note(self.path, f"cleanup {self.task.done()}")


def test_tasks_that_an_actor_left_are_cancelled_after_its_cleanup(procs, path):
    m = procs().spawn("m", LeavesATask, path)
    m.start.call_one().get(timeout=WAIT)
    m.stop().get(timeout=WAIT)
    wait_until(lambda: len(notes(path)) == 2)
    assert notes(path) == ["cleanup False", "task cancelled"]


# -- nested


class LooksBack(Keeper):
    """At its cleanup, tries what it owned."""

    def __cleanup__(self, exc):
        try:
            self.child.echo.call(1).get(timeout=WAIT)
            note(self.path, "child answers")
        except SupervisionError:
            note(self.path, "child is gone")
        note(self.path, f"processes are gone: {all(map(gone, self.pids))}")


@pytest.mark.parametrize("how", ["stop", "abort"])
def test_what_an_actor_owned_is_gone_when_it_cleans_up(procs, faults, path, how):
    k = procs().spawn("k", LooksBack, True, path)
    child = k.grow.call_one(2, Leaf, path).get(timeout=WAIT)
    pids = child.pid.call().get(timeout=WAIT).values()
    k.do.call_one(lambda self, pids: setattr(self, "pids", pids), pids).get(timeout=WAIT)
    if how == "stop":
        k.stop().get(timeout=WAIT)
    else:
        k.do.broadcast(lambda self: context().actor_instance.abort("enough"))
    wait_until(lambda: len(notes(path)) == 4)
    assert notes(path) == ["leaf normal"] * 2 + ["child is gone", "processes are gone: True"]


@pytest.mark.parametrize(
    ("keeper", "how"),
    [(Keeper, "stop"), (Keeper, "stop processes"), (Keeper, "abort"), (AsyncKeeper, "stop"), (AsyncKeeper, "raise")],
)
def test_nested_actors_go_with_their_owner_deepest_first(procs, faults, path, keeper, how):
    p = procs()
    top = p.spawn("top", keeper, True, path, "top")
    middle = top.grow.call_one(1, Keeper, True, path, "middle").get(timeout=WAIT)
    leaves = middle.grow.call_one(2, Leaf, path).get(timeout=WAIT)
    pids = [middle.pid.call_one().get(timeout=WAIT), *leaves.pid.call().get(timeout=WAIT).values()]
    if how == "abort":
        top.do.broadcast(lambda self: context().actor_instance.abort("enough"))
    elif how == "raise":
        top.do.broadcast(lambda self: 1 / 0)
    else:
        (top if how == "stop" else p).stop().get(timeout=WAIT)
        assert all(map(gone, pids))
    wait_until(lambda: len(notes(path)) == 4)
    end = "top normal" if how.startswith("stop") else "top failed"
    assert notes(path) == ["leaf normal", "leaf normal", "middle normal", end]
    wait_until(lambda: all(map(gone, pids)), within=2)
    for mesh in (middle.told.call_one, leaves.pid.call):
        with pytest.raises(SupervisionError):
            mesh().get(timeout=WAIT)
    assert len(faults) == (0 if how.startswith("stop") else 1)


def test_actors_on_borrowed_processes_stop_with_their_owner_and_the_processes_stay(procs, faults, path):
    lent = procs(2)
    mine, k = lent.spawn("mine", Echo), procs().spawn("k", Keeper)

    def borrow(self, lent, path):
        self.guest = lent.spawn("guest", Leaf, path, "guest")
        self.guest.echo.call(1).get(timeout=WAIT)
        return self.guest

    guest = k.do.call_one(borrow, lent, path).get(timeout=WAIT)
    k.stop().get(timeout=WAIT)
    assert notes(path) == ["guest normal"] * 2
    assert mine.echo.call(2).get(timeout=WAIT).values() == [2, 2]
    with pytest.raises(SupervisionError, match="stopped"):
        guest.echo.call(1).get(timeout=WAIT)
    fence(procs, faults)
    assert not faults


def test_stopping_one_owner_leaves_the_meshes_of_another_on_the_same_processes(procs, faults):
    lent = procs()
    a, b = procs().spawn("a", Keeper), procs().spawn("b", Keeper)

    def borrow(self, lent):
        self.guest = lent.spawn("guest", Echo)
        return self.guest

    of_a, of_b = (k.do.call_one(borrow, lent).get(timeout=WAIT) for k in (a, b))
    assert of_a.echo.call_one(1).get(timeout=WAIT) == of_b.echo.call_one(1).get(timeout=WAIT) == 1
    a.stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        of_a.echo.call_one(1).get(timeout=WAIT)
    assert of_b.echo.call_one(2).get(timeout=WAIT) == 2


def test_an_actor_that_is_ending_cannot_spawn(procs, faults, path):
    class Late(Keeper):
        def __cleanup__(self, exc):
            try:
                this_proc().spawn("late", Echo)
                note(self.path, "spawned")
            except RuntimeError:
                note(self.path, "refused")

    k = procs().spawn("k", Late, True, path)
    k.told.call_one().get(timeout=WAIT)
    k.stop().get(timeout=WAIT)
    assert notes(path) == ["refused"]


# -- the end of the client


def test_every_cleanup_runs_when_the_client_ends(path):
    r = run_script(
        f"""
        import asyncio, threading, time
        from monarch.actor import *
        def note(line):
            with open({path!r}, "a") as f: f.write(line + "\\n")
        class Sync(Actor):
            @endpoint
            def ping(self): return 1
            def __cleanup__(self, exc):
                time.sleep(0.3)
                note("sync")
        class Async(Actor):
            @endpoint
            async def ping(self): return 1
            async def __cleanup__(self, exc):
                await asyncio.sleep(0.3)
                note("async")
        class Nests(Actor):
            @endpoint
            def ping(self):
                self.p = this_host().spawn_procs()
                self.m = self.p.spawn("inner", Sync)
                return self.m.ping.call_one().get(20)
            def __cleanup__(self, exc): note("nests")
        p, q = this_host().spawn_procs({{"g": 3}}), this_host().spawn_procs()
        meshes = [p.spawn("s", Sync), p.spawn("a", Async), q.spawn("n", Nests), this_proc().spawn("here", Sync)]
        for m in meshes: m.ping.call().get(20)
        """
    )
    assert r.returncode == 0, r.stderr
    assert sorted(notes(path)) == ["async"] * 3 + ["nests"] + ["sync"] * 5
