import asyncio
import pickle
import threading
import time
import warnings

import numpy as np
import pytest

from actors_for_tests import AsyncEcho, Echo
from conftest import WAIT, run_script, wait_until
from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Future,
    as_endpoint,
    context,
    endpoint,
    send,
    this_proc,
)
from monarch.config import configured


def test_every_adverb_reaches_its_targets(procs):
    e = procs(3).spawn("e", Echo)
    assert e.echo.call(1).get(timeout=WAIT).values() == [1, 1, 1]
    assert e.slice(gpus=1).echo.call_one(2).get(timeout=WAIT) == 2
    assert e.echo.choose(3).get(timeout=WAIT) == 3
    assert sorted(f.get(timeout=WAIT)[1] for f in e.ranks.stream()) == [0, 1, 2]
    assert e.echo.broadcast(4) is None


def test_call_one_on_many_is_refused_at_the_call(procs):
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 2"):
        procs(2).spawn("e", Echo).echo.call_one(1)


def test_ranks_are_relative_to_the_handle(procs):
    e = procs(4).spawn("e", Echo)
    assert e.slice(gpus=slice(1, 3)).ranks.call().get(timeout=WAIT).values() == [(0, 1), (1, 2)]


@pytest.mark.parametrize("bad", [(), (1, 2)])
def test_wrong_arity_is_reported_at_the_call(procs, bad):
    e = procs().spawn("e", Echo)
    for adverb in ("call", "call_one", "choose", "stream", "broadcast"):
        with pytest.raises(TypeError, match="echo"):
            getattr(e.echo, adverb)(*bad)


def test_unknown_names_and_plain_methods_say_what_to_do(procs):
    e = procs().spawn("e", Echo)
    with pytest.raises(AttributeError, match="ecoh"):
        e.ecoh  # noqa: B018
    with pytest.raises(RuntimeError, match="as_endpoint"):
        e.helper(1)
    with pytest.raises(TypeError, match="adverb"):
        e.echo(1)
    assert as_endpoint(e.helper).call_one(1).get(timeout=WAIT) == 2


def test_an_unpicklable_argument_is_named(procs):
    e = procs().spawn("e", Echo)
    with pytest.raises(TypeError) as info:
        e.echo.call_one({"a": [threading.Lock()]})
    if hasattr(info.value, "__notes__"):
        assert "argument 0['a'][0]" in info.value.__notes__[0]
    assert e.echo.call_one(1).get(timeout=WAIT) == 1


class Grenade:
    def __reduce__(self):
        return eval, ("1/0",)


def test_an_argument_that_fails_to_unpickle_fails_only_the_call(procs, faults):
    e = procs().spawn("e", Echo)
    with pytest.raises(ActorError, match="division"):
        e.echo.call_one(Grenade()).get(timeout=WAIT)
    assert e.echo.call_one(1).get(timeout=WAIT) == 1 and not faults


class Picky(Exception):
    def __init__(self, a, b):
        super().__init__("only one argument kept")


def raise_picky():
    raise Picky(1, 2)


def test_an_exception_that_cannot_travel_keeps_its_text(procs):
    e = procs().spawn("e", Echo)
    with pytest.raises(ActorError) as info:
        e.apply.call_one(raise_picky).get(timeout=WAIT)
    assert "Picky" in str(info.value) and "only one argument kept" in str(info.value)
    assert e.echo.call_one(1).get(timeout=WAIT) == 1


