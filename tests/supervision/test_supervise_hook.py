"""`__supervise__`: who is asked, how often, where and when it runs, and what its answer does."""

import asyncio
import os
import pickle
import signal
import threading
import time

import pytest
from owners import KEEPERS, AsyncFrail, AsyncKeeper, Frail, Heedless, Keeper, Leaf, MixedKeeper, notes
from watching import fence, heard, less_than, short_limits

from actors_for_tests import Echo
from conftest import WAIT, gone, wait_until
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    SupervisionError,
    context,
    endpoint,
    this_host,
    this_proc,
)

# -- what the answer does


@pytest.mark.parametrize(("keeper", "answer"), [(Keeper, True), (Keeper, "yes"), (AsyncKeeper, True), (MixedKeeper, 1)])
def test_a_truthy_answer_ends_the_matter(procs, faults, keeper, answer):
    k = procs().spawn("k", keeper, answer)
    child = k.grow.call_one(2).get(timeout=WAIT)
    child.slice(gpus=1).ruin.broadcast()
    assert [t.ranks for t in heard(k)] == [[1]]
    assert child.slice(gpus=0).echo.call_one(1).get(timeout=WAIT) == 1
    fence(procs, faults)
    assert not faults and len(heard(k)) == 1


@pytest.mark.parametrize(
    ("keeper", "answer"), [(Keeper, False), (Keeper, None), (AsyncKeeper, None), (AsyncKeeper, 0), (MixedKeeper, False)]
)
def test_a_falsey_answer_fails_the_owner_too(procs, faults, keeper, answer):
    k = procs().spawn("k", keeper, answer)
    child = k.grow.call_one().get(timeout=WAIT)
    child.ruin.broadcast("the root cause")
    wait_until(lambda: faults)
    report = faults[0].report()
    sentence = "failed because it did not handle a supervision event from its child"
    assert faults[0].mesh_name == k.name and len(faults) == 1
    assert report.index("the root cause") < report.index(sentence)
    with pytest.raises(SupervisionError, match=sentence):
        k.told.call_one().get(timeout=WAIT)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_hook_that_raises_fails_the_owner_with_both_reasons(procs, faults, keeper):
    k = procs().spawn("k", keeper, LookupError("no spare left"))
    k.grow.call_one().get(timeout=WAIT).ruin.broadcast("the root cause")
    wait_until(lambda: faults)
    report = faults[0].report()
    assert faults[0].mesh_name == k.name and len(faults) == 1
    at = report.index("no spare left")
    assert at < report.index("This error occurred while handling", at) < report.rindex("the root cause")
    with pytest.raises(SupervisionError, match="no spare left"):
        k.told.call_one().get(timeout=WAIT)


def leave(self, failure):
    raise SystemExit(4)


@pytest.mark.parametrize("keeper", [Keeper, AsyncKeeper])
def test_a_hook_that_raises_a_base_exception_fails_the_owner_not_its_process(procs, faults, keeper):
    p = procs()
    k, other = p.spawn("k", keeper, leave), p.spawn("other", Echo)
    k.grow.call_one().get(timeout=WAIT).ruin.broadcast("the root cause")
    wait_until(lambda: faults)
    assert "SystemExit: 4" in faults[0].report() and "the root cause" in faults[0].report()
    assert other.echo.call_one(1).get(timeout=WAIT) == 1


@pytest.mark.parametrize("keeper", [Keeper, AsyncKeeper])
def test_an_owner_that_does_not_handle_loses_its_other_meshes_and_cleans_up_with_the_reason(
    procs, faults, keeper, tmp_path
):
    path = str(tmp_path / "notes")
    k = procs().spawn("k", keeper, False, path)
    child = k.grow.call_one().get(timeout=WAIT)

    def more(self):
        self.second_procs = this_host().spawn_procs()
        self.second = self.second_procs.spawn("second", Leaf, path, "second")
        return self.second

    second = k.do.call_one(more).get(timeout=WAIT)
    pids = [m.pid.call_one().get(timeout=WAIT) for m in (child, second)]
    child.ruin.broadcast()
    wait_until(lambda: len(notes(path)) == 2)
    assert notes(path) == ["second normal", "keeper failed"]
    wait_until(lambda: all(map(gone, pids)))
    with pytest.raises(SupervisionError):
        second.echo.call_one(1).get(timeout=WAIT)


