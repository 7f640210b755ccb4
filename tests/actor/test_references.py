"""Handles in messages: ready and still starting, whole and sliced, in every container; and who owns what."""

import dataclasses
import gc
import pickle
from typing import Any

import pytest

from actors_for_tests import Echo
from conftest import WAIT, wait_until
from monarch.actor import Actor, Channel, SupervisionError, endpoint, this_host, this_proc


class Slow(Actor):
    """Takes a moment to start, so that its handle is used before it is there."""

    def __init__(self, delay=0.2):
        import threading

        threading.Event().wait(delay)

    @endpoint
    def echo(self, x):
        return x


class SyncUser(Actor):
    @endpoint
    def use(self, mesh):
        return mesh.echo.call(7).get(timeout=WAIT).values()

    @endpoint
    def spawn_on(self, procs):
        return procs.spawn("there", Echo).echo.call(8).get(timeout=WAIT).values()

    @endpoint
    def make_actors(self):
        return this_proc().spawn("fresh", Slow)

    @endpoint
    def make_procs(self):
        return this_host().spawn_procs({"gpus": 1}, name="fresh")

    @endpoint
    def my_sum(self, others):
        return sum(others.echo.call(1).get(timeout=WAIT).values())


class AsyncUser(SyncUser):
    @endpoint
    async def use(self, mesh):
        return (await mesh.echo.call(7)).values()

    @endpoint
    async def spawn_on(self, procs):
        return (await procs.spawn("there", Echo).echo.call(8)).values()

    @endpoint
    async def make_actors(self):
        return this_proc().spawn("fresh", Slow)

    @endpoint
    async def make_procs(self):
        return this_host().spawn_procs({"gpus": 1}, name="fresh")

    @endpoint
    async def my_sum(self, others):
        return sum((await others.echo.call(1)).values())


users = pytest.mark.parametrize("user", [SyncUser, AsyncUser])


@users
def test_a_mesh_that_is_still_starting_is_an_argument(procs, user):
    u = procs().spawn("u", user)
    assert u.use.call_one(procs(2).spawn("s", Slow)).get(timeout=WAIT) == [7, 7]


@users
def test_processes_that_are_still_starting_are_an_argument(procs, user):
    u = procs().spawn("u", user)
    assert u.spawn_on.call_one(procs(2)).get(timeout=WAIT) == [8, 8]


@users
def test_a_mesh_that_is_still_starting_is_a_result(procs, user):
    u = procs(2).spawn("u", user)
    one = u.slice(gpus=0).make_actors.call_one().get(timeout=WAIT)
    assert one.echo.call_one(1).get(timeout=WAIT) == 1
    for mesh in u.make_actors.call().get(timeout=WAIT).values():
        assert mesh.echo.call_one(2).get(timeout=WAIT) == 2


@users
def test_processes_that_are_still_starting_are_a_result(procs, user):
    u = procs().spawn("u", user)
    one = u.make_procs.call_one().get(timeout=WAIT)
    assert one.spawn("e", Echo).echo.call(1).get(timeout=WAIT).values() == [1]
    (many,) = u.make_procs.call().get(timeout=WAIT).values()
    assert many.spawn("e", Echo).echo.call(1).get(timeout=WAIT).values() == [1]


@users
def test_actors_call_actors_of_other_processes(procs, user):
    u = procs(2).spawn("u", user)
    assert u.my_sum.call(procs(3).spawn("e", Echo)).get(timeout=WAIT).values() == [3, 3]


@pytest.mark.parametrize("ready", [True, False])
def test_the_standard_pickle_carries_meshes(procs, ready):
    mesh = procs(2).spawn("s", Slow)
    if ready:
        mesh.echo.call(0).get(timeout=WAIT)
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy.echo.call(1).get(timeout=WAIT).values() == [1, 1] and copy.extent == mesh.extent


@pytest.mark.parametrize("ready", [True, False])
def test_the_standard_pickle_carries_processes(procs, ready):
    p = procs(2)
    if ready:
        p.initialized.get(timeout=WAIT)
    copy = pickle.loads(pickle.dumps(p))
    assert copy == p and copy.spawn("e", Echo).echo.call(1).get(timeout=WAIT).values() == [1, 1]


@dataclasses.dataclass
class Ball:
    ttl: int
    mine: Any
    other: Any
    done: Any


class Player(Actor):
    def __init__(self):
        self.hits = 0

    @endpoint
    def hit(self, ball):
        self.hits += 1
        if ball.ttl:
            ball.other.hit.broadcast(Ball(ball.ttl - 1, ball.other, ball.mine, ball.done))
        else:
            ball.done.send(None)

    @endpoint
    def count(self):
        return self.hits


@pytest.mark.parametrize(("n", "ttl", "hits", "ends"), [(1, 10, ([6], [5]), 1), (2, 1, ([1, 1], [2, 2]), 4)])
def test_two_meshes_play_with_handles_in_dataclasses(procs, n, ttl, hits, ends):
    a, b = procs(n).spawn("a", Player), procs(n).spawn("b", Player)
    done, inbox = Channel.open()
    a.hit.broadcast(Ball(ttl, a, b, done))
    for _ in range(ends):
        inbox.recv().get(timeout=WAIT)
    assert (a.count.call().get(timeout=WAIT).values(), b.count.call().get(timeout=WAIT).values()) == hits


