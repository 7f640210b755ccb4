"""`MeshTrait` operations, on a user's own mesh class, against brute force over coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh import Extent, MeshTrait, Shape, Slice


class Ranks(MeshTrait):
    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @property
    def _ndslice(self) -> Slice:
        return self.shape.ndslice

    @property
    def _labels(self) -> list[str]:
        return self.shape.labels

    def _new_with_shape(self, shape: Shape) -> Ranks:
        return Ranks(shape)

    @property
    def ranks(self) -> list[int]:
        return self.shape.ranks()


def mesh(**sizes: int) -> Ranks:
    return Ranks(Shape(list(sizes), Slice.new_row_major(list(sizes.values()))))


grid = mesh(host=2, gpu=4)


def test_sizes() -> None:
    assert (grid.sizes, grid.extent, len(grid)) == ({"host": 2, "gpu": 4}, Extent(["host", "gpu"], [2, 4]), 8)
    assert (grid.size(), grid.size("gpu"), grid.size(["host", "gpu"]), grid.size([])) == (8, 4, 8, 1)


def test_slice() -> None:
    assert grid.slice(host=1).ranks == [4, 5, 6, 7]
    assert grid.slice(host=0, gpu=slice(1, None, 2)).ranks == [1, 3]
    assert grid.slice(gpu=slice(-2, None)).ranks == [2, 3, 6, 7]
    assert grid.slice(host=slice(0, 1)).sizes == {"host": 1, "gpu": 4}
    assert grid.slice(gpu=slice(1, 4)).slice(gpu=slice(1, 3)).slice(host=0).ranks == [2, 3]
    assert grid.slice() is grid


def test_split() -> None:
    two = grid.split(gpu=("pp", "tp"), tp=2)
    assert two.sizes == {"host": 2, "pp": 2, "tp": 2}
    assert two.slice(tp=1).ranks == [1, 3, 5, 7]
    both = grid.split(host=("dp", "x"), gpu=("y", "z"), x=1, y=4)
    assert both.sizes == {"dp": 2, "x": 1, "y": 4, "z": 1}
    assert grid.split(gpu=("a", "b"), a=2, b=2).sizes == {"host": 2, "a": 2, "b": 2}
    assert mesh(a=1, b=2).split(a=()).sizes == {"b": 2}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 3))
def test_split_keeps_elements_in_order(parts: list[int], step: int, hidden: int) -> None:
    names = [f"p{i}" for i in range(len(parts))]
    whole = mesh(n=math.prod(parts) * step).slice(n=slice(None, None, step))
    sizes: dict[str, Any] = dict(zip(names, parts, strict=True))
    del sizes[names[hidden % len(names)]]
    out = whole.split(n=names, **sizes)
    assert list(out.sizes.values()) == parts
    assert out.ranks == whole.ranks
    for i, coords in enumerate(itertools.product(*map(range, parts))):
        assert out.slice(**dict(zip(names, coords, strict=True))).ranks == [whole.ranks[i]]


def test_rename() -> None:
    assert grid.rename(host="dp").sizes == {"dp": 2, "gpu": 4}
    swapped = grid.rename(host="gpu", gpu="host")
    assert (list(swapped.sizes.items()), swapped.ranks) == ([("gpu", 2), ("host", 4)], list(range(8)))


@given(st.lists(st.integers(1, 4), max_size=4))
def test_flatten_reaches_every_element_of_a_full_mesh(sizes: list[int]) -> None:
    full = mesh(**{f"d{i}": n for i, n in enumerate(sizes)})
    flat = full.flatten("rank")
    assert flat.sizes == {"rank": len(full)}
    assert [flat.slice(rank=i).ranks for i in range(len(full))] == [[r] for r in full.ranks]


def test_flatten_of_parts() -> None:
    assert grid.slice(host=1).flatten("r").ranks == [4, 5, 6, 7]
    assert grid.slice(gpu=1, host=1).flatten("r").ranks == [5]
    assert grid.slice(gpu=1).flatten("r").ranks == [1, 5]  # strided, one dimension
    assert grid.slice(host=slice(1, 2), gpu=slice(0, 4, 2)).flatten("r").ranks == [4, 6]
    assert grid.flatten("r").split(r=("a", "b"), a=2).ranks == grid.ranks


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda: grid.slice(depth=0), TypeError, "Shape does not have dimension labeled"),
        (lambda: grid.slice(host=0).slice(host=0), TypeError, "Shape does not have dimension labeled"),
        (lambda: grid.slice(gpu=4), IndexError, "index out of range"),
        (lambda: grid.slice(gpu=-1), IndexError, "index out of range"),
        (lambda: grid.slice(gpu=slice(2, 2)), ValueError, "empty range"),
        (lambda: grid.split(gpu=("a", "b"), a=3), ValueError, "is not evenly divided by"),
        (lambda: grid.split(gpu=("a", "b"), a=2, b=4), ValueError, "is not evenly divided by"),
        (lambda: grid.split(gpu=("a", "b"), a=0), ValueError, "must be positive"),
        (lambda: grid.split(gpu=()), ValueError, "is not evenly divided by"),
        (lambda: grid.split(gpu=("a", "b")), ValueError, "cannot infer"),
        (lambda: grid.split(gpu=("a", "b"), a=2, q=2), ValueError, "unused size constraints"),
        (lambda: grid.split(gpu="ab"), ValueError, "expected a sequence"),
        (lambda: grid.split(gpu=2), ValueError, "expected a sequence"),
        (lambda: grid.split(nope=("a", "b"), a=2), ValueError, "not an existing dim"),
        (lambda: grid.split(gpu=("host", "b"), b=2), ValueError, "duplicate"),
        (lambda: grid.split(gpu=("a", "a"), a=2), ValueError, "duplicate"),
        (lambda: grid.rename(gpu="host"), ValueError, "duplicate"),
        (lambda: grid.rename(nope="x"), ValueError, "not an existing dim"),
        (lambda: grid.slice(gpu=slice(0, 4, 2)).flatten("r"), ValueError, "cannot flatten sparse mesh"),
        (lambda: grid.slice(gpu=slice(0, 2)).flatten("r"), ValueError, "cannot flatten sparse mesh"),
        (lambda: grid.size("nope"), KeyError, "nope"),
        (lambda: grid.size(["host", "nope"]), KeyError, "nope"),
    ],
)
def test_errors(wrong: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wrong()


def test_a_subclass_may_set_its_own_sizes() -> None:
    m: Any = mesh(a=2)
    m.sizes = "mine"
    m.extent = "too"
    assert (m.sizes, m.extent) == ("mine", "too")


def test_a_subclass_may_have_its_own_getattr() -> None:
    class Handle(Ranks):
        def __getattr__(self, name: str) -> str:
            return f"endpoint {name}"

    h = Handle(grid.shape)
    assert (h.sizes, h.hello) == (grid.sizes, "endpoint hello")
    assert h.slice(host=0).sizes == {"gpu": 4}


def test_the_abstract_class_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MeshTrait()  # type: ignore[abstract]
