"""Shardings: who holds what, who sends what, and that executing a plan equals cutting the whole tensor."""

import math
import random

import pytest
import torch
from actors_of_weights import Holder, cut
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.actor import ActorError, this_host
from monarch.config import configured
from monarch.rdma import RDMABuffer
from monarch.testing import local_hosts
from monarch.weights._boxes import Box
from monarch.weights.reshard import (
    ReshardPlan,
    ShardMetadata,
    TransferChunk,
    compute_overlap,
    compute_shard_metadata,
    compute_transfer_plan,
    from_placements,
)

WAIT = 60


@st.composite
def layouts(draw):
    """A shape of 1 to 4 dimensions, and two ways to place it on meshes of ranks."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    sides = []
    for _ in range(2):
        mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        placements = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh]
        sides.append(from_placements(shape, mesh, placements))
    return shape, sides[0], sides[1]


class TestShards:
    @pytest.mark.parametrize(("n", "ranks"), [(10, 4), (7, 3), (4, 4), (3, 5), (0, 2), (5, 1)])
    def test_sizes_follow_torch_chunk(self, n, ranks):
        shards = compute_shard_metadata((n, 2), ranks, 0)
        want = [c.shape[0] for c in torch.zeros(n, 2).chunk(ranks)] if n else []
        got = [s.local_shape[0] for s in shards]
        assert got == want + [0] * (ranks - len(want))
        assert [s.offset[0] for s in shards] == [sum(got[:i]) for i in range(ranks)]

    def test_two_dimensional_meshes_and_replicas(self):
        from torch.distributed.tensor import Replicate, Shard

        shards = from_placements((5, 6), (2, 2), (Shard(0), Shard(1)))
        assert [(s.offset, s.local_shape) for s in shards] == [
            ((0, 0), (3, 3)),
            ((0, 3), (3, 3)),
            ((3, 0), (2, 3)),
            ((3, 3), (2, 3)),
        ]
        assert from_placements((5, 6), (2, 2), (0, 1)) == shards
        twice = from_placements((5, 6), (2, 2), (Replicate(), Shard(-1)))
        assert twice[0].box == twice[2].box and twice[1].offset == (0, 3)
        both = from_placements((8,), (2, 2), (Shard(0), Shard(0)))
        assert [s.offset for s in both] == [(0,), (2,), (4,), (6,)]

    @pytest.mark.parametrize(
        ("call", "error", "says"),
        [
            (lambda: compute_shard_metadata((4,), 0, 0), ValueError, "num_ranks must be at least 1"),
            (lambda: compute_shard_metadata((4,), 2, 1), ValueError, r"shard_dim 1 is not a dimension of .*\(4,\)"),
            (lambda: from_placements((4,), (2,), ()), ValueError, "0 placements for a mesh of 1 dimensions"),
            (lambda: from_placements((4,), (2,), ("x",)), TypeError, "placements must be Shard"),
            (lambda: from_placements((4,), (0,), (None,)), ValueError, "those of the mesh at least 1"),
            (lambda: from_placements((4,), (2,), (3,)), ValueError, "dimension 3 does not exist"),
            (lambda: ShardMetadata(0, (4,), (3,), (2,)), ValueError, "not inside the tensor"),
            (lambda: ShardMetadata(0, (4,), (3, 0), (2,)), ValueError, "as many dimensions"),
        ],
    )
    def test_bad_arguments(self, call, error, says):
        with pytest.raises(error, match=says):
            call()


class TestPlans:
    def test_overlap_is_in_the_coordinates_of_the_shards(self):
        a = compute_shard_metadata((8, 8), 2, 0)[1]
        b = compute_shard_metadata((8, 8), 4, 1)[2]
        assert compute_overlap(a, b) == TransferChunk(1, 2, (0, 4), (4, 0), (4, 2))
        assert compute_overlap(*compute_shard_metadata((8, 8), 2, 0)) is None
        with pytest.raises(ValueError, match="different shapes"):
            compute_overlap(a, compute_shard_metadata((9, 8), 1, 0)[0])

    @settings(max_examples=600, deadline=None)
    @given(layouts())
    def test_every_element_arrives_once_from_where_it_is(self, layout):
        shape, senders, receivers = layout
        whole = torch.arange(math.prod(shape)).reshape(shape)
        filled = {r.rank: torch.full(r.local_shape, -1) for r in receivers}
        for c in compute_transfer_plan(senders, receivers):
            s, r = senders[c.sender_rank], receivers[c.receiver_rank]
            assert all(o >= 0 and o + n <= m for o, n, m in zip(c.sender_offset, c.shape, s.local_shape, strict=True))
            assert all(o >= 0 and o + n <= m for o, n, m in zip(c.receiver_offset, c.shape, r.local_shape, strict=True))
            here = cut(filled[r.rank], ShardMetadata(0, r.local_shape, c.receiver_offset, c.shape))
            assert (here == -1).all()
            here.copy_(cut(cut(whole, s), ShardMetadata(0, s.local_shape, c.sender_offset, c.shape)))
        for r in receivers:
            assert torch.equal(filled[r.rank], cut(whole, r))

    @settings(max_examples=100, deadline=None)
    @given(layouts())
    def test_the_bytes_of_a_plan_are_those_of_the_destinations(self, layout):
        _, senders, receivers = layout
        plan = ReshardPlan.build(senders, receivers, dtype=torch.bfloat16)
        assert plan.bytes == 2 * sum(r.numel for r in receivers)
        assert plan.bytes <= plan.gather_bytes
        assert set(plan.per_link()) == {(s, r.rank) for r in receivers for s in plan.senders(r.rank)}

    def test_replicas_share_the_work_and_cost_decides_first(self):
        senders = from_placements((64,), (4,), (None,))
        receivers = compute_shard_metadata((64,), 8, 0)
        assert {b for b in _sent(ReshardPlan.build(senders, receivers)).values()} == {64}
        near = ReshardPlan.build(senders, receivers, cost=lambda s, r: abs(s - r // 2))
        assert set(near.per_link()) == {(r // 2, r) for r in range(8)}

    def test_the_load_counts_over_all_tensors(self):
        senders = from_placements((8,), (2,), (None,))
        one = from_placements((8,), (1,), (None,))
        plan = ReshardPlan.build({"a": senders, "b": senders}, {"a": one, "b": one})
        assert set(_sent(plan).values()) == {32}

    def test_what_nobody_holds_is_named(self):
        senders = compute_shard_metadata((8,), 4, 0)[:3]
        with pytest.raises(ValueError, match=r"rank 1 needs the \(2,\) elements at \(6,\): no sender has them"):
            compute_transfer_plan(senders, compute_shard_metadata((8,), 2, 0))
        with pytest.raises(ValueError, match="'w' is in dst_layout, and not in src_layout"):
            ReshardPlan.build({}, {"w": senders})

    def test_subtracting_leaves_what_was_not_taken(self):
        box, hole = Box((0, 0, 0), (4, 5, 6)), Box((1, 2, 3), (2, 2, 2))
        left = box.subtract(hole)
        assert sum(b.numel for b in left) == box.numel - hole.numel
        assert not [b for b in left if b.intersect(hole)]
        assert not [1 for i, a in enumerate(left) for b in left[:i] if a.intersect(b)]


def _sent(plan):
    out = {}
    for (s, _), n in plan.per_link().items():
        out[s] = out.get(s, 0) + n
    return out


def run_plan(rng, holders, shape, src, dst, dtype=torch.float32, pullers=None):
    """Executes a plan between processes; each receiver compares with what it cuts itself."""
    senders, receivers = from_placements(shape, *src), from_placements(shape, *dst)
    plan = ReshardPlan.build({"w": senders}, {"w": receivers}, dtype={"w": dtype})
    seed = rng.randrange(1 << 30)
    n = holders.size()
    handles = {s.rank: holders.slice(gpus=s.rank % n).hold.call_one(seed, s, dtype) for s in senders if s.numel}
    handles = {rank: {"w": f.get(timeout=WAIT)} for rank, f in handles.items()}
    pullers = pullers or holders
    pulls = [
        pullers.slice(gpus=r.rank % pullers.size()).pull.call_one(plan, handles, r, seed, dtype) for r in receivers
    ]
    assert sum(p.get(timeout=WAIT) for p in pulls) == plan.bytes


CASES = [
    ((64, 48), ((2,), (0,)), ((3,), (1,))),  # rows to columns
    ((64, 48), ((3,), (1,)), ((2,), (0,))),  # columns to rows
    ((61, 47), ((2, 2), (0, 1)), ((3,), (0,))),  # blocks to rows, uneven
    ((300, 700), ((2,), (0,)), ((2,), (1,))),  # long runs: gathered
    ((40, 2048), ((2,), (0,)), ((2,), (1,))),
    ((6, 5, 4, 3), ((2,), (1,)), ((2, 2), (0, 3))),  # kernels
    ((17,), ((4,), (0,)), ((2, 3), (None, 0))),  # biases, to replicas
    ((3, 2), ((5,), (0,)), ((2,), (1,))),  # empty shards
]


class TestBetweenProcesses:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
    def test_executing_equals_slicing(self, procs, dtype):
        holders, rng = procs(3).spawn("holder", Holder), random.Random(1)
        for shape, src, dst in CASES:
            run_plan(rng, holders, shape, src, dst, dtype)

    def test_random_layouts(self, procs):
        holders, rng = procs(2).spawn("holder", Holder), random.Random(2)
        for _ in range(60):
            shape = tuple(rng.randrange(1, 40) for _ in range(rng.randrange(1, 4)))
            sides = []
            for _ in range(2):
                mesh = tuple(rng.randrange(1, 4) for _ in range(rng.randrange(1, 3)))
                sides.append((mesh, tuple(rng.choice([None, *range(len(shape))]) for _ in mesh)))
            run_plan(rng, holders, shape, *sides)

    @pytest.mark.parametrize("path", ["tcp by the agent", "tcp by the owner", "relay"])
    def test_over_other_paths(self, nothing_left, path):
        rng = random.Random(3)
        if path == "relay":
            with local_hosts(2) as hosts:
                owners, pullers = this_host().spawn_procs({"gpus": 2}), hosts.mesh.spawn_procs().rename(hosts="gpus")
                self._all_cases(rng, owners.spawn("owner", Holder), pullers.spawn("puller", Holder))
                owners.stop().get(timeout=WAIT)
            return
        with configured(rdma_disable_vm_access=path == "tcp by the owner"):
            owners, pullers = this_host().spawn_procs({"gpus": 2}), this_host().spawn_procs({"gpus": 2})
            self._all_cases(rng, owners.spawn("owner", Holder), pullers.spawn("puller", Holder))
            owners.stop().get(timeout=WAIT)
            pullers.stop().get(timeout=WAIT)

    def _all_cases(self, rng, owners, pullers):
        pullers.refuse_vm.call().get(timeout=WAIT)
        for case in CASES:
            run_plan(rng, owners, *case, pullers=pullers)

    def test_what_does_not_fit_is_refused(self, nothing_left):
        senders = compute_shard_metadata((4, 4), 2, 0)
        plan = ReshardPlan.build(senders, compute_shard_metadata((4, 4), 1, 0))
        half = RDMABuffer(torch.zeros(8))
        short = RDMABuffer(torch.zeros(7))
        with pytest.raises(ValueError, match=r"the target of '' is torch.float32 of shape \(4, 3\)"):
            plan.execute({0: half, 1: half}, torch.zeros(4, 3), rank=0)
        with pytest.raises(ValueError, match="handles has no sender 1, of which rank 0 needs ''"):
            plan.execute({0: half}, torch.zeros(4, 4), rank=0)
        with pytest.raises(ValueError, match="the buffer of '' at sender 1 has 28 bytes of 32"):
            plan.execute({0: half, 1: short}, torch.zeros(4, 4), rank=0)
        with pytest.raises(ValueError, match=r"handles\[0\] has no ''"):
            plan.execute({0: {}, 1: half}, torch.zeros(4, 4), rank=0)
        assert plan.execute({0: half, 1: half}, torch.ones(4, 4), rank=0) == 64
        for b in (half, short):
            b.drop().get(timeout=WAIT)

    def test_a_dropped_shard_is_an_error_for_the_receiver(self, procs):
        mesh = procs(2)
        a, b = mesh.slice(gpus=0).spawn("a", Holder), mesh.slice(gpus=1).spawn("b", Holder)
        s, r = compute_shard_metadata((64, 64), 2, 0), compute_shard_metadata((64, 64), 2, 1)
        plan = ReshardPlan.build({"w": s}, {"w": r})
        handles = {x.rank: {"w": a.hold.call_one(5, x, torch.float32).get(timeout=WAIT)} for x in s}
        handles[1]["w"].drop().get(timeout=WAIT)
        with pytest.raises(ActorError, match="1 of 2 operations failed|not found: it was dropped"):
            b.pull.call_one(plan, handles, r[0], 5, torch.float32).get(timeout=WAIT)
