"""Buffers between processes and within one: what arrives, what stays, and what is refused."""

import array
import gc
import mmap
import pickle
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
from actors_with_memory import Owner, Taker

from conftest import ask
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RDMABufferDroppedError,
    RDMATimeoutError,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)

WAIT = 30


@pytest.fixture
def pair(procs):
    mesh = procs(2)
    return mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=1).spawn("taker", Taker)


class TestBetweenProcesses:
    def test_a_read_gets_the_bytes_and_a_write_puts_them(self, pair):
        owner, taker = pair
        b = ask(owner.view, "m", b"0123456789")
        assert ask(taker.read, b) == b"0123456789"
        ask(taker.write, b, b"abc")
        assert ask(owner.content, "m") == b"abc3456789"
        assert ask(taker.path, b) == "vm"

    def test_offsets(self, pair):
        owner, taker = pair
        b = ask(owner.view, "m", b"0123456789")
        assert ask(taker.read, b, 4, offset=6) == b"6789"
        assert ask(taker.read_part, b, 2, 3) == b"234"
        ask(taker.write, b, b"xy", offset=8)
        assert ask(owner.content, "m") == b"01234567xy"

    def test_a_later_read_sees_the_owners_update(self, pair):
        owner, taker = pair
        b = ask(owner.tensor, "t", [0.0] * 8)
        ask(owner.fill, "t", 7)
        assert torch.frombuffer(bytearray(ask(taker.read, b)), dtype=torch.float32).tolist() == [7.0] * 8

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 1 << 20, (3 << 20) + 7, 70 << 20])
    def test_all_sizes(self, pair, nbytes):
        owner, _ = pair
        b = ask(owner.zeros, "z", nbytes)
        src = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        b.write_from(src).get(timeout=WAIT)
        dst = torch.empty(nbytes, dtype=torch.uint8)
        b.read_into(dst).get(timeout=WAIT)
        assert torch.equal(src, dst)

    def test_many_at_once_in_both_directions(self, pair):
        owner, _ = pair
        b = ask(owner.zeros, "z", 64 << 20)
        a, c = torch.full((64 << 20,), 3, dtype=torch.uint8), torch.empty(64 << 20, dtype=torch.uint8)
        write, read = b.write_from(a), b.read_into(c)
        small = [b.read_into(torch.empty(9, dtype=torch.uint8), offset=i, nbytes=9) for i in range(300)]
        for f in [read, write, *small]:
            f.get(timeout=WAIT)
        b.read_into(c).get(timeout=WAIT)
        assert torch.equal(a, c)

    def test_a_busy_owner_does_not_matter(self, pair):
        owner, taker = pair
        b = ask(owner.view, "m", b"0123456789")
        busy = owner.hold_the_lock.call_one(1.0)
        assert ask(taker.read, b) == b"0123456789"
        assert not busy.done()
        busy.get(timeout=WAIT)

    def test_the_owner_pins_the_memory(self, pair):
        owner, taker = pair
        b = ask(owner.tensor, "t", [1, 2, 3], "uint8")
        ask(owner.forget, "t")
        assert ask(taker.read, b) == b"\1\2\3"

    def test_actions_read_from_many(self, pair):
        owner, taker = pair
        buffers = [ask(owner.view, f"m{i}", bytes([i]) * (i + 1)) for i in range(40)]
        assert ask(taker.read_many, buffers) == [bytes([i]) * (i + 1) for i in range(40)]

    def test_the_owner_of_a_memoryview_stays_unharmed_when_it_is_released_and_closed(self, pair):
        owner, taker = pair
        b = ask(owner.mapped, "m", 1 << 20)
        assert ask(taker.read, b) == bytes(1 << 20)
        ask(owner.release_map, "m")
        for attempt in (lambda: ask(taker.read, b), lambda: ask(taker.write, b, b"xx")):
            with pytest.raises(Exception, match=f"buffer {b._handle.slot.id} not found"):
                attempt()
        with pytest.raises(RDMABufferDroppedError):
            b.read_into(bytearray(1 << 20)).get(timeout=WAIT)
        assert ask(owner.pid)

    def test_a_resized_tensor_is_noticed(self, pair):
        owner, _ = pair
        b = ask(owner.tensor, "t", [1.0] * 1000)
        ask(owner.resize, "t", 1 << 22)
        with pytest.raises(RDMABufferDroppedError, match="moved or resized"):
            b.read_into(bytearray(4000)).get(timeout=WAIT)


