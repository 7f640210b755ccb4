"""Reductions over dimensions of a mesh, and copies between meshes, against values computed by hand."""

import functools
import operator

import pytest
import torch

import monarch
from monarch.mesh_controller import RemoteException


def everywhere(t):
    """{(host, gpu): value}"""
    return {(h, g): monarch.inspect(t, host=h, gpu=g) for h in range(2) for g in range(2)}


def data(square, dtype=torch.float32, shape=(2, 3)):
    """A tensor that differs on each worker; the values by coordinate."""
    n = 1
    for s in shape:
        n *= s
    at = 3 * square.rank_tensor("host") + 2 * square.rank_tensor("gpu") + 1
    t = ((torch.arange(n).reshape(shape) + at) % 7).to(dtype)
    with monarch.no_mesh.activate():
        base = torch.arange(n).reshape(shape)
        local = {(h, g): ((base + 3 * h + 2 * g + 1) % 7).to(dtype) for h in range(2) for g in range(2)}
    return t, local


FOLD = {
    "sum": lambda rows: sum(rows[1:], rows[0]),
    "avg": lambda rows: sum(rows[1:], rows[0]) / len(rows),
    "product": lambda rows: functools.reduce(operator.mul, rows),
    "min": lambda rows: functools.reduce(torch.minimum, rows),
    "max": lambda rows: functools.reduce(torch.maximum, rows),
    "band": lambda rows: functools.reduce(operator.and_, rows),
    "bor": lambda rows: functools.reduce(operator.or_, rows),
    "bxor": lambda rows: functools.reduce(operator.xor, rows),
}
DTYPES = {
    "avg": [torch.float32, torch.bfloat16],
    **dict.fromkeys(["band", "bor", "bxor"], [torch.int64, torch.uint8, torch.int16]),
}


@pytest.mark.parametrize("reduction", FOLD)
def test_all_reduce_and_reduce_scatter(square, reduction):
    for dtype in DTYPES.get(reduction, [torch.float32, torch.int64, torch.bfloat16]):
        with square.activate():
            t, local = data(square, dtype)
            over = t.reduce("gpu", reduction)
            both = t.reduce(("gpu", "host"), reduction)
            scattered = t.reduce("host", reduction, scatter=True)
        fold = FOLD[reduction]
        assert (over.shape, over.dtype, scattered.shape) == (t.shape, dtype, (3,))
        for (h, g), value in everywhere(over).items():
            torch.testing.assert_close(value, fold([local[h, i] for i in range(2)]))
        for value in everywhere(both).values():
            torch.testing.assert_close(value, fold([local[i, j] for i in range(2) for j in range(2)]))
        for (h, g), value in everywhere(scattered).items():
            torch.testing.assert_close(value, fold([local[i, g][h] for i in range(2)]))


def test_stack_and_all_to_all(square):
    with square.activate():
        t, local = data(square)
        stacked = t.reduce("gpu", "stack")
        exchanged = t.reduce("gpu", "stack", scatter=True)
    assert (stacked.shape, exchanged.shape) == ((2, 2, 3), (2, 3))
    for (h, g), value in everywhere(stacked).items():
        assert torch.equal(value, torch.stack([local[h, 0], local[h, 1]]))
    for (h, g), value in everywhere(exchanged).items():
        assert torch.equal(value, torch.stack([local[h, i][g] for i in range(2)]))


def test_all_dims_in_any_order_and_a_dim_of_one(square):
    mesh = square._tensors("t").split(host=("host", "one"), one=1)
    with mesh.activate():
        t = mesh.rank("host") * 2 + mesh.rank("gpu") + 1
        results = [t.reduce(d) for d in ((), ("gpu", "host"), ("host", "one", "gpu"))]
        alone = t.reduce("one", "sum"), t.reduce("one", "stack")
    for r in results:
        assert monarch.inspect(r, host=1, one=0, gpu=0).item() == 10
    a, b = monarch.inspect(alone, host=1, one=0, gpu=1)
    assert (a.item(), b.tolist()) == (4, [4])


def test_reduce_in_a_sub_mesh(square):
    row = square._tensors("t").slice(host=1)
    with row.activate():
        x = row.rank("gpu") + 5
        assert monarch.inspect(x.reduce("gpu"), gpu=0).item() == 11
        with pytest.raises(KeyError, match="dim host not found"):
            x.reduce("host")


def test_in_place_and_out(square):
    with square.activate():
        t = square.rank_tensor("host") + 1.0
        alias = t.view(1)
        out = torch.zeros(())
        kept = out.clone()
        plain = t.reduce("host")
        r = t.reduce("host", out=out)
        r.add_(1)
        back = t.reduce_("host", "sum")
        back.mul_(2)
    assert [float(monarch.inspect(x)) for x in (plain, out, kept, t, alias)] == [3, 4, 0, 6, 6]


def test_pytrees(square):
    with square.activate():
        tree = {"a": torch.ones(2), "b": [square.rank_tensor("gpu")]}
        monarch.reduce_(tree, ("host", "gpu"))
        again = monarch.reduce(tree, ("host", "gpu"))
        with pytest.raises(AttributeError):
            monarch.reduce({"a": 1}, "gpu")
    a, (b,) = monarch.inspect((tree["a"], tree["b"]))
    assert (a.tolist(), b.item()) == ([4, 4], 2)
    assert monarch.inspect(again)["a"].tolist() == [16, 16]


