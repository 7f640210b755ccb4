"""A receive fails when everybody who could have sent is gone, and never before."""

from __future__ import annotations

import os

import pytest

from conftest import WAIT, run_script
from monarch.actor import Actor, Channel, SupervisionError, endpoint
from monarch.testing import kill, local_hosts


class Sender(Actor):
    def __init__(self, port=None):
        self.port = port

    @endpoint
    def keep(self, port):
        self.port = port

    @endpoint
    def send(self, value):
        self.port.send(value)

    @endpoint
    def pass_on(self, other):
        other.keep.call_one(self.port).get(timeout=WAIT)

    @endpoint
    def pass_on_and_die(self, other):
        other.open.call_one().get(timeout=WAIT)  # now there is a connection
        other.keep.broadcast(self.port)
        os._exit(1)

    @endpoint
    def open(self):
        port, self.receiver = Channel[int].open()
        return port

    @endpoint
    def received(self):
        return self.receiver.recv().get(timeout=WAIT)

    @endpoint
    def send_and_die(self, n):
        for i in range(n):
            self.port.send(i)
        os._exit(1)


def test_a_receive_fails_when_the_only_sender_is_killed(procs, faults):
    sender = procs().spawn("s", Sender)
    port, receiver = Channel[int].open()
    sender.keep.call_one(port).get(timeout=WAIT)
    pending = receiver.recv()
    with pytest.raises(TimeoutError):
        pending.get(timeout=0.05)
    kill(sender)
    with pytest.raises(SupervisionError, match=r"(?s)all 1 actors that its port was sent to are gone.*Killed\(sig=9\)"):
        pending.get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="are gone"):
        receiver.recv().get(timeout=WAIT)


def test_a_receive_that_nobody_observed_yet_fails_too(procs, faults):
    sender = procs().spawn("s", Sender)
    port, receiver = Channel[int].open()
    sender.keep.broadcast(port)
    kill(sender)
    with pytest.raises(SupervisionError, match="are gone"):
        receiver.recv().get(timeout=WAIT)


def test_a_stopped_sender_is_gone_too(procs):
    sender = procs().spawn("s", Sender)
    port, receiver = Channel[int].open()
    sender.keep.call_one(port).get(timeout=WAIT)
    sender.stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError, match=r"(?s)are gone.*stopped"):
        receiver.recv().get(timeout=WAIT)


def test_a_failed_sender_is_gone_though_its_process_lives(procs, faults):
    sender = procs().spawn("s", Sender)
    port, receiver = Channel[int].open()
    sender.keep.call_one(port).get(timeout=WAIT)
    sender.send.broadcast(object)  # a class of builtins: travels
    assert receiver.recv().get(timeout=WAIT) is object
    sender.received.broadcast()  # it has no receiver: AttributeError ends it
    with pytest.raises(SupervisionError, match=r"(?s)are gone.*AttributeError"):
        receiver.recv().get(timeout=WAIT)


def test_what_was_sent_before_the_end_is_received(procs, faults):
    sender = procs().spawn("s", Sender)
    port, receiver = Channel[int].open()
    sender.keep.call_one(port).get(timeout=WAIT)
    sender.send_and_die.broadcast(100)
    assert [receiver.recv().get(timeout=WAIT) for _ in range(100)] == list(range(100))
    with pytest.raises(SupervisionError, match="non-zero code 1"):
        receiver.recv().get(timeout=WAIT)


def test_one_living_sender_is_enough(procs, faults):
    senders = procs(3).spawn("s", Sender)
    port, receiver = Channel[int].open()
    senders.keep.call(port).get(timeout=WAIT)
    kill(senders.slice(gpus=slice(0, 2)))
    pending = receiver.recv()
    with pytest.raises(TimeoutError):
        pending.get(timeout=0.2)
    senders.slice(gpus=2).send.call_one(5).get(timeout=WAIT)
    assert pending.get(timeout=WAIT) == 5
    kill(senders.slice(gpus=2))
    with pytest.raises(SupervisionError, match="all 3 actors"):
        receiver.recv().get(timeout=WAIT)


