"""What callers of a failed mesh get: which calls fail, with what, how soon; and what is still answered."""

import asyncio
import os
import pickle

import pytest
from owners import AsyncFrail, Frail, Keeper, Ruin
from watching import fence, heard, less_than, short_limits

from actors_for_tests import AsyncEcho, Echo
from conftest import WAIT, run_script, wait_until
from monarch.actor import Actor, ActorError, SupervisionError, current_rank, endpoint, this_host
from monarch.config import configured

KINDS = pytest.mark.parametrize("cls", [Frail, AsyncFrail])

# -- slices


@pytest.mark.parametrize("how", ["ruin", "exit_process"])
def test_slices_of_slices_of_healthy_ranks_answer_in_two_dimensions(how, faults):
    p = this_host().spawn_procs({"rows": 2, "cols": 2})
    try:
        m = p.spawn("m", Frail)
        getattr(m.slice(rows=1, cols=0), how).broadcast(3)
        wait_until(lambda: faults)
        assert faults[0].crashed_ranks == [2]
        assert m.slice(rows=0).echo.call(1).get(timeout=WAIT).values() == [1, 1]
        assert m.slice(cols=1).slice(rows=1).echo.call_one(2).get(timeout=WAIT) == 2
        assert m.slice(cols=1).echo.call(3).get(timeout=WAIT).values() == [3, 3]
        for broken in (m, m.slice(rows=1), m.slice(cols=0), m.slice(rows=1).slice(cols=0)):
            with pytest.raises(SupervisionError):
                broken.echo.call(1).get(timeout=WAIT)
    finally:
        p.stop().get(timeout=WAIT)


def test_a_reference_held_elsewhere_sees_the_same_health(procs, faults):
    k, m = procs().spawn("k", Keeper), procs(2).spawn("m", Frail)

    def use(self, mesh):
        out = []
        for handle in (mesh, mesh.slice(gpus=0), mesh.slice(gpus=1)):
            try:
                out.append(handle.echo.call(1).get(timeout=WAIT).values())
            except SupervisionError:
                out.append("dead")
        return out

    assert k.do.call_one(use, m).get(timeout=WAIT) == [[1, 1], [1], [1]]
    m.slice(gpus=1).ruin.broadcast()
    assert k.do.call_one(use, m).get(timeout=WAIT) == ["dead", [1], "dead"]
    assert k.do.call_one(use, pickle.loads(pickle.dumps(m))).get(timeout=WAIT) == ["dead", [1], "dead"]


# -- how soon


@pytest.mark.parametrize("how", ["ruin", "exit_process"])
@short_limits()
def test_a_call_fails_with_the_first_dead_rank_and_does_not_wait_for_the_others(procs, faults, how):
    m = procs(3).spawn("m", AsyncFrail)
    m.echo.call(1).get(timeout=WAIT)
    pending = m.apply.call(nap_on_other_ranks, how)
    with less_than(2), pytest.raises(SupervisionError):
        pending.get(timeout=WAIT)


async def nap_on_other_ranks(how):
    if current_rank().rank == 2:
        if how == "ruin":
            raise Ruin("first")
        os._exit(1)
    await asyncio.sleep(60)


@pytest.mark.parametrize("how", ["ruin", "exit_process"])
def test_later_calls_are_refused_at_once(procs, faults, how):
    m = procs(2).spawn("m", Frail)
    getattr(m.slice(gpus=0), how).broadcast(1)
    with pytest.raises(SupervisionError):
        m.echo.call(1).get(timeout=WAIT)
    dead = m.slice(gpus=0)
    with less_than(0.5):
        for _ in range(10):
            for call in (lambda: m.echo.call(1), lambda: dead.echo.choose(1), lambda: dead.echo.call_one(1)):
                with pytest.raises(SupervisionError):
                    call().get(timeout=WAIT)


def test_choose_fails_when_its_slice_has_a_dead_rank(procs, faults):
    m = procs(2).spawn("m", Frail)
    m.slice(gpus=0).ruin.broadcast()
    wait_until(lambda: faults)
    for _ in range(10):
        with pytest.raises(SupervisionError):
            m.echo.choose(1).get(timeout=WAIT)


@KINDS
def test_calls_that_failed_on_a_dead_mesh_are_no_further_faults(procs, faults, cls):
    m = procs().spawn("m", cls)
    m.ruin.broadcast()
    for _ in range(5):
        with pytest.raises(SupervisionError):
            m.echo.call_one(1).get(timeout=WAIT)
        m.echo.broadcast(1)
        with pytest.raises(SupervisionError):
            next(iter(m.echo.stream(1))).get(timeout=WAIT)
    fence(procs, faults)
    assert [f.mesh_name for f in faults] == [m.name]


