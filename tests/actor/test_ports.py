"""Channels, ports that travel, and response ports."""

import asyncio
import os
import pickle
import threading

import pytest

from actors_for_tests import Echo
from conftest import WAIT, wait_until
from monarch.actor import Actor, ActorError, Channel, SupervisionError, context, endpoint, send


class Maker(Actor):
    """Gives out ports of its own, and reads what came."""

    def __init__(self):
        self.port, self.inbox = Channel.open()

    @endpoint
    def give(self):
        return self.port

    @endpoint
    def read(self):
        return self.inbox.recv().get(timeout=WAIT)


class AsyncMaker(Maker):
    @endpoint
    async def give(self):
        return self.port

    @endpoint
    async def read(self):
        return await self.inbox.recv()


class Giver(Actor):
    """Asks another actor for a port, in each way, and sends through it."""

    @endpoint
    def by_call_one(self, maker, value):
        maker.give.call_one().get(timeout=WAIT).send(value)
        return str(context().actor_instance)

    @endpoint
    def by_call(self, maker, value):
        maker.give.call().get(timeout=WAIT).values()[0].send(value)
        return str(context().actor_instance)

    @endpoint
    def by_stream(self, maker, value):
        next(maker.give.stream()).get(timeout=WAIT).send(value)
        return str(context().actor_instance)

    @endpoint
    def by_argument(self, port, value):
        port.send(value)

    @endpoint
    def clients_here(self):
        from monarch.runtime import client

        return client.is_worker(), [t.name for t in threading.enumerate() if t.name == "monarch-root"]


class AsyncGiver(Giver):
    @endpoint
    async def by_call_one(self, maker, value):
        (await maker.give.call_one()).send(value)
        return str(context().actor_instance)

    @endpoint
    async def by_call(self, maker, value):
        (await maker.give.call()).values()[0].send(value)
        return str(context().actor_instance)

    @endpoint
    async def by_stream(self, maker, value):
        (await next(maker.give.stream())).send(value)
        return str(context().actor_instance)

    @endpoint
    async def by_argument(self, port, value):
        port.send(value)

    @endpoint
    async def clients_here(self):
        from monarch.runtime import client

        return client.is_worker(), [t.name for t in threading.enumerate() if t.name == "monarch-root"]


@pytest.mark.parametrize(("make", "give"), [(Maker, Giver), (AsyncMaker, AsyncGiver)], ids=["sync", "async"])
def test_a_port_of_one_actor_sends_from_another_however_it_came(procs, make, give):
    maker, giver = procs().spawn("m", make), procs().spawn("g", give)
    for way in ("by_call_one", "by_call", "by_stream"):
        getattr(giver, way).call_one(maker, way).get(timeout=WAIT)
        assert maker.read.call_one().get(timeout=WAIT) == way
    port = maker.give.call_one().get(timeout=WAIT)
    giver.by_argument.call_one(port, "argument").get(timeout=WAIT)
    assert maker.read.call_one().get(timeout=WAIT) == "argument"
    assert giver.clients_here.call_one().get(timeout=WAIT) == (True, [])


