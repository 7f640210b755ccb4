"""Torch operations inside an activated mesh: factories, arithmetic, modules, autograd, views, aliasing."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

import monarch
from conftest import wait_until
from monarch.tensor.worker import actor as worker_actor


def values(t, n=2, dim="gpus"):
    return [monarch.inspect(t, **{dim: i}) for i in range(n)]


def test_metadata_is_known_at_once_and_each_worker_has_its_own_value(pair):
    with pair.activate():
        w = torch.rand(4, 5)
        y = (w @ w.T).relu()
    assert (y.shape, y.dtype, y.stride()) == ((4, 4), torch.float32, (4, 1))
    assert isinstance(y, monarch.Tensor) and isinstance(y, torch.Tensor)
    a, b = values(w)
    assert not torch.equal(a, b)
    for local, out in zip((a, b), values(y)):
        torch.testing.assert_close((local @ local.T).relu(), out)
    assert "monarch.Tensor(mesh=" in repr(y) and "fake=FakeTensor(" in repr(y)


def test_constants_are_sent_and_in_place_writes_stay_apart(pair):
    with pair.activate():
        c = torch.tensor([[1, 2], [3, 4]])
        d = torch.tensor([1.5, 2.5])
        c[0, 1] = 7
        c += pair.rank_tensor("gpus")
    assert [v.tolist() for v in values(c)] == [[[1, 7], [3, 4]], [[2, 8], [4, 5]]]
    assert monarch.inspect(d).tolist() == [1.5, 2.5]


def test_numpy_data_becomes_a_constant(pair):
    np = pytest.importorskip("numpy")
    with pair.activate():
        t = torch.from_numpy(np.arange(4.0)) * 2
    assert monarch.inspect(t).tolist() == [0, 2, 4, 6]


def test_rank_tensors(square):
    with square.activate():
        both = square.rank_tensors()
        x = 10 * both["host"] + both["gpu"]
        combined = square.rank_tensor(("gpu", "host"))
    got = {(h, g): monarch.inspect((x, combined), {"host": h, "gpu": g}) for h in range(2) for g in range(2)}
    assert {k: (int(a), int(b)) for k, (a, b) in got.items()} == {
        (h, g): (10 * h + g, 2 * g + h) for h in range(2) for g in range(2)
    }


def test_views_alias_on_the_workers(pair):
    with pair.activate():
        base = torch.zeros(16, 5)
        chunks = base.chunk(4)
        assert len(base._aliases.aliases) == 5
        assert chunks[2]._fake.storage_offset() == 40
        chunks[2].add_(3)
        base.t()[0].mul_(2)
        row = base[9]
        row.zero_()
    want = torch.zeros(16, 5)
    want[8:12] = 3
    want[:, 0] *= 2
    want[9] = 0
    assert torch.equal(monarch.inspect(base), want)
    assert torch.equal(monarch.inspect(chunks[2]), want[8:12])


def test_out_arguments_tuple_results_and_optional_tensors(pair):
    with pair.activate():
        a = torch.arange(6.0).reshape(2, 3)
        out = torch.empty(2, 3)
        torch.add(a, 1, out=out)
        std, mean = torch.std_mean(a, dim=1)
        plain = torch.nn.functional.layer_norm(a, (3,))
        biased = torch.nn.functional.layer_norm(a, (3,), torch.ones(3), torch.ones(3))
        cat = torch.cat([a, a], 0)
    local = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(monarch.inspect(out), local + 1)
    for got, want in zip(monarch.inspect((std, mean)), torch.std_mean(local, dim=1)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(monarch.inspect(biased - plain), torch.ones(2, 3))
    assert monarch.inspect(cat).shape == (4, 3)


def _train(make_optimizer, steps, data, state):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for p, v in zip(model.parameters(), state):
            p.copy_(v)
    optimizer = make_optimizer(model.parameters())
    x, y = data
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.detach(), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    ],
    ids=["sgd", "momentum", "adam", "fused", "adamw"],
)
def test_training_equals_local_training(pair, make):
    torch.manual_seed(1)
    shapes = [(8, 4), (8,), (8,), (8,), (1, 8), (1,)]
    start = [torch.randn(s) / 2 for s in shapes]
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    want_loss, want = _train(make, 6, (x, y), start)
    with pair.activate():
        data = (torch.tensor(x.tolist()), torch.tensor(y.tolist()))
        loss, got = _train(make, 6, data, [torch.tensor(s.tolist()) for s in start])
    torch.testing.assert_close(monarch.inspect(loss, gpus=1), want_loss)
    for a, b in zip(monarch.inspect(got, gpus=1), want):
        torch.testing.assert_close(a, b)


def test_state_dict_round_trip_and_gradients(pair):
    with pair.activate():
        a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        b.load_state_dict(a.state_dict())
        assert isinstance(a.weight, monarch.Tensor) and isinstance(a.weight, torch.nn.Parameter)
        x = torch.ones(1, 3, requires_grad=True)
        (g,) = torch.autograd.grad(b(x).sum(), [x])
    weight, bias, other, gradient = monarch.inspect((a.weight, a.bias, b.weight, g), gpus=1)
    assert torch.equal(weight, other) and not weight.requires_grad
    torch.testing.assert_close(gradient, weight.sum(0, keepdim=True))


def test_a_handle_keeps_its_meaning_when_its_data_is_replaced(pair):
    with pair.activate():
        layer = torch.nn.Linear(2, 2).double()
        layer.weight.data = torch.eye(2, dtype=torch.float64)
        y = layer.weight * 2
    assert monarch.inspect(y).tolist() == [[2, 0], [0, 2]]
    assert monarch.inspect(layer.bias).dtype == torch.float64


def test_long_chains(pair):
    with pair.activate():
        x = torch.zeros(())
        for _ in range(2048):
            x = x + torch.rand(()) / 4096
    assert 0.2 < monarch.inspect(x).item() < 0.3


def test_operands_decide_the_mesh_outside_an_activation(pair):
    with pair.activate():
        y = torch.ones(3, requires_grad=True)
    z = (y + 1).sum()
    z.backward()
    assert monarch.inspect(torch.zeros_like(y) + y.new_ones(3)).tolist() == [1, 1, 1]
    assert monarch.inspect(y.grad).tolist() == [1, 1, 1]
    assert not isinstance(torch.ones(3), monarch.Tensor)


def test_activations_nest_and_are_undone_by_exceptions(pair):
    with pytest.raises(ValueError, match="no device mesh is active"):
        monarch.get_active_mesh()
    with pair.activate() as outer:
        child = outer.slice(gpus=1)
        with pytest.raises(KeyError):
            with child.activate():
                assert monarch.get_active_mesh() is child is outer.slice(gpus=1)
                raise KeyError
        assert monarch.get_active_mesh() is outer
        with monarch.no_mesh.activate():
            local = torch.ones(2) + 1
            assert not isinstance(local, monarch.Tensor)
        assert isinstance(torch.ones(2), monarch.Tensor)
    assert not isinstance(torch.ones(2), monarch.Tensor)


def test_results_of_fetches_are_usable_at_once(pair):
    with pair.activate():
        got = monarch.inspect(torch.full((2,), 3.0))
        assert got.tolist() == [3, 3]
        with monarch.no_mesh.activate():
            assert (got + 1).tolist() == [4, 4]


def test_what_depends_on_values_is_refused(pair):
    with pair.activate():
        x = torch.rand(3)
        for read in (lambda: x.sum().item(), lambda: bool(x.sum() > 0), lambda: float(x.max())):
            with pytest.raises(DataDependentOutputException):
                read()
        for pick in (lambda: x.nonzero(), lambda: x[x > 0.5]):
            with pytest.raises(DynamicOutputShapeException):
                pick()
        for export in (x.numpy, x.tolist):
            with pytest.raises(RuntimeError):
                export()
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        import copy

        with pytest.raises(TypeError, match="clone"):
            copy.deepcopy(x)


def test_dropping_handles_frees_values(pair):
    with pair.activate():
        count = 0
        for _ in range(300):
            torch.ones(1000)
            count += 1
        x = torch.ones(3)
        y = x.view(3, 1)
        x.drop()
        x.drop()
        assert y.dropped
        with pytest.raises(TypeError, match=r"(?s)DROPPED.*test_operations"):
            y + 1
        z = torch.zeros(1)
    gc.collect()
    monarch.inspect(z)
    sizes = pair.spawn("probe", _Tables).largest.call().get(timeout=30)
    assert all(n < 60 for n in sizes.values())


from monarch.actor import Actor, endpoint  # noqa: E402


class _Tables(Actor):
    @endpoint
    def largest(self):
        return max(len(w.table) for w in worker_actor.workers.values())

    @endpoint
    def has(self, ident):
        return any(ident in w.table for w in worker_actor.workers.values())


def test_default_dtype_and_default_device_of_the_client_count(pair):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with pair.activate():
            a = torch.ones(2)
            b = torch.arange(3) / 2
    finally:
        torch.set_default_dtype(before)
    assert monarch.inspect((a, b))[0].dtype == monarch.inspect(b).dtype == torch.float64 == b.dtype


def test_a_value_is_sent_when_nothing_asks_for_it(pair):
    """Commands leave after a moment, without a fetch."""
    with pair.activate():
        x = torch.ones(3)
    wait_until(lambda: x.mesh._engine.pending() == 0)
    probe = pair.spawn("probe", _Tables)
    wait_until(lambda: all(probe.has.call(x.ref).get(timeout=30).values()))