@KINDS
@pytest.mark.parametrize("how", ["ruin", "exit_process"])
def test_a_broadcast_to_a_dead_mesh_never_raises(procs, faults, cls, how):
    m = procs(2).spawn("m", cls)
    for _ in range(20):
        getattr(m, how).broadcast(1)
    wait_until(lambda: len(faults) >= 2)
    for _ in range(20):
        m.echo.broadcast(1)
        m.slice(gpus=1).echo.broadcast(1)
    fence(procs, faults)
    assert sorted(f.crashed_ranks for f in faults) == [[0], [1]]


# -- what was queued


@KINDS
def test_everything_queued_before_a_failing_message_is_answered(procs, faults, cls):
    p = procs()
    for _ in range(10):
        m = p.spawn("m", cls)
        before = [m.echo.call_one(i) for i in range(20)]
        m.ruin.broadcast("here")
        behind = [m.echo.call_one(i) for i in range(5)]
        assert [f.get(timeout=WAIT) for f in before] == list(range(20))
        for f in behind:
            with pytest.raises(SupervisionError, match="here"):
                f.get(timeout=WAIT)


@KINDS
def test_everything_queued_before_an_exit_of_the_process_is_answered(procs, faults, cls):
    for _ in range(5):
        m = procs().spawn("m", cls)
        before = [m.echo.call_one(i) for i in range(20)]
        m.exit_process.broadcast(1)
        behind = [m.echo.call_one(i) for i in range(5)]
        assert [f.get(timeout=WAIT) for f in before] == list(range(20))
        for f in behind:
            with pytest.raises(SupervisionError, match="non-zero code 1"):
                f.get(timeout=WAIT)


@KINDS
def test_everything_queued_before_an_abort_is_answered(procs, faults, cls):
    m = procs().spawn("m", cls)
    before = [m.echo.call_one(i) for i in range(20)]
    m.end.broadcast("abort", "enough")
    behind = [m.echo.call_one(i) for i in range(5)]
    assert [f.get(timeout=WAIT) for f in before] == list(range(20))
    for f in behind:
        with pytest.raises(SupervisionError, match="enough"):
            f.get(timeout=WAIT)


# -- streams


def ruin_on_rank_1(x):
    if current_rank().rank == 1:
        raise Ruin("mid-stream")
    return x


@KINDS
def test_a_stream_delivers_what_healthy_ranks_answered(procs, faults, cls):
    m = procs(4).spawn("m", cls)
    for _ in range(2):  # when the rank fails under way, and when it is known to be dead
        good, bad = [], 0
        for answer in m.apply.stream(ruin_on_rank_1, 5):
            try:
                good.append(answer.get(timeout=WAIT))
            except SupervisionError as e:
                assert "mid-stream" in str(e)
                bad += 1
        assert (good, bad) == ([5, 5, 5], 1)


def test_a_stream_delivers_healthy_ranks_when_a_process_dies(procs, faults):
    m = procs(3).spawn("m", Frail)
    m.slice(gpus=0).exit_process.broadcast(1)
    good = bad = 0
    for answer in m.echo.stream(1):
        try:
            good += answer.get(timeout=WAIT)
        except SupervisionError:
            bad += 1
    assert (good, bad) == (2, 1)


# -- errors through several actors


def ask(self):
    return self.child.fail.call_one("from the bottom").get(timeout=WAIT)


def lose(self):
    return self.child.ruin.call_one("from the bottom").get(timeout=WAIT)


def test_an_error_that_escapes_two_actors_is_an_actor_error_with_all_texts(procs, faults):
    k = procs().spawn("k", Keeper)
    k.grow.call_one().get(timeout=WAIT)
    with pytest.raises(ActorError, match="from the bottom") as info:
        k.do.call_one(ask).get(timeout=WAIT)
    assert isinstance(info.value.exception, ActorError) and info.value.message == "Actor call k.do failed."
    assert "Actor call child.fail failed." in str(info.value)
    assert not faults and not heard(k, 0)


def test_a_supervision_error_that_escapes_an_actor_is_an_actor_error_and_that_actor_lives(procs, faults):
    k = procs().spawn("k", Keeper)
    k.grow.call_one().get(timeout=WAIT)
    with pytest.raises(ActorError, match="from the bottom") as info:
        k.do.call_one(lose).get(timeout=WAIT)
    assert isinstance(info.value.exception, SupervisionError)
    assert "Endpoint call child.ruin() failed, The actor" in str(info.value)
    assert len(heard(k)) == 1 and not faults