def test_a_port_that_was_passed_on_has_its_new_holder(procs, faults):
    first, second = procs().spawn("first", Sender), procs().spawn("second", Sender)
    port, receiver = Channel[int].open()
    first.keep.call_one(port).get(timeout=WAIT)
    first.pass_on.call_one(second).get(timeout=WAIT)
    kill(first)
    pending = receiver.recv()
    with pytest.raises(TimeoutError):
        pending.get(timeout=0.2)
    second.send.call_one(7).get(timeout=WAIT)
    assert pending.get(timeout=WAIT) == 7
    kill(second)
    with pytest.raises(SupervisionError, match="all 2 actors"):
        receiver.recv().get(timeout=WAIT)


def test_a_holder_that_passes_a_port_on_and_dies_in_the_same_breath(procs, faults):
    for _ in range(5):
        first, second = procs().spawn("first", Sender), procs().spawn("second", Sender)
        second.open.call_one().get(timeout=WAIT)
        port, receiver = Channel[int].open()
        first.keep.call_one(port).get(timeout=WAIT)
        first.pass_on_and_die.broadcast(second)
        with pytest.raises(SupervisionError):
            first.open.call_one().get(timeout=WAIT)
        pending = receiver.recv()
        second.send.call_one(9).get(timeout=WAIT)
        assert pending.get(timeout=WAIT) == 9


def test_a_new_sender_revives_a_receiver(procs, faults):
    port, receiver = Channel[int].open()
    old = procs().spawn("old", Sender, port)
    kill(old)
    with pytest.raises(SupervisionError):
        receiver.recv().get(timeout=WAIT)
    new = procs().spawn("new", Sender, port)
    pending = receiver.recv()
    new.send.call_one(3).get(timeout=WAIT)
    assert pending.get(timeout=WAIT) == 3


def test_receivers_in_actors_hear_of_their_senders(procs, faults):
    opener = procs().spawn("opener", Sender)
    sender = procs().spawn("sender", Sender, opener.open.call_one().get(timeout=WAIT))
    sender.send.call_one(4).get(timeout=WAIT)
    assert opener.received.call_one().get(timeout=WAIT) == 4
    waiting = opener.received.call_one()
    kill(sender)
    with pytest.raises(TimeoutError):  # the script that got the port from the actor could still send
        waiting.get(timeout=0.2)


def test_a_receiver_used_at_home_never_fails():
    port, receiver = Channel[int].open()
    pending = receiver.recv()
    with pytest.raises(TimeoutError):
        pending.get(timeout=0.1)
    port.send(1)
    assert pending.get(timeout=WAIT) == 1


def test_senders_on_a_lost_host_are_gone(faults):
    with local_hosts(1) as hosts:
        sender = hosts.mesh.spawn_procs().spawn("far", Sender)
        port, receiver = Channel[int].open()
        sender.keep.call(port).get(timeout=WAIT)
        sender.send.call(1).get(timeout=WAIT)
        assert receiver.recv().get(timeout=WAIT) == 1
        pending = receiver.recv()
        hosts.lose(0)
        with pytest.raises(SupervisionError, match=r"(?s)are gone.*lost"):
            pending.get(timeout=WAIT)


def test_receives_that_wait_when_the_client_ends_are_told():
    r = run_script(
        """
        import threading
        from monarch.actor import Actor, Channel, endpoint, shutdown_context, this_host
        class Keeper(Actor):
            @endpoint
            def keep(self, port): self.port = port
        port, receiver = Channel.open()
        this_host().spawn_procs().spawn("k", Keeper).keep.call_one(port).get(timeout=30)
        def wait():
            try:
                receiver.recv().get(timeout=30)
            except Exception as e:
                print(type(e).__name__)
        t = threading.Thread(target=wait)
        t.start()
        shutdown_context().get(timeout=30)
        t.join(30)
        """
    )
    assert r.stdout == "LinkError\n", r.stderr
