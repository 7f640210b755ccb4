"""Every rung of the ladder keeps the same promises; each is forced in turn, between real processes."""

import os
import random
import signal

import pytest
from actors_with_memory import Owner, Taker

from conftest import ask, wait_until
from monarch.actor import this_host
from monarch.config import configured
from monarch.rdma import RDMAAction, RDMABuffer, RDMABufferDroppedError, RDMAOwnerDiedError, RDMATimeoutError
from monarch.testing import local_hosts

WAIT = 30
#: path, and how it is brought about
WAYS = ["vm", "tcp by the agent", "tcp by the owner", "tcp between hosts", "relay"]


class Way:
    """An owner, a taker, and the path between them."""

    def __init__(self, name, owner, taker, owner_mesh):
        self.name, self.owner, self.taker, self.owner_mesh = name, owner, taker, owner_mesh
        self.path = name.split()[0]


@pytest.fixture(params=WAYS)
def way(request, nothing_left):
    name = request.param
    if name in ("vm", "tcp by the agent", "tcp by the owner"):
        with configured(rdma_disable_vm_access=name == "tcp by the owner"):
            mesh = this_host().spawn_procs({"gpus": 2})
            a, b = mesh.slice(gpus=0), mesh.slice(gpus=1)
            owner, taker = a.spawn("owner", Owner), b.spawn("taker", Taker)
            if name == "tcp by the agent":
                ask(taker.refuse_vm)
            yield Way(name, owner, taker, a)
            mesh.stop().get(timeout=WAIT)
        return
    with local_hosts(2) as hosts:
        there = hosts.mesh.slice(hosts=1).spawn_procs(name="taking")
        near = this_host() if name == "relay" else hosts.mesh.slice(hosts=0)
        here = near.spawn_procs(name="owning")
        taker = there.spawn("taker", Taker)
        ask(taker.refuse_vm)
        yield Way(name, here.spawn("owner", Owner), taker, here)
        here.stop().get(timeout=WAIT)


def test_bytes_arrive_and_the_path_is_named(way):
    b = ask(way.owner.view, "m", b"0123456789")
    assert ask(way.taker.read, b) == b"0123456789"
    ask(way.taker.write, b, b"abc", offset=7)
    assert ask(way.owner.content, "m") == b"0123456abc"
    assert ask(way.taker.read_part, b, 5, 4) == b"56ab"
    assert ask(way.taker.path, b) == way.path


def test_random_ranges_against_a_plain_copy(way):
    rng = random.Random(7)
    size = 5 << 20
    b = ask(way.owner.zeros, "z", size)
    model = bytearray(size)
    for _ in range(12):
        at = rng.randrange(size)
        n = rng.choice([1, 17, 4096, 300_000, size])
        n = min(n, size - at)
        data = rng.randbytes(n)
        ask(way.taker.write, b, data, offset=at)
        model[at : at + n] = data
        at = rng.randrange(size)
        n = min(rng.choice([1, 9, 65536, size]), size - at)
        assert ask(way.taker.read_part, b, at, n) == model[at : at + n]
    assert ask(way.owner.content, "z") == model


def test_an_action_of_many(way):
    buffers = [ask(way.owner.view, f"m{i}", bytes([i]) * (1 + 37 * i)) for i in range(100)]
    assert ask(way.taker.read_many, buffers) == [bytes([i]) * (1 + 37 * i) for i in range(100)]


def test_a_dropped_buffer(way):
    b = ask(way.owner.view, "m", b"0123456789")
    other = ask(way.owner.view, "n", b"other")
    assert ask(way.taker.read, b) == b"0123456789"
    assert ask(way.taker.drop, b) is None
    for write in (False, True):
        kind, text, backend, _ = ask(way.taker.error, b, write)
        assert kind is RDMABufferDroppedError and backend == way.path
        assert f"buffer {b._handle.slot.id} not found" in text
    assert ask(way.taker.read, other) == b"other"
    assert ask(way.taker.drop, b) is None


def test_released_memory(way):
    b = ask(way.owner.mapped, "m", 3 << 20)
    assert ask(way.taker.read, b) == bytes(3 << 20)
    ask(way.owner.release_map, "m")
    for write in (False, True):
        kind, text, _, _ = ask(way.taker.error, b, write)
        assert kind is RDMABufferDroppedError, text
    assert ask(way.owner.pid)