def test_ports_are_used_from_any_thread():
    port, inbox = Channel[int].open()
    threads = [threading.Thread(target=lambda: [port.send(i) for i in range(50)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
    assert sorted(inbox.recv().get(timeout=WAIT) for _ in range(200)) == sorted(list(range(50)) * 4)


def test_what_cannot_be_pickled_is_refused_at_the_sender():
    port, inbox = Channel.open()
    with pytest.raises(TypeError):
        port.send(threading.Lock())
    port.send("next")
    assert inbox.recv().get(timeout=WAIT) == "next"


def test_an_exception_through_a_port_is_raised_as_itself():
    port, inbox = Channel.open()
    port.exception(KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        inbox.recv().get(timeout=WAIT)


def test_a_thing_that_is_no_exception_is_refused_at_the_sender():
    port, _inbox = Channel.open()
    with pytest.raises(TypeError):
        port.exception("not an exception")


def test_receivers_stay_where_they_were_made():
    _port, inbox = Channel.open()
    with pytest.raises(TypeError, match="Port"):
        pickle.dumps(inbox)


def test_values_are_awaited_in_order():
    async def main():
        port, inbox = Channel[int].open()
        for i in range(100):
            port.send(i)
        return [await inbox.recv() for _ in range(100)]

    assert asyncio.run(main()) == list(range(100))


def test_a_discarded_receive_claims_nothing():
    port, inbox = Channel.open()
    inbox.recv()
    port.send("kept")
    assert inbox.recv().get(timeout=WAIT) == "kept"


def test_a_receive_that_timed_out_takes_the_next_message():
    port, inbox = Channel.open()
    f = inbox.recv()
    with pytest.raises(TimeoutError):
        f.get(timeout=0.01)
    port.send(1)
    port.send(2)
    assert (f.get(timeout=WAIT), inbox.recv().get(timeout=WAIT)) == (1, 2)


def test_a_message_without_a_rank_is_an_error_of_a_ranked_receiver():
    port, inbox = Channel.open()
    ranked = inbox.ranked()
    port.send(1)
    with pytest.raises(ValueError, match="without a rank"):
        ranked.recv().get(timeout=WAIT)


def test_sending_to_a_receiver_that_is_gone_is_silent(faults):
    port, inbox = Channel.open()
    del inbox
    port.send(1)
    assert not faults


def test_the_standard_pickle_carries_ports():
    port, inbox = Channel.open()
    pickle.loads(pickle.dumps(port)).send("via pickle")
    assert inbox.recv().get(timeout=WAIT) == "via pickle"


class Rank0(Actor):
    def __init__(self):
        self.port, self.inbox = Channel.open()

    @endpoint
    def gather(self, mesh, each):
        mesh.contribute.broadcast(self.port, each)
        return sorted(self.inbox.recv().get(timeout=WAIT) for _ in range(each * mesh.size()))

    @endpoint
    def contribute(self, port, each):
        for i in range(each):
            port.send((context().message_rank.rank, i))


def test_many_ranks_send_to_one_through_one_port(procs):
    p = procs(3)
    workers, sink = p.spawn("w", Rank0), p.spawn("s", Rank0).slice(gpus=0)
    got = sink.gather.call_one(workers, 3).get(timeout=WAIT)
    assert got == [(r, i) for r in range(3) for i in range(3)]


# -- response ports


class Explicit(Actor):
    def __init__(self):
        self.kept = []

    @endpoint(explicit_response_port=True)
    def add_three(self, port, b):
        port.send(3 + b)
        return "ignored"

    @endpoint(explicit_response_port=True)
    def refuse(self, port):
        port.exception(KeyError("refused"))

    @endpoint(explicit_response_port=True)
    def keep(self, port):
        self.kept.append(port)

    @endpoint
    def answer_all(self):
        for i, port in enumerate(reversed(self.kept)):
            port.send(i)

    @endpoint(explicit_response_port=True)
    def twice(self, port):
        port.send(1)
        port.send(2)

    @endpoint(explicit_response_port=True)
    def explode(self, port):
        raise ValueError("explode")

    @endpoint(explicit_response_port=True)
    def from_a_thread(self, port):
        threading.Thread(target=port.send, args=("threaded",)).start()

    @endpoint
    def pid(self):
        return os.getpid()


@pytest.fixture
def explicit(procs):
    return procs().spawn("x", Explicit)


def test_the_answer_is_what_is_sent_on_the_port(explicit):
    assert explicit.add_three.call_one(4).get(timeout=WAIT) == 7
    assert explicit.add_three.call(4).get(timeout=WAIT).values() == [7]
    assert [f.get(timeout=WAIT) for f in explicit.add_three.stream(4)] == [7]


def test_an_exception_on_the_port_is_raised_as_itself(explicit, faults):
    with pytest.raises(KeyError, match="refused"):
        explicit.refuse.call_one().get(timeout=WAIT)
    assert explicit.add_three.call_one(1).get(timeout=WAIT) == 4 and not faults


def test_answers_may_come_later_and_out_of_order(explicit):
    calls = [explicit.keep.call_one() for _ in range(3)]
    explicit.answer_all.call_one().get(timeout=WAIT)
    assert [f.get(timeout=WAIT) for f in calls] == [2, 1, 0]


def test_answers_may_come_from_a_thread(explicit):
    assert explicit.from_a_thread.call_one().get(timeout=WAIT) == "threaded"


@pytest.mark.parametrize("adverb", ["call_one", "call", "choose"])
def test_an_extra_answer_is_dropped(explicit, faults, adverb):
    got = getattr(explicit.twice, adverb)().get(timeout=WAIT)
    assert (got.values() if adverb == "call" else [got]) == [1]
    assert explicit.add_three.call_one(1).get(timeout=WAIT) == 4 and not faults


def test_a_stream_counts_answers_by_rank(procs):
    assert [f.get(timeout=WAIT) for f in procs(2).spawn("x", Explicit).twice.stream()] == [1, 1]


def test_without_an_answer_the_caller_waits_until_the_actor_is_gone(explicit):
    f = explicit.keep.call_one()
    with pytest.raises(TimeoutError):
        f.get(timeout=0.05)
    explicit.stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="stopped"):
        f.get(timeout=5)


def test_a_kept_call_fails_when_the_actor_fails(explicit, faults):
    f = explicit.keep.call_one()
    explicit.explode.broadcast()
    with pytest.raises(SupervisionError, match="explode"):
        f.get(timeout=5)
    wait_until(lambda: faults)


def test_raising_with_an_explicit_port_fails_the_actor(explicit, faults):
    with pytest.raises(SupervisionError, match="explode"):
        explicit.explode.call_one().get(timeout=WAIT)
    wait_until(lambda: len(faults) == 1)


def test_the_port_of_a_broadcast_swallows_values(explicit, faults):
    explicit.add_three.broadcast(1)
    assert explicit.add_three.call_one(1).get(timeout=WAIT) == 4 and not faults


def test_an_exception_on_the_port_of_a_broadcast_fails_the_actor(explicit, faults):
    explicit.refuse.broadcast()
    with pytest.raises(SupervisionError, match="refused"):
        explicit.add_three.call_one(1).get(timeout=WAIT)
    wait_until(lambda: len(faults) == 1)


# -- send


def test_send_chooses_one_or_takes_all(procs):
    e, (port, inbox) = procs(3).spawn("e", Echo), Channel.open()
    send(e.echo, (1,), {}, port, "choose")
    assert inbox.recv().get(timeout=WAIT) == 1
    send(e.echo, (2,), {}, port, "all")
    assert [inbox.recv().get(timeout=WAIT) for _ in range(3)] == [2, 2, 2]


def test_send_refuses_another_selection(procs):
    with pytest.raises(ValueError, match="Invalid selection: .*some"):
        send(procs().spawn("e", Echo).echo, (1,), {}, None, "some")


def test_an_endpoints_error_is_raised_by_the_receive(procs, faults):
    e, (port, inbox) = procs().spawn("e", Echo), Channel.open()
    send(e.fail, ("x",), {}, port)
    with pytest.raises(ActorError, match="x"):
        inbox.recv().get(timeout=WAIT)
    assert e.echo.call_one(1).get(timeout=WAIT) == 1 and not faults


def test_send_without_a_port_is_a_broadcast(procs, faults):
    e = procs().spawn("e", Echo)
    assert send(e.fail, ("x",), {}) is None
    wait_until(lambda: len(faults) == 1)
