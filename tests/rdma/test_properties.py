"""Random programs of reads and writes against a plain copy: sizes, offsets, element types, views, several writers."""

import random

import pytest
import torch
from actors_with_memory import Owner, Taker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.rdma import RDMAAction, RDMABuffer

WAIT = 30
SIZE = 20_000
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.bool]

steps = st.lists(
    st.tuples(st.sampled_from(["read", "write", "action"]), st.integers(0, SIZE), st.integers(0, SIZE), st.integers()),
    min_size=1,
    max_size=12,
)


@pytest.fixture(params=["view", "slab"])
def remote(request, procs):
    owner = procs(1).spawn("owner", Owner)
    if request.param == "slab":
        return owner.slab.call_one("m", SIZE).get(timeout=WAIT)
    return owner.view.call_one("m", bytes(SIZE)).get(timeout=WAIT)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=steps)
def test_ranges(remote, program):
    model = bytearray(SIZE)
    remote.write_from(model).get(timeout=WAIT)
    for kind, at, n, seed in program:
        n = min(n, SIZE - at)
        if kind == "write":
            data = random.Random(seed).randbytes(n)
            remote.write_from(bytearray(data), offset=at).get(timeout=WAIT)
            model[at : at + n] = data
        elif kind == "read":
            out = bytearray(n + 3)
            remote.read_into(out, offset=at, nbytes=n).get(timeout=WAIT)
            assert out == model[at : at + n] + bytes(3)
        else:
            outs = [bytearray(SIZE) for _ in range(3)]
            action = RDMAAction()
            for out in outs:
                action.read_remote(out, remote)
            action.submit().get(timeout=WAIT)
            assert all(out == model for out in outs)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dtype=st.sampled_from(DTYPES), n=st.integers(1, 300), start=st.integers(0, 50), seed=st.integers(0, 1 << 30))
def test_element_types_and_views(nothing_left, dtype, n, start, seed):
    g = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 2, (start + n + 5,), generator=g).to(dtype)
    before = whole.clone()
    buffer = RDMABuffer(whole[start : start + n])
    assert buffer.size() == n * whole.element_size()
    mine = torch.zeros(n + 2, dtype=dtype)
    buffer.read_into(mine[1 : n + 1]).get(timeout=WAIT)
    assert torch.equal(mine[1 : n + 1], before[start : start + n]) and not mine[0] and not mine[n + 1]
    buffer.write_from(torch.ones(n, dtype=dtype)).get(timeout=WAIT)
    assert (whole[start : start + n] == 1).all()
    assert torch.equal(whole[:start], before[:start]) and torch.equal(whole[start + n :], before[start + n :])
    buffer.drop().get(timeout=WAIT)


def test_writers_of_disjoint_ranges_do_not_disturb_each_other(procs):
    mesh = procs(4)
    owner, takers = mesh.slice(gpus=0).spawn("owner", Owner), mesh.slice(gpus=slice(1, 4)).spawn("taker", Taker)
    part = 100_003
    b = owner.zeros.call_one("z", 3 * part).get(timeout=WAIT)
    want = bytearray(3 * part)
    for round in range(5):
        calls = []
        for i in range(3):
            data = random.Random(round * 3 + i).randbytes(part)
            want[i * part : (i + 1) * part] = data
            calls.append(takers.slice(gpus=i).write.call_one(b, data, offset=i * part))
            calls.append(takers.slice(gpus=i).read_part.call_one(b, (i + 1) % 3 * part, part))
        for c in calls:
            c.get(timeout=WAIT)
        assert owner.content.call_one("z").get(timeout=WAIT) == want