class TestDrop:
    def test_by_the_owner_and_by_a_holder(self, pair):
        owner, taker = pair
        drops = [lambda b: ask(owner.drop, "m"), lambda b: ask(taker.drop, b), lambda b: b.drop().get(timeout=WAIT)]
        for drop in drops:
            b = ask(owner.view, "m", b"0123456789")
            assert ask(taker.read, b) == b"0123456789"
            drop(b)
            with pytest.raises(RDMABufferDroppedError, match=f"buffer {b._handle.slot.id} not found") as e:
                b.read_into(bytearray(10)).get(timeout=WAIT)
            assert e.value.buffer_id == b._handle.slot.id and e.value.owner == b.owner and e.value.backend == "vm"
            with pytest.raises(RDMABufferDroppedError):
                b.write_from(bytearray(10)).get(timeout=WAIT)
            assert b.drop().get(timeout=WAIT) is None
            assert b.size() == 10
            assert pickle.loads(pickle.dumps(b)) == b

    def test_two_buffers_over_one_region_are_independent(self, pair):
        data = bytearray(b"abc")
        a, b = RDMABuffer(memoryview(data)), RDMABuffer(memoryview(data))
        a.drop().get(timeout=WAIT)
        dst = bytearray(3)
        b.read_into(dst).get(timeout=WAIT)
        assert dst == b"abc"

    def test_a_drop_frees_the_memory(self, nothing_left):
        data = bytearray(100)
        b = RDMABuffer(memoryview(data))
        with pytest.raises(BufferError):
            data.extend(b"x")
        b.drop().get(timeout=WAIT)
        gc.collect()
        data.extend(b"x")


class TestWhatIsAccepted:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.arange(10, dtype=torch.float64),
            lambda: torch.arange(10)[2:5],
            lambda: torch.zeros(3, dtype=torch.bfloat16),
            lambda: torch.zeros(3, dtype=torch.complex64),
            lambda: torch.zeros(3, dtype=torch.bool),
            lambda: torch.zeros(4, 4).view(torch.uint8).flatten(),
            lambda: torch.nn.Parameter(torch.zeros(4)),
            lambda: torch.zeros(10)[3:4:2],
            lambda: memoryview(bytearray(10)),
            lambda: memoryview(bytearray(10))[3:],
            lambda: memoryview(array.array("d", [1, 2])),
            lambda: numpy.arange(5.0),
            lambda: bytearray(5),
            lambda: mmap.mmap(-1, 4096),
        ],
    )
    def test_one_dimensional_contiguous_memory(self, make, nothing_left):
        data = make()
        b = RDMABuffer(data)
        n = data.numel() * data.element_size() if isinstance(data, torch.Tensor) else memoryview(data).nbytes
        assert b.size() == n
        dst = bytearray(n)
        b.read_into(dst).get(timeout=WAIT)
        if isinstance(data, torch.Tensor):
            data = torch.tensor(data.tolist(), dtype=data.dtype).view(torch.uint8).numpy()
        assert dst == bytes(memoryview(data).cast("B"))
        b.drop().get(timeout=WAIT)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.zeros(3, 3),
            lambda: torch.tensor(1.0),
            lambda: torch.zeros(10)[::2],
            lambda: memoryview(bytearray(10))[::2],
            lambda: memoryview(bytearray(12)).cast("B", (3, 4)),
            lambda: numpy.zeros((2, 2)),
            lambda: None,
            lambda: [1, 2],
            lambda: 7,
        ],
    )
    def test_other_layouts_are_refused_at_the_call(self, make, nothing_left):
        text = r"RDMABuffer only supports 1d contiguous torch.Tensor or 1d c-contiguous memoryview. Got: "
        good = RDMABuffer(bytearray(64))
        for attempt in (RDMABuffer, good.read_into, good.write_from, lambda d: RDMAAction().read_remote(d, good)):
            with pytest.raises(ValueError, match=text):
                attempt(make())

    def test_empty_and_meta_and_conjugates(self, nothing_left):
        for empty in (torch.empty(0), memoryview(b""), torch.zeros(4)[2:2]):
            with pytest.raises(ValueError, match="Cannot create RDMABuffer with size 0."):
                RDMABuffer(empty)
        with pytest.raises(ValueError, match="meta device"):
            RDMABuffer(torch.empty(4, device="meta"))
        with pytest.raises(ValueError, match="conjugate"):
            RDMABuffer(torch.zeros(4, dtype=torch.complex64).conj())

    def test_read_only_memory_is_a_source_only(self, pair):
        owner, taker = pair
        b = ask(owner.view, "m", b"abc", readonly=True)
        assert ask(taker.read, b) == b"abc"
        with pytest.raises(ValueError, match="read-only"):
            b.write_from(bytearray(3))
        with pytest.raises(ValueError, match="read-only"):
            b.read_into(memoryview(b"xyz"))
        writable = ask(owner.view, "w", b"abc")
        writable.write_from(memoryview(b"xyz")).get(timeout=WAIT)
        assert ask(owner.content, "w") == b"xyz"

    def test_sizes_are_checked_at_the_call(self, nothing_left):
        b = RDMABuffer(bytearray(10))
        small, large = r"size \(9\) must be >= remote buffer size \(10\)", r"size \(11\) must be <= remote buffer size"
        with pytest.raises(ValueError, match="destination local memory " + small):
            b.read_into(bytearray(9))
        with pytest.raises(ValueError, match="source local memory " + large):
            b.write_from(bytearray(11))
        b.read_into(torch.zeros(3)).get(timeout=WAIT)
        b.write_from(bytearray()).get(timeout=WAIT)
        with pytest.raises(ValueError, match="offset 11 is outside"):
            b.read_into(bytearray(10), offset=11)
        with pytest.raises(ValueError, match="nbytes 6"):
            b.read_into(bytearray(10), offset=5, nbytes=6)

    def test_released_memoryviews(self, nothing_left):
        m = memoryview(bytearray(4))
        m.release()
        with pytest.raises(ValueError):
            RDMABuffer(m)