def test_errors_of_all_ranks_are_kept(procs):
    with pytest.raises(ActorError) as info:
        procs(2).spawn("e", Echo).fail.call("x").get(timeout=WAIT)
    assert set(info.value.errors_by_rank) == {0, 1}
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@pytest.mark.parametrize("size", [1000, 1 << 20, 1 << 24])
def test_payloads_of_any_size_are_snapshots(procs, size):
    e = procs(2).spawn("e", Echo)
    data = np.arange(size // 8)
    future = e.echo.call(data)
    data[:] = 0
    for back in future.get(timeout=WAIT).values():
        assert (back == np.arange(size // 8)).all()
        back[0] = 5  # arrives writable


class Keeper(Actor):
    @endpoint
    def keep(self, x):
        self.x = x

    @endpoint
    def add(self):
        self.x += 1

    @endpoint
    def first(self):
        return float(self.x[0])


@pytest.mark.parametrize("size", [100, 65_536, 1 << 20])
def test_ranks_of_a_mesh_call_do_not_share_their_arguments(procs, size):
    m = procs(3).spawn("keeper", Keeper)
    for round in range(3):  # later rounds reuse segments
        m.keep.call(np.full(size, float(round))).get(timeout=WAIT)
        m.slice(gpus=0).add.call_one().get(timeout=WAIT)
        assert m.first.call().get(timeout=WAIT).values() == [round + 1, round, round]


def test_segments_return_when_a_receiver_is_killed(procs):
    from monarch.runtime.client import current_node

    mesh = procs()
    e = mesh.spawn("e", Echo)
    e.nap.broadcast(30)
    for _ in range(5):
        e.echo.broadcast(np.zeros(1 << 18))
    assert current_node().pool.in_use() >= 5
    mesh.stop().get(timeout=WAIT)
    assert current_node().pool.in_use() == 0


class Counted:
    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return str, ("x",)


def test_a_payload_is_serialised_once(procs):
    procs(4).spawn("e", Echo).echo.call(Counted()).get(timeout=WAIT)
    assert Counted.pickled == 1


def test_a_flood_of_calls_grows_nothing(procs):
    import os

    e = procs().spawn("e", Echo)
    for i in range(200):
        e.echo.call_one(i).get(timeout=WAIT)
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    from monarch.runtime.client import current_node

    for i in range(3000):
        e.echo.call_one(i).get(timeout=WAIT)
    assert threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= fds
    assert len(current_node().ports) < 10


# -- futures


def test_a_future_gives_the_same_result_to_everyone(procs):
    e = procs().spawn("e", AsyncEcho)
    f = e.echo.call_one([1])

    async def ask():
        return await f, await f.as_asyncio()

    a, b = asyncio.run(ask())
    assert a is b is f.get(timeout=WAIT) is f.result()
    g = e.fail.call_one()
    assert g.exception(timeout=WAIT) is g.exception(timeout=WAIT)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_invalid_timeouts_are_refused_even_when_settled(procs, timeout):
    f = procs().spawn("e", Echo).echo.call_one(1)
    f.get(timeout=WAIT)
    with pytest.raises(ValueError, match="invalid timeout"):
        f.get(timeout=timeout)


def test_waiting_too_briefly_cancels_nothing(procs):
    e = procs().spawn("e", AsyncEcho)
    f = e.hold.call_one()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            f.get(timeout=0.05)
    e.release.call_one().get(timeout=WAIT)
    assert f.get(timeout=WAIT) == "released"


def test_many_threads_and_loops_share_one_client(procs):
    e = procs().spawn("e", Echo)
    out = []

    async def ask(i):
        return await e.echo.call_one(i)

    threads = [
        threading.Thread(target=lambda i=i: out.append(asyncio.run(ask(i)) if i % 2 else e.echo.call_one(i).get(WAIT)))
        for i in range(12)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
    assert sorted(out) == list(range(12))


def test_get_on_a_running_loop_warns_and_works(procs):
    e = procs().spawn("e", Echo)

    async def block():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            value = e.echo.call_one(1).get(timeout=WAIT)
        return value, [str(w.message) for w in seen]

    value, seen = asyncio.run(block())
    assert value == 1 and len(seen) == 1 and "active event loop" in seen[0] and "as_asyncio" in seen[0]


def test_futures_cannot_be_made_or_pickled(procs):
    with pytest.raises(TypeError, match="^Future objects are returned by Monarch operations"):
        Future()
    with pytest.raises(TypeError, match="unexpected keyword argument 'coro'"):
        Future(coro=1)
    with pytest.raises(TypeError, match="Future"):
        pickle.dumps(procs().spawn("e", Echo).echo.call_one(1))


# -- ports


def test_values_through_a_port_keep_their_order(procs):
    port, inbox = Channel[int].open()

    def feed(p):
        for i in range(200):
            p.send(i)

    procs().spawn("e", Echo).apply.call_one(feed, port).get(timeout=WAIT)
    assert [inbox.recv().get(timeout=WAIT) for _ in range(200)] == list(range(200))


def test_a_receive_claims_when_it_is_observed():
    port, inbox = Channel.open()
    first, second = inbox.recv(), inbox.recv()
    port.send("a")
    port.send("b")
    assert second.get(timeout=WAIT) == "a" and first.get(timeout=WAIT) == "b"


def test_a_claim_that_timed_out_and_was_dropped_loses_nothing():
    port, inbox = Channel.open()
    try:
        inbox.recv().get(timeout=0.01)
    except TimeoutError:
        pass
    port.send("kept")
    assert inbox.recv().get(timeout=WAIT) == "kept"


def test_once_means_once():
    port, inbox = Channel.open(once=True)
    port.send(1)
    with pytest.raises(RuntimeError, match="already used"):
        port.send(2)
    assert inbox.recv().get(timeout=WAIT) == 1
    with pytest.raises(ValueError, match="already used"):
        inbox.recv()


def test_send_tags_replies_with_their_rank(procs):
    port, inbox = Channel.open_ranked()
    send(procs(3).spawn("e", Echo).ranks, (), {}, port)
    assert sorted(inbox.recv().get(timeout=WAIT) for _ in range(3)) == [(r, (r, r)) for r in range(3)]


def test_an_accumulator_folds_answers(procs):
    add = Accumulator(procs(3).spawn("e", Echo).echo, 10, lambda a, b: a + b)
    f = add.accumulate(2)
    assert f.get(timeout=WAIT) == 16 and f.get() == 16


# -- actors


def test_a_sync_actor_keeps_one_thread(procs):
    e = procs().spawn("e", Echo)
    names = {e.thread.call_one().get(timeout=WAIT) for _ in range(4)}
    assert len(names) == 1 and names.pop()[0] == "monarch-actor-driver"


def test_a_concurrent_endpoint_lets_others_through(procs):
    e = procs().spawn("e", AsyncEcho)
    held = [e.hold.call_one() for _ in range(10)]
    assert e.echo.call_one(1).get(timeout=WAIT) == 1
    e.release.call_one().get(timeout=WAIT)
    assert [f.get(timeout=WAIT) for f in held] == ["released"] * 10


class Selfish(Actor):
    def __init__(self):
        self.sizes = self.extent = self.initialized = self.stop = "mine"  # all free for the user

    @endpoint
    def ask(self, me):
        try:
            me.other.call_one().get()
        except RuntimeError as e:
            return str(e)

    @endpoint
    def ask_briefly(self, me):
        try:
            me.other.call_one().get(timeout=0.05)
        except TimeoutError:
            return "timed out"

    @endpoint
    def other(self):
        return self.sizes


class SelfishAsync(Actor):
    @endpoint
    async def ask(self, me):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                me.other.call_one().get()
        except RuntimeError as e:
            return str(e)

    @endpoint
    async def other(self):
        return "other"


@pytest.mark.parametrize("cls", [Selfish, SelfishAsync])
def test_an_actor_that_would_wait_for_itself_is_told(procs, cls):
    s = procs().spawn("s", cls)
    assert "would wait for ever" in s.ask.call_one(s).get(timeout=WAIT)
    assert s.other.call_one().get(timeout=WAIT)
    if cls is Selfish:
        assert s.ask_briefly.call_one(s).get(timeout=WAIT) == "timed out"


class SlowStart(Actor):
    def __init__(self):
        time.sleep(0.3)
        self.ready = True

    @endpoint
    def is_ready(self):
        return self.ready


class Courier(Actor):
    @endpoint
    def use(self, ref):
        return ref.is_ready.call_one().get(timeout=WAIT)


def test_construction_comes_before_messages_of_third_parties(procs):
    courier = procs().spawn("courier", Courier)
    for _ in range(3):
        assert courier.use.call_one(procs().spawn("slow", SlowStart)).get(timeout=WAIT) is True


def test_the_same_name_gives_different_actors(procs):
    p = procs()
    a, b = p.spawn("x", Echo, "a"), p.spawn("x", Echo, "b")
    assert a.name != b.name and a.name.startswith("x-")


def test_references_in_the_same_breath(procs):
    a, b = procs(2).spawn("a", Echo), procs(2).spawn("b", Echo)
    back = a.slice(gpus=0).echo.call_one({"mesh": b, "port": Channel.open()[0]}).get(timeout=WAIT)
    assert back["mesh"].echo.call(3).get(timeout=WAIT).values() == [3, 3]
    copy = pickle.loads(pickle.dumps(b.slice(gpus=1)))
    assert copy.ranks.call_one().get(timeout=WAIT) == (0, 1)


def test_stop_carries_out_what_is_queued(procs):
    e = procs().spawn("e", Echo)
    pending = [e.echo.call_one(i) for i in range(50)]
    e.stop().get(timeout=WAIT)
    assert [f.get(timeout=WAIT) for f in pending] == list(range(50))


def test_a_controller_is_one_actor_however_many_ask():
    r = run_script(  # a controller lives as long as its client, so the client is a program of its own
        """
        import threading
        from monarch.actor import Actor, endpoint, get_or_spawn_controller
        class Tally(Actor):
            def __init__(self): self.n = 0
            @endpoint
            def next(self): self.n += 1; return self.n
        out = []
        def ask(): out.append(get_or_spawn_controller("tally", Tally).get(30).next.call_one().get(30))
        threads = [threading.Thread(target=ask) for _ in range(8)]
        [t.start() for t in threads]; [t.join(30) for t in threads]
        print(sorted(out))
        """
    )
    assert r.stdout.strip() == "[1, 2, 3, 4, 5, 6, 7, 8]", r.stderr


def test_actors_in_the_clients_process_see_its_pid():
    import os

    local = this_proc().spawn("local", Echo)
    assert local.pid.call_one().get(timeout=WAIT) == os.getpid()
    local.stop().get(timeout=WAIT)


def test_a_patched_actor_replaces_the_original_in_new_processes(procs):
    from monarch._src.actor.mock import patch_actor

    class Mock(Echo):
        @endpoint
        def echo(self, x):
            return "mock"

    with patch_actor(Echo, Mock):
        p = procs()
        assert p.spawn("e", Echo).echo.call_one(1).get(timeout=WAIT) == "mock"
    assert procs().spawn("e", Echo).echo.call_one(1).get(timeout=WAIT) == 1


def test_backpressure_bounds_a_flood(procs):
    with configured(send_queue_limit=1 << 20):
        p = procs()
    e = p.spawn("e", Echo)
    for _ in range(200):
        e.echo.broadcast(b"x" * 30_000)
    assert e.echo.call_one(1).get(timeout=WAIT) == 1


def test_hello_world_is_quiet_and_quick():
    r = run_script(
        """
        import time; t = time.monotonic()
        from monarch.actor import Actor, endpoint, this_host
        class A(Actor):
            @endpoint
            def f(self): return 1
        print(this_host().spawn_procs({"procs": 2}).spawn("a", A).f.call().get().item(procs=1))
        assert time.monotonic() - t < 5
        """
    )
    assert (r.stdout, r.stderr, r.returncode) == ("1\n", "", 0)


def test_import_is_light():
    r = run_script(
        "import sys, monarch.actor; print('torch' in sys.modules, 'numpy' in sys.modules, "
        "[n for n, m in sys.modules.items() if n.startswith('monarch') and str(m.__file__).endswith('.so')])"
    )
    assert r.stdout.split() == ["False", "False", "[]"]


def test_context_on_the_client_is_the_root():
    assert str(context().actor_instance) == "<root>" and dict(context().message_rank) == {}
    wait_until(lambda: True)
