"""The acceptance list of supervision, one item after the other. The items about callers, hooks, orphans and stops that
need many cases have files of their own."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from owners import AsyncFrail, AsyncKeeper, Frail, Heedless, Keeper, Ruin
from watching import fence, heard, less_than

from actors_for_tests import AsyncEcho, Echo
from conftest import WAIT, gone, run_script, wait_until
from monarch.actor import Actor, ActorError, SupervisionError, endpoint


class Mixed(Actor):
    def __init__(self):
        raise AssertionError("must not be made")

    @endpoint
    def a(self): ...

    @endpoint
    async def b(self): ...


class SyncWithAsyncCleanup(Echo):
    async def __cleanup__(self, exc): ...


class AsyncWithSyncCleanup(AsyncEcho):
    def __cleanup__(self, exc): ...


class AsyncWithSyncHook(AsyncEcho):
    def __supervise__(self, failure): ...


def test_01_what_mixes_sync_and_async_is_refused_at_spawn(procs, faults):
    p = procs()
    for cls in (Mixed, SyncWithAsyncCleanup, AsyncWithSyncCleanup):
        with pytest.raises(ValueError):
            p.spawn("m", cls)
    assert p.spawn("a", AsyncWithSyncHook).echo.call_one(1).get(timeout=WAIT) == 1
    fence(procs, faults)
    assert not faults


@pytest.mark.parametrize("cls", [Echo, AsyncEcho])
@pytest.mark.parametrize("n", [1, 2])
def test_02_a_raising_endpoint_is_an_actor_error_of_its_caller(procs, cls, n):
    e = procs(n).spawn("e", cls)
    one = e.slice(gpus=n - 1)

    async def awaited(call):
        await call

    for call in (e.fail.call, one.fail.call_one):
        with pytest.raises(ActorError, match="boom"):
            call().get(timeout=WAIT)
        with pytest.raises(ActorError, match="boom"):
            asyncio.run(awaited(call()))


class NeverMade(Actor):
    def __init__(self):
        raise FileNotFoundError("no such model")

    @endpoint
    def f(self): ...


class AsyncNeverMade(NeverMade):
    f = endpoint(AsyncEcho.echo._method)


@pytest.mark.parametrize("cls", [NeverMade, AsyncNeverMade])
def test_03_a_failing_init_is_a_failure_of_each_rank(procs, faults, cls):
    m = procs(3).spawn("bad", cls)
    wait_until(lambda: len(faults) >= 3)
    assert sorted(f.crashed_ranks for f in faults) == [[0], [1], [2]]
    for f in faults:
        assert f.mesh_name == m.name and "bad" in f.report() and "no such model" in f.report()


@pytest.mark.parametrize("keeper", [Keeper, AsyncKeeper])
@pytest.mark.parametrize("cls", [Frail, AsyncFrail])
def test_04_a_broadcast_that_raises_in_a_child_is_told_to_its_owner(procs, faults, keeper, cls):
    k = procs().spawn("k", keeper)
    child = k.grow.call_one(1, cls).get(timeout=WAIT)
    child.fail.broadcast("unheard")
    (told,) = heard(k)
    assert told.mesh == child.name and told.ranks == [0] and "unheard" in told.report
    fence(procs, faults)
    assert not faults and len(heard(k)) == 1


@pytest.mark.parametrize("cls", [Frail, AsyncFrail])
def test_05_an_error_that_was_answered_is_no_failure(procs, faults, cls):
    k = procs().spawn("k", Keeper)
    for mesh in (procs(2).spawn("e", cls), k.grow.call_one(2, cls).get(timeout=WAIT)):
        for call in (mesh.fail.call, mesh.slice(gpus=0).fail.call_one, mesh.fail.choose):
            with pytest.raises(ActorError):
                call().get(timeout=WAIT)
        for answer in mesh.fail.stream():
            with pytest.raises(ActorError):
                answer.get(timeout=WAIT)
        assert mesh.echo.call(1).get(timeout=WAIT).values() == [1, 1]
    fence(procs, faults)
    assert not faults and not heard(k, 0)


class Explicit(Actor):
    @endpoint(explicit_response_port=True)
    def fail(self, port):
        raise ValueError("before answering")

    @endpoint
    def echo(self, x):
        return x


class AsyncExplicit(Actor):
    @endpoint(explicit_response_port=True)
    async def fail(self, port):
        raise ValueError("before answering")

    @endpoint
    async def echo(self, x):
        return x


@pytest.mark.parametrize("cls", [Explicit, AsyncExplicit])
def test_06_raising_with_an_explicit_port_fails_the_actor_and_its_owner_hears(procs, faults, cls):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one(1, cls).get(timeout=WAIT)
    for call in (child.fail.call_one, lambda: child.echo.call_one(1)):
        with pytest.raises(SupervisionError, match="before answering"):
            call().get(timeout=WAIT)
    assert [t.ranks for t in heard(k)] == [[0]] and not faults


def leaves(how):
    if how == "sys.exit":
        sys.exit(3)
    raise {"own": Ruin("out"), "interrupt": KeyboardInterrupt("out"), "generator": GeneratorExit("out")}[how]


@pytest.mark.parametrize(
    ("cls", "how"),
    [(Frail, "sys.exit"), (Frail, "own"), (Frail, "interrupt")]
    + [(AsyncFrail, "sys.exit"), (AsyncFrail, "own"), (AsyncFrail, "generator")],
)
def test_07_a_base_exception_fails_the_actor_but_not_its_process(procs, faults, cls, how):
    p = procs()
    e, other = p.spawn("e", cls), p.spawn("other", Echo)
    for _ in range(2):
        with pytest.raises(SupervisionError, match="all its descendants have failed"):
            e.apply.call_one(leaves, how).get(timeout=WAIT)
    assert other.echo.call_one(1).get(timeout=WAIT) == 1
    wait_until(lambda: faults)
    assert [f.mesh_name for f in faults] == [e.name]


def test_08_an_exiting_process_fails_the_call_by_name_and_can_be_stopped(procs, faults):
    p = procs(2)
    e = p.spawn("workers", Frail)
    with pytest.raises(SupervisionError, match=r"^Endpoint call workers\.exit_process\(\) failed,"):
        e.exit_process.call(1).get(timeout=WAIT)
    with pytest.raises(RuntimeError, match=r"^Endpoint call workers\.echo\(\) failed,"):
        e.echo.call(1).get(timeout=WAIT)
    assert p.stop().get(timeout=WAIT) is None


def test_09_after_a_crash_of_all_ranks_stop_works_and_the_host_starts_new_ones(procs, faults):
    p = procs(2)
    e = p.spawn("e", Echo)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=11"):
        e.segfault.call().get(timeout=WAIT)
    with less_than(1.0), pytest.raises(SupervisionError, match=r"Killed\(sig=11"):
        e.echo.call(1).get(timeout=WAIT)
    p.stop().get(timeout=WAIT)
    assert procs(2).spawn("e", Echo).echo.call(2).get(timeout=WAIT).values() == [2, 2]


def test_10_stopped_processes_refuse_calls_and_spawns_through_every_handle(procs, faults):
    p = procs(2)
    e, part, half = p.spawn("e", Echo), p.slice(gpus=0), p.slice(gpus=1)
    one = e.slice(gpus=1)
    p.stop().get(timeout=WAIT)
    for call in (lambda: e.echo.call(1), lambda: one.echo.call_one(1), lambda: e.echo.choose(1)):
        with pytest.raises(SupervisionError, match="stopped"):
            call().get(timeout=WAIT)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        p.spawn("late", Echo)
    for reference in (part, half):
        with pytest.raises(RuntimeError):
            reference.spawn("late", Echo).echo.call_one(1).get(timeout=WAIT)


@pytest.mark.parametrize("how", ["through a slice", "through a slice of a slice", "by a broadcast"])
def test_11_only_slices_with_a_dead_rank_fail(procs, faults, how):
    p = procs(4)
    m, second = p.spawn("m", Frail), p.spawn("second", Echo)
    before = {"healthy": m.slice(gpus=2), "dead": m.slice(gpus=3), "half": m.slice(gpus=slice(2, 4))}
    if how == "by a broadcast":
        m.slice(gpus=3).ruin.broadcast()
        wait_until(lambda: faults)
    else:
        handle = m.slice(gpus=slice(2, 4)) if how == "through a slice of a slice" else m
        with pytest.raises(SupervisionError):
            handle.slice(gpus=handle.extent["gpus"] - 1).ruin.call_one().get(timeout=WAIT)
    wait_until(lambda: faults)
    assert [f.crashed_ranks for f in faults] == [[3]] and faults[0].mesh_name == m.name
    after = {"dead": m.slice(gpus=3), "half": m.slice(gpus=slice(2, 4)), "odd": m.slice(gpus=slice(1, 4, 2))}
    for broken in (m, before["dead"], before["half"], *after.values(), before["half"].slice(gpus=1)):
        with pytest.raises(SupervisionError):
            broken.echo.call(1).get(timeout=WAIT)
    healthy = [before["healthy"], m.slice(gpus=2), m.slice(gpus=1), before["half"].slice(gpus=0)]
    assert [h.echo.call_one(1).get(timeout=WAIT) for h in healthy] == [1] * 4
    assert m.slice(gpus=slice(0, 3)).echo.call(1).get(timeout=WAIT).values() == [1, 1, 1]
    assert second.echo.call(1).get(timeout=WAIT).values() == [1] * 4


def test_13_a_hook_that_raises_is_called_once():
    r = run_script(
        """
        import sys, time, monarch.actor
        from monarch.actor import Actor, endpoint, this_host
        def hook(failure):
            print("hook", failure.crashed_ranks, flush=True)
            raise ValueError("not me")
        monarch.actor.unhandled_fault_hook = hook
        class A(Actor):
            @endpoint
            def fail(self): raise ValueError("boom")
        this_host().spawn_procs().spawn("a", A).fail.broadcast()
        time.sleep(20)
        """
    )
    assert r.stdout.splitlines() == ["hook [0]"] and r.returncode == 1
    assert "boom" in r.stderr and "not me" in r.stderr


def test_13_exit_handlers_and_finally_run_after_the_default_hook():
    r = run_script(
        """
        import atexit, time
        from monarch.actor import Actor, endpoint, this_host
        atexit.register(print, "atexit")
        class A(Actor):
            @endpoint
            def fail(self): raise ValueError("boom")
        try:
            this_host().spawn_procs().spawn("a", A).fail.broadcast()
            time.sleep(20)
        finally:
            print("finally")
        """
    )
    assert r.stdout.splitlines() == ["finally", "atexit"] and r.returncode == 1
    assert "Unhandled monarch error on the root actor, hostname=" in r.stderr and "boom" in r.stderr


def test_14_a_reference_whose_owner_was_lost_says_so(procs, faults):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one().get(timeout=WAIT)
    assert child.echo.call_one(1).get(timeout=WAIT) == 1
    k.do.broadcast(lambda self: os._exit(1))
    wait_until(lambda: faults)

    def lost():
        try:
            child.echo.call_one(1).get(timeout=WAIT)
        except SupervisionError as e:
            return str(e)

    wait_until(lost)
    text = lost()
    assert "timed out reaching controller" in text and "for mesh child" in text


@pytest.mark.parametrize(("cls", "how"), [(Frail, "abort"), (AsyncFrail, "abort"), (AsyncFrail, "kill")])
@pytest.mark.parametrize(("reason", "text"), [((), "no reason provided"), (("out of memory",), "out of memory")])
def test_15_an_actor_that_aborts_is_reported_with_class_and_reason(procs, faults, cls, reason, text, how):
    e = procs().spawn("e", cls)
    e.end.broadcast(how, *reason)
    wait_until(lambda: faults)
    assert text in faults[0].report() and f".{cls.__name__} e" in faults[0].report()
    with pytest.raises(SupervisionError, match=text):
        e.echo.call_one(1).get(timeout=WAIT)


@pytest.mark.parametrize("cls", [Frail, AsyncFrail])
def test_15_an_actor_that_stops_itself_is_no_failure(procs, faults, cls):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one(1, cls).get(timeout=WAIT)
    child.end.broadcast("stop", "all done")
    with pytest.raises(SupervisionError, match=r"has status:[\s\S]*stopped[\s\S]*all done"):
        child.echo.call_one(1).get(timeout=WAIT)
    fence(procs, faults)
    assert not heard(k, 0) and not faults


def test_16_the_death_of_a_nested_process_climbs_to_the_root(procs, faults):
    owner = procs().spawn("owner", Heedless)
    child = owner.grow.call_one().get(timeout=WAIT)
    os.kill(child.pid.call_one().get(timeout=WAIT), signal.SIGKILL)
    wait_until(lambda: faults)
    report = faults[0].report()
    assert "Killed(sig=9)" in report and "Heedless owner" in report and len(faults) == 1
    assert "failed because it did not handle a supervision event from its child" in report


def test_17_the_report_of_a_nested_failure_names_the_nested_actor_first(procs, faults):
    owner = procs().spawn("owner", Heedless)
    owner.grow.call_one().get(timeout=WAIT).fail.broadcast("deep down")
    wait_until(lambda: faults)
    report = faults[0].report()
    nested = "<root>.<owners.Heedless owner{'gpus': 0/1}>.<owners.Frail child{'gpus': 0/1}>"
    assert f"The actor {nested} and all its descendants have failed" in report and "deep down" in report
    assert report.index(nested) < report.index("failed because it did not handle a supervision event from its child")
    assert faults[0].mesh_name == owner.name and faults[0].crashed_ranks == [0]


NESTED = """
import os, sys
from monarch.actor import *
class Leaf(Actor):
    @endpoint
    def pid(self): return os.getpid()
class Nest(Actor):
    @endpoint
    def pids(self):
        self.inner = this_host().spawn_procs({"gpus": 3}).spawn("inner", Leaf)
        return [os.getpid(), *self.inner.pid.call().get().values()]
nests = this_host().spawn_procs({"gpus": 2}).spawn("nest", Nest)
print(*[pid for pids in nests.pids.call().get(30).values() for pid in pids], flush=True)
"""


def test_19_a_job_of_eight_processes_leaves_none_behind_after_an_exception():
    r = subprocess.run(
        [sys.executable, "-c", NESTED + "raise RuntimeError('gives up')"], text=True, capture_output=True, timeout=60
    )
    pids = [int(p) for p in r.stdout.split()]
    assert r.returncode == 1 and "gives up" in r.stderr and len(set(pids)) == 8
    wait_until(lambda: all(map(gone, pids)), within=5)


def test_20_shutdown_context_ends_all_processes_nested_ones_too():
    body = """
def gone(pid):
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError: return True
pids = [pid for pids in nests.pids.call().get(30).values() for pid in pids]
shutdown_context().get(30)
print(len(pids), all(map(gone, pids)))
"""
    r = run_script(NESTED + body)
    assert r.stdout.splitlines()[1:] == ["8 True"], r.stderr