def test_without_an_override_the_failure_climbs_until_somebody_handles_it(procs, faults):
    k = procs().spawn("k", Keeper)
    middle = k.grow.call_one(1, Heedless).get(timeout=WAIT)
    leaf = middle.grow.call_one().get(timeout=WAIT)
    leaf.fail.broadcast("the root cause")
    (told,) = heard(k)
    assert told.mesh == middle.name and told.ranks == [0]
    assert told.report.index("the root cause") < told.report.index("failed because it did not handle a supervision")
    assert "Frail child" in told.report.splitlines()[0]
    with pytest.raises(SupervisionError, match="the root cause"):
        middle.ping.call_one().get(timeout=WAIT)
    fence(procs, faults)
    assert not faults


# -- how often, and for what


@pytest.mark.parametrize(
    ("keeper", "how"),
    [(Keeper, "ruin"), (Keeper, "exit_process"), (AsyncKeeper, "ruin"), (AsyncKeeper, "exit_process")],
)
def test_failures_of_all_ranks_at_once_are_as_many_calls_with_different_ranks(procs, faults, keeper, how):
    k = procs().spawn("k", keeper)
    child = k.grow.call_one(4).get(timeout=WAIT)
    assert child.echo.call(1).get(timeout=WAIT)
    getattr(child, how).broadcast(3)
    heard(k, 4)
    fence(procs, faults)
    told = [t for t in heard(k) if t.mesh == child.name]
    assert sorted(t.ranks for t in told) == [[0], [1], [2], [3]] and not faults


@pytest.mark.parametrize("keeper", [Keeper, AsyncKeeper])
def test_a_rank_is_reported_once_even_if_its_process_dies_later(procs, faults, keeper):
    k = procs().spawn("k", keeper)
    child = k.grow.call_one(2).get(timeout=WAIT)
    pids = child.pid.call().get(timeout=WAIT).values()
    child.slice(gpus=1).ruin.broadcast()
    assert len(heard(k)) == 1
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: gone(pids[1]))
    child.slice(gpus=0).ruin.broadcast()
    wait_until(lambda: any(t.ranks == [0] for t in heard(k)))
    fence(procs, faults)
    assert [t.ranks for t in heard(k) if t.mesh == child.name] == [[1], [0]] and not faults


def test_the_death_of_a_process_is_told_once_for_each_mesh_of_the_user(procs, faults):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one(2).get(timeout=WAIT)

    def more(self):
        self.second = self.procs.spawn("second", Echo)
        self.second.echo.call(1).get(timeout=WAIT)
        return self.second.name, self.procs.name

    second, kept = k.do.call_one(more).get(timeout=WAIT)
    child.slice(gpus=1).exit_process.broadcast(2)
    told = heard(k)
    fence(procs, faults)
    told = heard(k)
    assert len({t.mesh for t in told}) == len(told) and {t.mesh for t in told} <= {child.name, second, kept}
    assert all(t.ranks == [1] and "non-zero code 2" in t.report for t in told)
    assert not any("logger" in t.mesh for t in told)


def test_a_failure_that_the_owner_caught_reaches_its_hook_all_the_same(procs, faults):
    k = procs().spawn("k", Keeper)
    k.grow.call_one().get(timeout=WAIT)

    def catch(self):
        try:
            self.child.ruin.call_one("seen").get(timeout=WAIT)
        except SupervisionError as e:
            return "seen" in str(e)

    assert k.do.call_one(catch).get(timeout=WAIT)
    assert [t.ranks for t in heard(k)] == [[0]]


def test_a_process_that_exits_with_code_0_on_its_own_is_a_failure(procs, faults):
    k = procs().spawn("k", Keeper)
    k.grow.call_one().get(timeout=WAIT).exit_process.broadcast(0)
    told = heard(k)
    assert told[0].ranks == [0] and "exited unexpectedly" in told[0].report