def test_a_killed_owner(way, faults):
    b = ask(way.owner.zeros, "z", 1 << 16)
    pid = ask(way.owner.pid)
    assert ask(way.taker.read, b) == bytes(1 << 16)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: bool(faults))
    for write in (False, True):
        kind, text, _, seconds = ask(way.taker.error, b, write)
        assert kind is RDMAOwnerDiedError, text
        assert "dead" in text and b.owner in text
        assert seconds < 1
    assert ask(way.taker.drop, b) is None
    mine = RDMABuffer(bytearray(b"still works"))
    assert ask(way.taker.read, mine) == b"still works"


def test_an_owner_killed_in_the_middle(way, faults):
    b = ask(way.owner.zeros, "z", 256 << 20)
    pid = ask(way.owner.pid)
    failing = way.taker.error.call_one(b)
    os.kill(pid, signal.SIGKILL)
    got = failing.get(timeout=WAIT)
    assert got is None or (got[0] is RDMAOwnerDiedError and got[3] < 3), got  # None: it was done before the kill


def test_read_only_memory_and_forged_handles(way):
    b = ask(way.owner.view, "m", b"0123456789")
    ro = ask(way.owner.view, "r", b"0123456789", readonly=True)
    through_a_server = way.path in ("tcp", "relay")
    if through_a_server:  # the owner's side decides
        for forged in (
            ask(way.taker.forge, b, size=1 << 20),
            ask(way.taker.forge, b, id=b._handle.slot.id ^ 1),
            ask(way.taker.forge, b, at=b._handle.slot.at + 1),
            ask(way.taker.forge, b, at=1 << 31),
        ):
            kind, text, _, _ = ask(way.taker.error, forged)
            assert "outside the buffer" in text or kind is RDMABufferDroppedError, text
        _, text, _, _ = ask(way.taker.error, ask(way.taker.forge, ro, flags=0), True)
        assert "read-only" in text
        assert ask(way.owner.content, "r") == b"0123456789"
    forged = ask(way.taker.forge, b, address=b._handle.slot.address + 4096)
    if through_a_server:  # addresses do not travel
        assert ask(way.taker.read, forged) == b"0123456789"
    else:
        kind, text, _, _ = ask(way.taker.error, forged)
        assert kind is RDMABufferDroppedError, text
    assert ask(way.taker.read, b) == b"0123456789"


def test_timeouts(way):
    b = ask(way.owner.zeros, "z", 64 << 20)
    kind, text, _, seconds = ask(way.taker.error, b, timeout=0)
    assert kind is RDMATimeoutError and "timed out" in text and seconds < 1
    got = ask(way.taker.error, b, timeout=0.0005)
    assert got is None or got[0] is RDMATimeoutError
    assert ask(way.taker.read_part, b, 0, 100) == bytes(100)


def test_a_frozen_owner_times_out_or_does_not_matter(way):
    b = ask(way.owner.view, "m", b"0123456789")
    pid = ask(way.owner.pid)
    assert ask(way.taker.read, b) == b"0123456789"
    os.kill(pid, signal.SIGSTOP)
    try:
        if way.name == "tcp by the owner":
            kind, _, _, seconds = ask(way.taker.error, b, timeout=0.3)
            assert kind is RDMATimeoutError and seconds < 2
        else:
            assert ask(way.taker.read, b) == b"0123456789"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(way.taker.read, b) == b"0123456789"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has a capability to lose")
def test_the_kernel_refuses_and_the_next_rung_is_taken(procs):
    mesh = procs(2)
    owner, taker = mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=1).spawn("taker", Taker)
    b = ask(owner.view, "m", b"0123456789")
    ask(taker.lose_the_right)
    assert ask(taker.read, b) == b"0123456789"
    assert ask(taker.path, b) == "tcp"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has a capability to lose")
def test_a_right_that_is_lost_later(procs):
    mesh = procs(2)
    owner, taker = mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=1).spawn("taker", Taker)
    buffers = [ask(owner.view, f"m{i}", b"0123456789") for i in range(5)]
    assert ask(taker.path, buffers[0]) == "vm"
    ask(taker.lose_the_right)
    assert ask(taker.read, buffers[0]) == b"0123456789"
    assert ask(taker.read_many, buffers) == [b"0123456789"] * 5
    assert ask(taker.path, buffers[0]) == "tcp"


def test_the_script_itself_owns_and_reads(way):
    mine = RDMABuffer(bytearray(b"from the script"))
    assert ask(way.taker.read, mine) == b"from the script"
    ask(way.taker.write, mine, b"FROM")
    theirs = ask(way.owner.view, "m", b"0123456789")
    dst = bytearray(10)
    theirs.read_into(dst).get(timeout=WAIT)
    assert dst == b"0123456789"
    check = bytearray(15)
    RDMAAction().read_remote(check, mine).read_remote(dst, theirs).submit().get(timeout=WAIT)
    assert check == b"FROM the script"
