"""Messages that cannot be delivered, messages that are too big, and controllers that fail."""

import pytest
from owners import Frail, Keeper
from watching import fence, heard

from actors_for_tests import Echo
from conftest import WAIT, run_script, wait_until
from monarch.actor import Actor, Channel, Port, SupervisionError, endpoint
from monarch.config import configured

MIB = 1 << 20


class Sender(Actor):
    def __init__(self, told: Port = None):
        self.told = told

    @endpoint
    def send_to(self, port):
        port.send("hello")

    @endpoint
    def ping(self):
        return "pong"


class AsyncSender(Actor):
    def __init__(self, told: Port = None):
        self.told = told

    @endpoint
    async def send_to(self, port):
        port.send("hello")

    @endpoint
    async def ping(self):
        return "pong"


class Refuses(Sender):
    def _handle_undeliverable_message(self, envelope):
        return False


class AsyncRefuses(AsyncSender):
    async def _handle_undeliverable_message(self, envelope):
        return None


class Breaks(Sender):
    def _handle_undeliverable_message(self, envelope):
        raise LookupError("cannot cope")


class AsyncBreaks(AsyncSender):
    async def _handle_undeliverable_message(self, envelope):
        raise LookupError("cannot cope")


class Looks(Sender):
    def _handle_undeliverable_message(self, envelope):
        from monarch._rust_bindings.monarch_hyperactor.mailbox import UndeliverableMessageEnvelope

        kind = isinstance(envelope, UndeliverableMessageEnvelope)
        self.told.send((kind, envelope.sender(), envelope.dest(), envelope.error_msg()))
        return True


@pytest.mark.parametrize("cls", [AsyncSender, Refuses, AsyncRefuses, Breaks, AsyncBreaks])
def test_a_bounce_that_is_not_handled_fails_the_sender_alone_and_its_owner_hears(procs, faults, dead_port, cls):
    k = procs().spawn("k", Keeper)
    sender = k.grow.call_one(1, cls).get(timeout=WAIT)
    other = k.do.call_one(spawn_beside).get(timeout=WAIT)
    sender.send_to.broadcast(dead_port)
    (told,) = heard(k)
    assert told.mesh == sender.name and "undeliverable message" in told.report
    assert ("cannot cope" in told.report) == cls.__name__.endswith("Breaks")
    with pytest.raises(SupervisionError, match="undeliverable message"):
        sender.ping.call_one().get(timeout=WAIT)
    assert other.echo.call_one(1).get(timeout=WAIT) == 1
    fence(procs, faults)
    assert not faults


def spawn_beside(self):
    self.other = self.procs.spawn("other", Echo)
    return self.other


def test_the_envelope_names_sender_destination_and_reason(procs, faults, dead_port):
    told, inbox = Channel.open()
    s = procs().spawn("s", Looks, told)
    s.send_to.call_one(dead_port).get(timeout=WAIT)
    kind, sender, dest, error = inbox.recv().get(timeout=WAIT)
    assert kind and "Looks s" in sender and isinstance(dest, str) and dest and isinstance(error, str) and error
    assert s.ping.call_one().get(timeout=WAIT) == "pong" and not faults


def test_whether_a_port_bounces_can_be_read_and_set(procs, faults, dead_port):
    port, _inbox = Channel.open()
    assert port.return_undeliverable is True
    port.return_undeliverable = False
    assert port.return_undeliverable is False


def test_calling_a_mesh_that_is_known_to_be_dead_does_not_fail_the_caller(procs, faults):
    m, k = procs().spawn("m", Frail), procs().spawn("k", Keeper)
    m.ruin.broadcast()
    wait_until(lambda: faults)

    def insist(self, mesh):
        for _ in range(5):
            try:
                mesh.echo.call_one(1).get(timeout=WAIT)
            except SupervisionError:
                mesh.echo.broadcast(1)
        return "alive"

    assert k.do.call_one(insist, m).get(timeout=WAIT) == "alive"
    fence(procs, faults)
    assert k.told.call_one().get(timeout=WAIT) == [] and [f.mesh_name for f in faults] == [m.name]


# -- too big


@pytest.fixture
def small_frames():
    with configured(codec_max_frame_length=MIB):
        yield