def test_neither_stops_nor_own_errors_nor_answered_errors_are_told(procs, faults):
    k = procs().spawn("k", Keeper)
    child = k.grow.call_one(2).get(timeout=WAIT)

    def err(self):
        raise ValueError("my own")

    def stop(self):
        self.child.stop().get(timeout=WAIT)
        self.procs.stop().get(timeout=WAIT)

    with pytest.raises(ActorError):
        k.do.call_one(err).get(timeout=WAIT)
    with pytest.raises(ActorError):
        child.fail.call().get(timeout=WAIT)
    k.do.call_one(stop).get(timeout=WAIT)
    fence(procs, faults)
    assert not heard(k, 0) and not faults


# -- who is asked


def test_who_breaks_a_mesh_it_was_given_is_not_asked(procs, faults):
    p = procs()
    owner, meddler = p.spawn("owner", Keeper), procs().spawn("meddler", Keeper)
    child = owner.grow.call_one().get(timeout=WAIT)

    def meddle(self, mesh):
        mesh.ruin.broadcast()
        try:
            mesh.echo.call_one(1).get(timeout=WAIT)
        except SupervisionError:
            return "seen"

    assert meddler.do.call_one(meddle, child).get(timeout=WAIT) == "seen"
    assert [t.mesh for t in heard(owner)] == [child.name]
    fence(procs, faults)
    assert not heard(meddler, 0) and not faults


def test_who_spawns_on_processes_it_was_given_owns_the_actors_alone(procs, faults):
    lender, borrower = procs().spawn("lender", Keeper), procs().spawn("borrower", Keeper)
    own = lender.grow.call_one(2).get(timeout=WAIT)
    lent = lender.do.call_one(lambda self: self.procs).get(timeout=WAIT)

    def borrow(self, lent):
        self.guest = lent.spawn("guest", Frail)
        self.guest.echo.call(1).get(timeout=WAIT)
        return self.guest

    guest = borrower.do.call_one(borrow, lent).get(timeout=WAIT)
    guest.slice(gpus=0).ruin.broadcast()
    assert [(t.mesh, t.ranks) for t in heard(borrower)] == [(guest.name, [0])]
    assert own.echo.call(2).get(timeout=WAIT).values() == [2, 2] and not heard(lender, 0)
    own.slice(gpus=1).exit_process.broadcast(1)  # a death concerns both
    assert [t.ranks for t in heard(lender)] == [[1]]
    assert [(t.mesh, t.ranks) for t in heard(borrower, 2)][1:] == [(guest.name, [1])]
    fence(procs, faults)
    assert not faults


def test_the_root_is_asked_about_its_own_meshes_only(procs, faults):
    k = procs().spawn("k", Keeper)
    k.grow.call_one().get(timeout=WAIT).ruin.broadcast()
    mine = procs().spawn("mine", Frail)
    mine.ruin.broadcast()
    heard(k)
    wait_until(lambda: faults)
    assert [f.mesh_name for f in faults] == [mine.name]


def test_a_child_in_the_owners_own_process_may_fail_alone(procs, faults):
    k = procs().spawn("k", Keeper)

    def near(self):
        self.child = this_proc().spawn("near", Frail)
        return self.child

    child = k.do.call_one(near).get(timeout=WAIT)
    child.ruin.broadcast()
    assert [t.mesh for t in heard(k)] == [child.name] and not faults


class GrowsInInit(Keeper):
    def __init__(self):
        super().__init__()
        self.child = this_proc().spawn("early", Frail)

    @endpoint
    def get_child(self):
        return self.child


def test_a_child_spawned_in_init_onto_the_own_process_is_supervised(procs, faults):
    for _ in range(3):
        k = procs().spawn("k", GrowsInInit)
        child = k.get_child.call_one().get(timeout=WAIT)
        assert child.echo.call_one(1).get(timeout=WAIT) == 1
        child.ruin.broadcast()
        assert [t.mesh for t in heard(k)] == [child.name]
    assert not faults


class GrowsABadChild(Keeper):
    """Its child fails while the constructor still runs."""

    def __init__(self):
        super().__init__()
        self.child = this_proc().spawn("early", Frail)
        try:
            self.child.ruin.call_one().get(timeout=WAIT)
        except SupervisionError:
            self.seen_in_init = True