def test_refusals(square):
    with square.activate():
        t, i = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
        w = torch.ones(2, requires_grad=True)
        cases = [
            (KeyError, "dim x not found", lambda: t.reduce("x")),
            (ValueError, "twice", lambda: t.reduce(("gpu", "gpu"))),
            (ValueError, "is not valid for multiple dimensions", lambda: t.reduce(("gpu", "host"), "stack")),
            (ValueError, "is not valid for multiple dimensions", lambda: t.reduce((), "sum", scatter=True)),
            (ValueError, "unknown", lambda: t.reduce("gpu", "mean")),
            (NotImplementedError, "to_mesh", lambda: t.reduce("gpu", mesh=t.mesh)),
            (TypeError, "When scattering results", lambda: torch.ones(3).reduce("gpu", scatter=True)),
            (TypeError, "When scattering results", lambda: torch.ones(()).reduce("gpu", "stack", scatter=True)),
            (ValueError, "is not valid for in-place", lambda: t.reduce_("gpu", scatter=True)),
            (ValueError, "is not valid for in-place", lambda: t.reduce_("gpu", "stack")),
            (ValueError, "not both", lambda: t.reduce("gpu", _inplace=True, out=torch.ones(2, 3))),
            (ValueError, r"Reduce expects the shape to be torch.Size", lambda: t.reduce("gpu", out=torch.ones(3))),
            (TypeError, "floating", lambda: i.reduce("gpu", "avg")),
            (TypeError, "integer", lambda: t.reduce("gpu", "bor")),
            (TypeError, "REQUIRES_GRAD", lambda: w.reduce("gpu")),
            (TypeError, "REQUIRES_GRAD", lambda: w.to_mesh(w.mesh)),
        ]
        for kind, text, call in cases:
            with pytest.raises(kind, match=text):
                call()
        with torch.no_grad():
            assert monarch.inspect(w.reduce("gpu")).tolist() == [2, 2]
        with monarch.Stream("other").activate(), pytest.raises(TypeError, match="WRONG_STREAM"):
            t.reduce("gpu")


def test_an_error_on_one_rank_takes_part_and_reaches_everybody(square):
    with square.activate():
        x = torch.ones(2)
        at = square.rank_tensor("gpu").reshape(1) * 5
        bad = torch.arange(2)[at]  # fails where gpu == 1
        summed, stacked = bad.reduce("gpu"), bad.reduce("gpu", "stack")
        inplace = bad.reduce_("gpu")
        good = (x + 1).reduce("gpu")
        moved = bad.slice_mesh(gpu=1).to_mesh(square._tensors("t").slice(gpu=0))
        for t in (summed, stacked, inplace):
            for g in range(2):
                with pytest.raises(RemoteException, match="IndexError"):
                    monarch.inspect(t, host=0, gpu=g)
        assert monarch.inspect(good).tolist() == [4, 4]
    with pytest.raises(RemoteException, match="IndexError"):
        monarch.inspect(moved)


# -- between meshes


def test_to_mesh_moves_between_workers_and_copies(square):
    whole = square._tensors("t")
    left, right = whole.slice(gpu=0), whole.slice(gpu=1)
    with left.activate():
        h = left.rank("host") * 10 + torch.arange(3)
        there = h.to_mesh(right)
        h.add_(100)
        same = h.to_mesh(left)
        h.zero_()
    with right.activate():
        y = there * 2
    assert y.mesh is right
    assert [monarch.inspect(y, host=i).tolist() for i in range(2)] == [[0, 2, 4], [20, 22, 24]]
    assert [monarch.inspect(same, host=i).tolist() for i in range(2)] == [[100, 101, 102], [110, 111, 112]]


def test_slice_mesh_and_broadcast(square):
    whole = square._tensors("t")
    with whole.activate():
        x = 10 * whole.rank("host") + whole.rank("gpu")
        one = x.slice_mesh(host=1, gpu=1)
        with pytest.warns(UserWarning, match="slow"):
            everybody = one.to_mesh(whole)
        with pytest.raises(ValueError, match="destination mesh does not have dimensions"):
            x.to_mesh(whole.slice(host=0))
        with pytest.raises(ValueError, match="has a different length"):
            x.to_mesh(whole.split(gpu=("y", "z"), z=1).rename(y="x", z="gpu"))
        with pytest.raises(TypeError, match="does not have dimension labeled"):
            x.slice_mesh(rack=0)
        tree = monarch.to_mesh(monarch.slice_mesh({"x": x}, gpu=0), whole.slice(gpu=1))
    assert {v.item() for v in everywhere(everybody).values()} == {11}
    assert [monarch.inspect(tree["x"], host=h).item() for h in range(2)] == [0, 10]


def test_a_proc_mesh_is_a_destination(square):
    part = square.slice(gpu=1)
    with square.activate():
        f = 10 * square.rank_tensor("gpu") + square.rank_tensor("host")
        g = monarch.slice_mesh(f, gpu=1).to_mesh(part)
    with part.activate():
        g = g * 10
    assert [monarch.inspect(g, host=h).item() for h in range(2)] == [100, 110]


def test_permuting_moves_do_not_block_each_other(square):
    whole = square._tensors("t")
    turned = whole.rename(host="gpu_", gpu="host").rename(gpu_="gpu")
    big = 1 << 18
    with whole.activate():
        x = torch.zeros(big) + whole.rank("host") * 2 + whole.rank("gpu")
        for _ in range(4):
            y = x.to_mesh(turned)
            x = y.to_mesh(whole)
    assert [everywhere(x)[h, g][0].item() for h in range(2) for g in range(2)] == [0, 1, 2, 3]


def test_the_copy_lands_on_the_asked_stream(square):
    other = monarch.Stream("other")
    with square.activate():
        x = torch.ones(3)
        y = x.to_mesh(square, stream=other)
        x.add_(1)
        with pytest.raises(TypeError, match="WRONG_STREAM"):
            y + 1
        with other.activate():
            z = y + 1
            assert monarch.inspect(z).tolist() == [2, 2, 2]
    assert y.stream is other