class TestTimeouts:
    @pytest.mark.parametrize("bad", [-1, 2**64, float("nan"), -0.5])
    def test_out_of_range(self, bad, nothing_left):
        b = RDMABuffer(bytearray(4))
        for attempt in (b.read_into, b.write_from):
            with pytest.raises(OverflowError, match="timeout must fit in an unsigned 64-bit integer"):
                attempt(bytearray(4), timeout=bad)
        with pytest.raises(OverflowError):
            RDMAAction().submit(timeout=bad)

    def test_none_is_a_type_error_floats_and_huge_values_are_fine(self, nothing_left):
        b = RDMABuffer(bytearray(4))
        with pytest.raises(TypeError):
            b.read_into(bytearray(4), timeout=None)
        for good in (0.5, 2**64 - 1, 60):
            b.read_into(bytearray(4), timeout=good).get(timeout=WAIT)

    def test_zero_is_at_once_unless_there_is_nothing_to_do(self, nothing_left):
        b = RDMABuffer(bytearray(4))
        with pytest.raises(RDMATimeoutError, match="timed out"):
            b.read_into(bytearray(4), timeout=0).get(timeout=WAIT)
        with pytest.raises(TimeoutError):
            RDMAAction().read_remote(bytearray(4), b).submit(timeout=0).get(timeout=WAIT)
        b.write_from(bytearray(), timeout=0).get(timeout=WAIT)
        RDMAAction().submit(timeout=0).get(timeout=WAIT)