def test_a_failure_during_the_owners_init_reaches_the_hook(procs, faults):
    k = procs().spawn("k", GrowsABadChild)
    assert len(heard(k)) == 1 and not faults


# -- where and when it runs


def where(self, failure):
    try:
        loop = id(asyncio.get_running_loop())
    except RuntimeError:
        loop = None
    me = str(context().actor_instance)
    self.seen = threading.get_ident(), loop, me
    return True


@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_hook_runs_on_the_actors_thread_and_an_async_one_on_its_loop(procs, faults, keeper):
    k = procs().spawn("k", keeper, where)
    k.grow.call_one().get(timeout=WAIT).ruin.broadcast()
    heard(k)

    def look(self):
        try:
            loop = id(asyncio.get_running_loop())
        except RuntimeError:
            loop = None
        return self.seen, (threading.get_ident(), loop, str(context().actor_instance))

    seen, endpoints = k.do.call_one(look).get(timeout=WAIT)
    assert seen[0] == endpoints[0] and seen[2] == endpoints[2]
    assert seen[1] == (None if keeper in (Keeper, MixedKeeper) else endpoints[1])


def ask_a_friend(self, failure):
    self.answers = [self.friend.echo.call_one(i).get(timeout=WAIT) for i in range(2)]
    return True


@pytest.mark.parametrize("keeper", [Keeper, MixedKeeper])
def test_a_plain_hook_may_wait_for_others(procs, faults, keeper):
    k = procs().spawn("k", keeper, ask_a_friend)
    k.grow.call_one().get(timeout=WAIT)
    friend = procs().spawn("friend", Echo)
    k.do.call_one(lambda self, mesh: setattr(self, "friend", mesh), friend).get(timeout=WAIT)
    k.do.call_one(lambda self: self.child.ruin.broadcast()).get(timeout=WAIT)
    heard(k)
    wait_until(lambda: k.do.call_one(lambda self: getattr(self, "answers", None)).get(timeout=WAIT) == [0, 1])


async def one_at_a_time(self, failure):
    self.inside = getattr(self, "inside", 0) + 1
    self.most = max(getattr(self, "most", 0), self.inside)
    await self.friend.nap.call_one(0.05)
    self.inside -= 1
    return True


def test_async_hooks_run_one_after_the_other_and_endpoints_go_on_meanwhile(procs, faults):
    k = procs().spawn("k", AsyncKeeper, one_at_a_time)
    friend = procs().spawn("friend", Echo)
    k.do.call_one(lambda self, mesh: setattr(self, "friend", mesh), friend).get(timeout=WAIT)
    k.grow.call_one(4).get(timeout=WAIT).ruin.broadcast()
    heard(k, 4)
    wait_until(lambda: k.do.call_one(lambda self: self.inside).get(timeout=WAIT) == 0)
    assert k.do.call_one(lambda self: self.most).get(timeout=WAIT) == 1


def send_rescue(self, failure):
    self.hook_thread = threading.get_ident()
    self.port.send("rescued")
    return True


def test_a_sync_endpoint_blocked_in_recv_lets_the_hook_run_on_its_thread(procs, faults):
    k = procs().spawn("k", Keeper, send_rescue)
    k.grow.call_one().get(timeout=WAIT)

    def body(self):
        """Waits for a message that its dead child will never send."""
        self.port, inbox = Channel.open()
        self.child.ruin.broadcast()
        return inbox.recv().get(timeout=WAIT), threading.get_ident() == self.hook_thread

    assert k.do.call_one(body).get(timeout=WAIT) == ("rescued", True)


def test_a_sync_endpoint_blocked_in_get_lets_the_hook_run_and_waits_on(procs, faults):
    k = procs().spawn("k", Keeper, True)
    k.grow.call_one().get(timeout=WAIT)
    friend = procs().spawn("friend", Echo)

    def body(self, friend):
        answer = friend.nap.call_one(0.5)
        self.child.ruin.broadcast()
        return answer.get(timeout=WAIT), len(self.heard)

    assert k.do.call_one(body, friend).get(timeout=WAIT) == ("rested", 1)