def test_an_argument_that_is_too_big_is_an_error_of_the_call_only(procs, faults, small_frames):
    e = procs().spawn("e", Echo)
    assert len(e.echo.call_one(b"x" * (MIB // 2)).get(timeout=WAIT)) == MIB // 2
    with pytest.raises(SupervisionError) as info:  # as big as the limit: what surrounds it counts too
        e.echo.call_one(b"x" * MIB).get(timeout=WAIT)
    text = str(info.value)
    assert "rejecting oversize frame: len=" in text and f"> max={MIB}" in text and "CODEC_MAX_FRAME_LENGTH" in text
    assert e.echo.call_one(2).get(timeout=WAIT) == 2
    fence(procs, faults)
    assert not faults


def test_a_higher_limit_lets_a_big_argument_through(procs, faults):
    with configured(codec_max_frame_length=2 * MIB):
        e = procs().spawn("e", Echo)
        assert len(e.echo.call_one(b"x" * MIB).get(timeout=WAIT)) == MIB
    assert not faults


def test_a_broadcast_that_is_too_big_is_an_error_where_it_is_made(procs, faults, small_frames):
    e = procs(2).spawn("e", Echo)
    with pytest.raises(SupervisionError, match="rejecting oversize frame"):
        e.echo.broadcast(b"x" * (2 * MIB))
    assert e.echo.call(1).get(timeout=WAIT).values() == [1, 1] and not faults


def test_an_actor_that_sends_too_much_is_told_and_lives(procs, faults, small_frames):
    k, e = procs().spawn("k", Keeper), procs().spawn("e", Echo)

    def send(self, mesh):
        try:
            mesh.echo.call_one(b"x" * (2 * MIB)).get(timeout=WAIT)
        except SupervisionError as error:
            return "rejecting oversize frame" in str(error)

    assert k.do.call_one(send, e).get(timeout=WAIT) is True
    assert e.echo.call_one(1).get(timeout=WAIT) == 1
    fence(procs, faults)
    assert not faults


def test_an_answer_that_is_too_big_is_an_error_of_the_call_only(procs, faults, small_frames):
    e = procs().spawn("e", Echo)
    with pytest.raises(Exception, match="rejecting oversize frame"):
        e.apply.call_one(lambda: b"x" * (2 * MIB)).get(timeout=5)
    assert e.echo.call_one(1).get(timeout=WAIT) == 1 and not faults


# -- controllers


CONTROLLERS = """
import os, time, monarch.actor
from monarch.actor import *
seen = []
monarch.actor.unhandled_fault_hook = lambda f: seen.append(f)
class C(Actor):
    @endpoint
    def ping(self): return "pong"
    @endpoint
    def fail(self, text): raise ValueError(text)
def controller(name): return get_or_spawn_controller(name, C).get(30)
def refused(name):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            controller(name)
            time.sleep(0.01)
        except ActorError as e:
            return str(e)
"""


def test_a_controller_that_failed_is_poisoned_and_nobody_else_is_hurt():
    r = run_script(
        CONTROLLERS
        + """
bad, good = controller("bad"), controller("good")
print(bad.ping.call_one().get(30), good.ping.call_one().get(30))
bad.fail.broadcast("first reason")
bad.fail.broadcast("second reason")
text = refused("bad")
print("Failure on bad" in text, "first reason" in text, "second reason" in text)
print(refused("bad") == text or "Failure on bad" in refused("bad"))
try: bad.ping.call_one().get(30)
except SupervisionError as e: print("dead", "first reason" in str(e))
print(controller("good").ping.call_one().get(30), controller("new").ping.call_one().get(30), seen)
"""
    )
    assert r.stdout.splitlines() == ["pong pong", "True True False", "True", "dead True", "pong pong []"], r.stderr
    assert r.returncode == 0


def test_a_controller_that_fails_does_not_end_a_program_with_the_default_hook():
    r = run_script(
        CONTROLLERS.replace("monarch.actor.unhandled_fault_hook = lambda f: seen.append(f)\n", "")
        + """
controller("bad").fail.broadcast("why")
text = refused("bad")
print("why" in text, controller("good").ping.call_one().get(30))
"""
    )
    assert r.stdout.split() == ["True", "pong"] and r.returncode == 0, r.stderr


def test_an_actor_elsewhere_is_told_of_a_failed_controller_and_lives():
    r = run_script(
        CONTROLLERS
        + """
class Elsewhere(Actor):
    @endpoint
    def use(self): return controller("bad").fail.broadcast("why")
    @endpoint
    def again(self): return refused("bad")
    def __supervise__(self, failure): raise AssertionError("must not be asked")
e = this_host().spawn_procs().spawn("e", Elsewhere)
e.use.call_one().get(30)
text = e.again.call_one().get(30)
print("Failure on bad" in text, "why" in text, seen)
"""
    )
    assert r.stdout.split() == ["True", "True", "[]"], r.stderr