def test_a_supervision_error_is_a_runtime_error_with_a_readable_endpoint():
    from monarch._rust_bindings.monarch_hyperactor import supervision

    assert supervision.SupervisionError is SupervisionError and supervision.MeshFailure
    e = SupervisionError("the report", "m.f()")
    assert isinstance(e, RuntimeError) and e.args == ("the report", "m.f()")
    assert str(e) == "Endpoint call m.f() failed, the report" and str(SupervisionError("the report")) == "the report"
    e.endpoint = "other.g()"
    assert e.endpoint == "other.g()" and str(pickle.loads(pickle.dumps(e))).endswith("failed, the report")


# -- spawning on what failed


class Never(Actor):
    def __init__(self):
        raise FileNotFoundError("no such model")

    @endpoint
    def f(self): ...


def test_initialized_does_not_wait_for_a_failing_init(procs, faults):
    m = procs().spawn("m", Never)
    assert m.initialized.get(timeout=WAIT) is None
    wait_until(lambda: faults)


@KINDS
def test_a_process_whose_actor_failed_takes_new_actors(procs, faults, cls):
    p = procs(2)
    m, other = p.spawn("m", cls), p.spawn("other", Echo)
    m.slice(gpus=0).ruin.broadcast()
    wait_until(lambda: faults)
    again = p.spawn("m", cls)
    assert again.echo.call(1).get(timeout=WAIT).values() == [1, 1] and again.name != m.name
    assert p.slice(gpus=1).spawn("part", Echo).echo.call_one(2).get(timeout=WAIT) == 2
    assert other.echo.call(3).get(timeout=WAIT).values() == [3, 3]
    with pytest.raises(SupervisionError):
        m.echo.call(1).get(timeout=WAIT)


def test_spawning_over_a_dead_process_fails_at_once_and_its_healthy_slice_works(procs, faults):
    p = procs(2)
    m = p.spawn("m", Frail)
    m.slice(gpus=1).exit_process.broadcast(1)
    wait_until(lambda: faults)
    late = p.spawn("late", AsyncEcho)
    with less_than(2):
        for wait in (late.initialized, late.echo.call(1)):
            with pytest.raises(RuntimeError):
                wait.get(timeout=WAIT)
    assert p.slice(gpus=0).spawn("part", Echo).echo.call_one(1).get(timeout=WAIT) == 1


def test_the_text_of_a_failed_placement_says_so(procs, faults):
    p = procs()
    p.spawn("m", Frail).exit_process.broadcast(1)
    wait_until(lambda: faults)
    late = p.spawn("late", Echo)
    with pytest.raises(RuntimeError, match="error spawning actor mesh: statuses:"):
        late.initialized.get(timeout=WAIT)
    with pytest.raises(RuntimeError, match="error spawning actor mesh: statuses:"):
        late.echo.call_one(1).get(timeout=WAIT)


def test_new_actors_on_a_process_with_a_failed_one_can_be_refused(procs, faults):
    p = procs(2)
    p.spawn("m", Frail).slice(gpus=1).ruin.broadcast()
    wait_until(lambda: faults)
    with configured(refuse_spawn_on_failed_procs=True):
        with pytest.raises(RuntimeError, match="Cannot spawn new actors on mesh.*ranks \\[1\\]"):
            p.spawn("late", Echo)
        assert p.slice(gpus=0).spawn("part", Echo).echo.call_one(2).get(timeout=WAIT) == 2


@pytest.mark.slow
def test_600_calls_outlive_a_lock_held_for_15_seconds():
    r = run_script(
        """
        from actors_for_tests import Echo
        from monarch.actor import this_host
        from monarch.testing import hold_gil
        p = this_host().spawn_procs()
        e = p.spawn("e", Echo)
        e.echo.call_one(0).get(timeout=30)
        held = hold_gil(p, 15)
        calls = [e.echo.call_one(i) for i in range(600)]
        assert [c.get(timeout=60) for c in calls] == list(range(600))
        held.get(timeout=30)
        print("answered")
        """,
        timeout=90,
        PYTHONPATH=os.path.dirname(os.path.dirname(__file__)),
        HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE="1s",
        HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE="2s",
    )
    assert (r.returncode, r.stdout) == (0, "answered\n"), r.stderr