@pytest.mark.parametrize("how", ["get", "recv", "get with a timeout"])
@short_limits()
def test_an_unhandled_failure_leaves_a_blocked_sync_endpoint_at_once(procs, faults, how, tmp_path):
    path = str(tmp_path / "notes")
    k = procs().spawn("k", Keeper, False, path)
    k.grow.call_one().get(timeout=WAIT)
    friend = procs().spawn("friend", AsyncFrail)

    def body(self, friend, how):
        self.child.ruin.broadcast("the root cause")
        try:
            if how == "recv":
                Channel.open()[1].recv().get()
            friend.nap.call_one(60).get(**({"timeout": 60} if how == "get with a timeout" else {}))
        except Exception:
            pass  # must not be caught by accident
        finally:
            with open(self.path, "a") as f:
                f.write("finally\n")
        return "went on"

    with less_than(5), pytest.raises(SupervisionError, match="the root cause"):
        k.do.call_one(body, friend, how).get(timeout=WAIT)
    wait_until(lambda: notes(path) == ["finally", "keeper failed"])
    wait_until(lambda: [f.mesh_name for f in faults] == [k.name])


def test_a_sync_endpoint_that_waits_for_nothing_answers_and_the_next_call_fails(procs, faults):
    k = procs().spawn("k", Keeper, False)
    child = k.grow.call_one().get(timeout=WAIT)
    pid = child.pid.call_one().get(timeout=WAIT)

    def body(self, pid):
        self.child.exit_process.broadcast(1)
        while not gone(pid):
            pass
        return "done"

    assert k.do.call_one(body, pid).get(timeout=WAIT) == "done"
    wait_until(lambda: faults)
    with pytest.raises(SupervisionError, match="non-zero code 1"):
        k.told.call_one().get(timeout=WAIT)


@pytest.mark.parametrize("keeper", [AsyncKeeper, MixedKeeper])
def test_an_awaiting_endpoint_lets_the_hook_run_and_goes_on(procs, faults, keeper):
    k = procs().spawn("k", keeper, send_rescue)
    k.grow.call_one().get(timeout=WAIT)

    async def body(self):
        self.port, inbox = Channel.open()
        self.child.ruin.broadcast()
        return await inbox.recv(), self.hook_thread == threading.get_ident()

    assert k.do.call_one(body).get(timeout=WAIT) == ("rescued", True)


@pytest.mark.parametrize("keeper", [AsyncKeeper, MixedKeeper])
@pytest.mark.parametrize("answer", [False, LookupError("no spare left")], ids=["falsey", "raises"])
def test_an_unhandled_failure_cancels_an_awaiting_endpoint_at_once(procs, faults, keeper, answer, tmp_path):
    path = str(tmp_path / "notes")
    k = procs().spawn("k", keeper, answer, path)
    k.grow.call_one().get(timeout=WAIT)

    async def body(self):
        self.child.ruin.broadcast("the root cause")
        try:
            await asyncio.Event().wait()
        finally:
            with open(self.path, "a") as f:
                f.write("finally\n")

    with less_than(5), pytest.raises(SupervisionError, match="the root cause"):
        k.do.call_one(body).get(timeout=WAIT)
    wait_until(lambda: notes(path) == ["finally", "keeper failed"])


# -- what it may do


class Worker(Actor):
    @endpoint
    def ping(self):
        return os.getpid()

    @endpoint
    def die(self):
        os._exit(7)


class Pool(Actor):
    """The recovery pattern of the documentation, as it is written there."""

    def __init__(self):
        self._start()

    def _start(self):
        self.procs = this_host().spawn_procs(per_host={"gpus": 2})
        self.w = self.procs.spawn("w", Worker)

    @endpoint
    async def workers(self):
        return self.w

    async def __supervise__(self, failure):
        dead = self.procs
        self._start()
        await self.w.ping.call()
        await dead.stop()
        return True


class SyncPool(Actor):
    def __init__(self):
        self._start()

    _start = Pool._start

    @endpoint
    def workers(self):
        return self.w

    def __supervise__(self, failure):
        dead = self.procs
        self._start()
        self.w.ping.call().get(timeout=WAIT)
        dead.stop().get(timeout=WAIT)
        return True