class Peer(Actor):
    @endpoint
    def introduce(self, mesh):
        self.mesh = mesh

    @endpoint
    def ask_rank_0(self):
        return self.mesh.slice(gpus=0).who.call_one().get(timeout=WAIT)

    @endpoint
    def who(self):
        from monarch.actor import context

        return context().actor_instance.rank.rank


def test_ranks_reach_their_own_mesh_through_a_handle_given_later(procs):
    m = procs(3).spawn("m", Peer)
    m.introduce.call(m).get(timeout=WAIT)
    assert m.slice(gpus=slice(1, 3)).ask_rank_0.call().get(timeout=WAIT).values() == [0, 0]


class NeverReady(Actor):
    def __init__(self, port):
        import threading

        port.send(this_proc().spawn("inner", Echo))
        threading.Event().wait()

    @endpoint
    def f(self): ...


def test_an_init_that_never_returns_has_its_effects_and_can_be_stopped(procs):
    port, inbox = Channel.open()
    p = procs()
    a = p.spawn("never", NeverReady, port)
    assert inbox.recv().get(timeout=WAIT).echo.call_one(1).get(timeout=WAIT) == 1
    assert a.extent == p.extent
    p.stop().get(timeout=WAIT)


def test_dropping_handles_stops_nothing(procs):
    part = this_host().spawn_procs({"gpus": 2}).spawn("e", Echo).slice(gpus=1)
    gc.collect()
    pid = part.pid.call_one().get(timeout=WAIT)
    from monarch.actor._procs import get_active_proc_meshes

    kept = [p for p in get_active_proc_meshes() if p.spawn("o", Echo).pid.call().get(timeout=WAIT).values()[-1] == pid]
    assert part.echo.call_one(5).get(timeout=WAIT) == 5 and len(kept) == 1
    kept[0].stop().get(timeout=WAIT)


def test_references_cannot_stop(procs):
    p = procs(2)
    m = p.spawn("e", Echo)
    for reference in (m.slice(gpus=0), pickle.loads(pickle.dumps(m))):
        with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
            reference.stop()
    for reference in (p.slice(gpus=0), pickle.loads(pickle.dumps(p))):
        with pytest.raises(ValueError):
            reference.stop()


def test_calls_after_stop_say_so_and_broadcasts_are_dropped(procs, faults):
    p = procs()
    a, b = p.spawn("a", Echo), p.spawn("b", Echo)
    a.stop("my reason").get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="stopped"):
        a.echo.call_one(1).get(timeout=WAIT)
    a.echo.broadcast(1)
    assert b.echo.call_one(2).get(timeout=WAIT) == 2 and not faults
    assert p.spawn("a", Echo).echo.call_one(3).get(timeout=WAIT) == 3


def test_a_stop_that_nobody_observes_happens(procs):
    p = procs()
    pid = p.spawn("e", Echo).pid.call_one().get(timeout=WAIT)
    p.stop()
    from conftest import gone

    wait_until(lambda: gone(pid))


def test_stops_compose_in_any_order(procs):
    p = procs()
    a = p.spawn("a", Echo)
    a.echo.call_one(1).get(timeout=WAIT)
    assert a.stop().get(timeout=WAIT) is None and a.stop().get(timeout=WAIT) is None
    p.stop().get(timeout=WAIT)
    a.stop().get(timeout=WAIT)
    with pytest.raises(RuntimeError):
        p.spawn("b", Echo)


def test_handles_compare_by_identity_and_show_their_class(procs):
    m = procs(2).spawn("e", Echo)
    assert m != pickle.loads(pickle.dumps(m)) and m in {m} and not isinstance(m, Echo)
    assert repr(m).startswith("ActorMesh(class=<class 'actors_for_tests.Echo'>, shape={gpus=2}")
    assert m.__name__ == "Echo" and len(m) == 2


def test_twelve_processes_make_a_mesh_of_twelve(procs):
    assert len(mesh := procs(12).spawn("e", Echo)) == 12
    assert mesh.split(gpus=("a", "b"), a=3).sizes == {"a": 3, "b": 4}


def test_endpoints_do_not_travel(procs):
    e = procs().spawn("e", Echo)
    with pytest.raises(TypeError, match="endpoint"):
        e.echo.call_one(e.echo)


def test_handles_and_ports_travel_together_in_closures_and_results(procs):
    e = procs().spawn("e", Echo)
    port, inbox = Channel.open()

    def both():
        port.send("from the closure")
        return {"mesh": e, "ports": [port]}

    back = e.apply.call_one(both).get(timeout=WAIT)
    back["ports"][0].send("from the result")
    assert [inbox.recv().get(timeout=WAIT) for _ in range(2)] == ["from the closure", "from the result"]
    assert back["mesh"].echo.call_one(1).get(timeout=WAIT) == 1


def test_messages_from_one_sender_keep_their_order_through_any_handle(procs):
    class Log(Actor):
        def __init__(self):
            self.log = []

        @endpoint
        def put(self, i):
            self.log.append(i)

        @endpoint
        def read(self):
            return self.log

    m = procs(2).spawn("log", Log)
    part, view = m.slice(gpus=1), m.flatten("all")
    for i in range(0, 300, 3):
        m.put.broadcast(i)
        part.put.call_one(i + 1)
        view.put.call(i + 2)
    assert part.read.call_one().get(timeout=WAIT) == list(range(300))
