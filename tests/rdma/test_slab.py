"""Memory that readers map: the same promises as ordinary memory, on a rung of its own."""

import gc
import os
import pickle
import random
import signal

import pytest
import torch
from actors_with_memory import Owner, Taker

from conftest import ask, wait_until
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RDMABufferDroppedError,
    RDMAOwnerDiedError,
    _slab,
    allocate,
    allocate_tensor,
)
from monarch.rdma._manager import manager

WAIT = 30


@pytest.fixture
def owner(procs):
    return procs(1).spawn("owner", Owner)


def arenas_of(pid):
    out = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if "monarch-slab" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                out.append(fd)
        except FileNotFoundError:
            pass
    return out


class TestAllocate:
    def test_zeroed_memory_that_is_ours(self):
        m = allocate(1000)
        assert len(m) == 1000 and not any(m) and not m.readonly
        t = allocate_tensor(3, 5, dtype=torch.int16)
        assert t.shape == (3, 5) and t.dtype == torch.int16 and not t.any()
        assert allocate_tensor(0, 5).shape == (0, 5)
        assert allocate_tensor(2).dtype == torch.float32

    @pytest.mark.parametrize("n", [0, -1, True, 1.5, None])
    def test_sizes_are_checked(self, n):
        with pytest.raises(ValueError, match="nbytes must be a positive number of bytes"):
            allocate(n)

    def test_pieces_do_not_overlap_and_are_freed_together(self):
        gc.collect()
        before = len(arenas_of(os.getpid()))
        pieces = [allocate(n) for n in (1, 63, 64, 65, _slab.ARENA, 100)]
        for i, p in enumerate(pieces):
            p[0] = p[-1] = i + 1
        assert [(p[0], p[-1]) for p in pieces] == [(i + 1, i + 1) for i in range(6)]
        assert len(arenas_of(os.getpid())) > before
        for p in pieces:
            p.release()
        del pieces, p
        _slab._arenas._current = None
        gc.collect()
        assert len(arenas_of(os.getpid())) <= before


class TestTransfers:
    def test_reads_writes_and_offsets(self, owner):
        b = ask(owner.slab, "s", 100)
        assert b.path() == "slab"
        b.write_from(bytearray(b"0123456789"), offset=50).get(timeout=WAIT)
        assert ask(owner.content, "s")[50:60] == b"0123456789"
        out = bytearray(4)
        b.read_into(out, offset=53, nbytes=4).get(timeout=WAIT)
        assert out == b"3456"

    def test_random_ranges_against_a_plain_copy(self, owner):
        rng, size = random.Random(11), 5 << 20
        b = ask(owner.slab, "s", size)
        model = bytearray(size)
        for _ in range(20):
            at = rng.randrange(size)
            data = rng.randbytes(min(rng.choice([1, 100, 70_000, size]), size - at))
            b.write_from(bytearray(data), offset=at).get(timeout=WAIT)
            model[at : at + len(data)] = data
        out = bytearray(size)
        b.read_into(out).get(timeout=WAIT)
        assert out == model == ask(owner.content, "s")

    def test_tensors_and_between_actors(self, procs):
        mesh = procs(2)
        owner, taker = mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=1).spawn("taker", Taker)
        b = ask(owner.slab_tensor, "t", 4, 4)
        ask(owner.fill, "t", 5)
        assert torch.frombuffer(bytearray(ask(taker.read, b)), dtype=torch.float32).tolist() == [5.0] * 16
        assert ask(taker.path, b) == "slab"

    def test_an_action_mixes_rungs(self, owner):
        shared, plain = ask(owner.slab, "s", 6), ask(owner.view, "m", b"plain")
        shared.write_from(bytearray(b"shared")).get(timeout=WAIT)
        a, b = bytearray(6), bytearray(5)
        RDMAAction().read_remote(a, shared).read_remote(b, plain).submit().get(timeout=WAIT)
        assert (bytes(a), bytes(b)) == (b"shared", b"plain")
        assert (shared.path(), plain.path()) == ("slab", "vm")

    def test_in_one_process(self, nothing_left):
        b = RDMABuffer(allocate(16))
        out = bytearray(16)
        b.read_into(out).get(timeout=WAIT)
        assert b.path() == "local"
        b.drop().get(timeout=WAIT)

    def test_where_it_cannot_be_mapped_the_next_rung_is_taken(self, owner):
        b = ask(owner.slab, "s", 16)
        manager()._unmappable.add(b._handle.node)
        assert b.path() == "vm"
        manager()._unmappable.discard(b._handle.node)
        assert b.path() == "slab"
        with configured(rdma_disable_vm_access=True):
            manager().forget(b._handle)
            assert b.path() == "tcp"
            out = bytearray(16)
            b.read_into(out).get(timeout=WAIT)
        manager().forget(b._handle)


class TestFaults:
    def test_a_dropped_buffer(self, owner):
        b = ask(owner.slab, "s", 16)
        b.read_into(bytearray(16)).get(timeout=WAIT)
        ask(owner.drop, "s")
        with pytest.raises(RDMABufferDroppedError, match="it was dropped"):
            b.read_into(bytearray(16)).get(timeout=WAIT)
        with pytest.raises(RDMABufferDroppedError, match="it was dropped"):
            b.write_from(bytearray(16)).get(timeout=WAIT)

    def test_memory_that_the_owner_let_go_of_lives_while_it_is_registered(self, owner):
        b = ask(owner.slab, "s", 16)
        b.write_from(bytearray(b"x" * 16)).get(timeout=WAIT)
        ask(owner.forget, "s")
        out = bytearray(16)
        b.read_into(out).get(timeout=WAIT)
        assert out == b"x" * 16

    def test_a_dead_owner(self, owner, faults):
        b = ask(owner.slab, "s", 16)
        b.read_into(bytearray(16)).get(timeout=WAIT)
        os.kill(b._handle.pid, signal.SIGKILL)

        def dead():
            try:
                b.read_into(bytearray(16)).get(timeout=WAIT)
            except RDMAOwnerDiedError:
                return True
            return False

        wait_until(dead)
        wait_until(lambda: faults)

    def test_forged_handles(self, owner):
        b = ask(owner.slab, "s", 64)
        h = b._handle

        def forged(handle):
            out = pickle.loads(pickle.dumps(b))
            out._handle = handle
            return out.read_into(bytearray(8), nbytes=8)

        with pytest.raises(RDMABufferDroppedError, match="the handle does not match"):
            forged(h._replace(slot=h.slot._replace(size=1 << 40))).get(timeout=WAIT)
        with pytest.raises(RDMABufferDroppedError, match="the handle does not match"):
            forged(h._replace(shared=h.shared._replace(at=1 << 40))).get(timeout=WAIT)
        with pytest.raises(RDMABufferDroppedError, match="its memory is not there any more"):
            forged(h._replace(shared=h.shared._replace(ident=1))).get(timeout=WAIT)
        with pytest.raises(RDMABufferDroppedError, match="there is no such registration"):
            forged(h._replace(slot=h.slot._replace(at=1 << 30))).get(timeout=WAIT)