class TestActions:
    def test_empty_and_resubmit_and_mixed(self, pair):
        owner, _ = pair
        assert RDMAAction().submit().get(timeout=WAIT) is None
        t, v = ask(owner.tensor, "t", [1.0, 2.0]), ask(owner.view, "v", b"....")
        mine, src = torch.zeros(2), bytearray(b"abcd")
        action = RDMAAction().read_remote(mine, t).write_remote(v, src)
        action.submit().get(timeout=WAIT)
        assert mine.tolist() == [1.0, 2.0] and ask(owner.content, "v") == b"abcd"
        ask(owner.fill, "t", 5)
        src[:] = b"efgh"
        for f in [action.submit() for _ in range(5)]:
            f.get(timeout=WAIT)
        assert mine.tolist() == [5.0, 5.0] and ask(owner.content, "v") == b"efgh"
        more = bytearray(4)
        action.read_into(v, more).submit().get(timeout=WAIT)
        assert more == b"efgh"
        action.write_from(v, bytearray(b"z")).submit().get(timeout=WAIT)

    def test_all_are_attempted_and_every_failure_is_named(self, pair):
        owner, _ = pair
        buffers = [ask(owner.view, f"m{i}", bytes([i]) * 4) for i in range(6)]
        ask(owner.drop, "m1")
        ask(owner.drop, "m4")
        dst = [bytearray(4) for _ in buffers]
        action = RDMAAction()
        for d, b in zip(dst, buffers, strict=True):
            action.read_remote(d, b)
        with pytest.raises(RDMABufferDroppedError) as e:
            action.submit().get(timeout=WAIT)
        assert sorted(e.value.failures) == [1, 4]
        assert "op 1: " in str(e.value) and "op 4: " in str(e.value) and "op 2" not in str(e.value)
        assert dst[5] == b"\5" * 4
        assert pickle.loads(pickle.dumps(e.value)).failures.keys() == e.value.failures.keys()

    def test_it_cannot_be_changed_in_flight(self, pair):
        owner, _ = pair
        b = ask(owner.zeros, "z", 256 << 20)
        dst = torch.empty(256 << 20, dtype=torch.uint8)
        action = RDMAAction().read_remote(dst, b)
        f = action.submit()
        if not f.done():
            with pytest.raises(RuntimeError, match="currently being submitted; await the in-flight submit before"):
                action.read_remote(dst, b)
        f.get(timeout=WAIT)

    def test_atomics(self, nothing_left):
        b = RDMABuffer(bytearray(8))
        with pytest.raises(NotImplementedError, match="Not yet supported"):
            RDMAAction().fetch_add(b, bytearray(8), 1)
        with pytest.raises(NotImplementedError, match="Not yet supported"):
            RDMAAction().compare_and_swap(b, bytearray(8), 1, 2)


class TestHandles:
    def test_small_and_equal_after_travelling(self, nothing_left):
        b = RDMABuffer(bytearray(1 << 20))
        data = pickle.dumps({"deep": [b]})
        assert len(pickle.dumps(b)) <= 300
        copy = pickle.loads(data)["deep"][0]
        assert copy == b and hash(copy) == hash(b) and copy.size() == 1 << 20
        assert b != RDMABuffer(bytearray(3)) and b != 3
        assert "1048576 bytes" in repr(b) and b.owner.startswith("rdma_manager.")
        assert b.path() == "local"
        b.drop().get(timeout=WAIT)
        assert "dropped" in repr(b)

    def test_backend_answers(self):
        assert get_rdma_backend() in ("ibverbs", "tcp", "none")
        assert isinstance(is_ibverbs_available(), bool)
        with pytest.warns(DeprecationWarning) as seen:
            assert is_rdma_available() is True
        assert seen[0].filename == __file__

    def test_no_backend(self, nothing_left):
        from monarch.config import configured

        if is_ibverbs_available():
            pytest.skip("this machine has an RDMA NIC")
        with configured(rdma_allow_tcp_fallback=False):
            assert get_rdma_backend() == "none"
            text = "Tried to create an RDMABuffer, but RDMA is not available on this platform"
            with pytest.raises(RuntimeError, match=text) as e:
                RDMABuffer(bytearray(3))
            assert "rdma_allow_tcp_fallback=True" in str(e.value)


def test_torch_is_not_imported_for_memoryviews():
    code = """
    import sys
    from monarch.rdma import RDMABuffer
    b = RDMABuffer(memoryview(bytearray(b"abc")))
    d = bytearray(3)
    b.read_into(memoryview(d)).get(timeout=10)
    assert d == b"abc"
    assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_the_fallback_warning_is_shown_once():
    code = """
    from monarch.rdma import RDMABuffer
    for _ in range(3):
        RDMABuffer(memoryview(bytearray(b"abc")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stderr.count("RDMATcpFallbackWarning") == 1