@pytest.mark.parametrize("cls", [Pool, SyncPool])
def test_a_pool_replaces_its_processes_in_the_hook_again_and_again(procs, faults, cls):
    pool = procs().spawn("pool", cls)
    for _ in range(2):
        old = pool.workers.call_one().get(timeout=WAIT)
        pids = old.ping.call().get(timeout=WAIT).values()
        old.slice(gpus=1).die.broadcast()
        wait_until(lambda: pool.workers.call_one().get(timeout=WAIT).name != old.name)
        new = pool.workers.call_one().get(timeout=WAIT)
        assert not set(new.ping.call().get(timeout=WAIT).values()) & set(pids)
        wait_until(lambda: all(map(gone, pids)))
    fence(procs, faults)
    assert not faults


@pytest.mark.parametrize("keeper", [Keeper, AsyncKeeper])
def test_a_hook_may_respawn_on_the_same_processes(procs, faults, keeper):
    def again(self, failure):
        self.child = self.procs.spawn("child", Frail)
        return True

    k = procs().spawn("k", keeper, again)
    k.grow.call_one().get(timeout=WAIT)
    for n in range(1, 4):
        child = k.do.call_one(lambda self: self.child).get(timeout=WAIT)
        child.ruin.broadcast()
        told = heard(k, n)
        assert told[-1].mesh == child.name and len(told) == n
    child = k.do.call_one(lambda self: self.child).get(timeout=WAIT)
    assert child.echo.call_one(1).get(timeout=WAIT) == 1 and not faults


# -- what it is told


def test_a_failure_carries_everything_about_an_exit(procs, faults):
    e = procs(2).spawn("e", Frail)
    e.slice(gpus=0).exit_process.broadcast(9)
    wait_until(lambda: faults)
    f = faults[0]
    assert f.mesh_name == e.name and f.crashed_ranks == [0] and (f.exit_code, f.signal) == (9, None)
    assert "non-zero code 9" in f.cause and time.time() - f.occurred_at.timestamp() < 60
    assert f.mesh.slice(gpus=1).echo.call_one(1).get(timeout=WAIT) == 1
    text = str(f)
    assert text == repr(f) and text.startswith("MeshFailure(mesh_name=e-") and "crashed_ranks=[0]" in text
    assert "Supervision event: actor <root>.<owners.Frail e{'gpus': 0/2}> failed" in text
    assert "The actor <root>.<owners.Frail e{'gpus': 0/2}> and all its descendants have failed" in f.report()


def test_a_failure_by_a_signal_says_which(procs, faults):
    e = procs().spawn("e", Echo)
    os.kill(e.pid.call_one().get(timeout=WAIT), signal.SIGTERM)
    wait_until(lambda: faults)
    assert (faults[0].exit_code, faults[0].signal) == (None, signal.SIGTERM)
    assert "Killed(sig=15)" in faults[0].report()


def test_a_failure_travels(procs, faults):
    def remember(self, failure):
        self.failure = failure
        return True

    k = procs().spawn("k", Keeper, remember)
    child = k.grow.call_one(2).get(timeout=WAIT)
    child.slice(gpus=1).exit_process.broadcast(5)
    heard(k)
    got = k.do.call_one(lambda self: self.failure).get(timeout=WAIT)
    copy = pickle.loads(pickle.dumps(got))
    for f in (got, copy):
        assert isinstance(f, MeshFailure) and f.crashed_ranks == [1] and f.exit_code == 5
        assert "non-zero code 5" in f.report() and f.mesh.slice(gpus=0).echo.call_one(2).get(timeout=WAIT) == 2
    assert str(copy) == str(got) and copy.occurred_at == got.occurred_at


def test_the_names_of_dimensions_and_owners_are_in_the_display(procs, faults):
    k = procs(2).spawn("k", Heedless)
    k.slice(gpus=1).grow.call_one(3).get(timeout=WAIT).slice(gpus=2).ruin.broadcast()
    wait_until(lambda: faults)
    path = "<root>.<owners.Heedless k{'gpus': 1/2}>.<owners.Frail child{'gpus': 2/3}>"
    assert path in faults[0].report() and faults[0].crashed_ranks == [1]
    assert k.slice(gpus=0).ping.call_one().get(timeout=WAIT) == "pong"
