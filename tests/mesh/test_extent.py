"""`Extent` and `Point` as read-only, hashable mappings."""

from __future__ import annotations

import pickle
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh import Extent, Point, Region, Slice

e = Extent(["hosts", "gpus"], [2, 3])
extents = st.lists(st.integers(1, 5), max_size=4).map(lambda n: Extent("abcd"[: len(n)], n))


def test_extent_is_a_full_mapping_in_order() -> None:
    assert isinstance(e, Mapping)
    assert (e.labels, e.sizes, e.nelements, len(e)) == (["hosts", "gpus"], [2, 3], 6, 2)
    assert (list(e), list(e.values()), dict(e)) == (["hosts", "gpus"], [2, 3], {"hosts": 2, "gpus": 3})
    assert (e["gpus"], e.get("gpus"), e.get("x"), "x" in e, "gpus" in e) == (3, 3, None, False, True)


def test_extent_is_a_value_that_equals_no_dict() -> None:
    assert pickle.loads(pickle.dumps(e)) == e
    assert {e: 1}[Extent(["hosts", "gpus"], [2, 3])] == 1
    assert e != Extent(["gpus", "hosts"], [3, 2])
    assert e != {"hosts": 2, "gpus": 3}


def test_extent_text() -> None:
    assert repr(e) == str(e) == "{hosts: 2, gpus: 3}"
    assert str(Extent([], [])) == "{}"


def test_extent_region_is_dense() -> None:
    assert e.region == Region(["hosts", "gpus"], Slice.new_row_major([2, 3]))


def test_zero_dimensions_have_one_point() -> None:
    assert Extent([], []).nelements == 1
    origin = Point(0, Extent([], []))
    assert (dict(origin), len(origin), str(origin)) == ({}, 0, "{}")


@pytest.mark.parametrize("error", [KeyError, ValueError])
@pytest.mark.parametrize("read", [lambda: e["x"], lambda: Point(0, e)["x"], lambda: Point(0, e).size("x")])
def test_missing_label_is_a_key_error_and_a_value_error(read: Callable[[], int], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^Dimension 'x' not found$"):
        read()


@pytest.mark.parametrize(("labels", "sizes"), [(["a"], []), (["a", "a"], [1, 1]), (["a"], [-1])])
def test_wrong_extents_are_refused(labels: list[str], sizes: list[int]) -> None:
    with pytest.raises(ValueError):
        Extent(labels, sizes)


@given(extents)
def test_points_are_row_major(extent: Extent) -> None:
    dense = extent.region.slice()
    for rank in range(extent.nelements):
        assert list(Point(rank, extent).values()) == dense.coordinates(rank)


def test_point_is_a_read_only_mapping() -> None:
    p = Point(4, e)
    assert isinstance(p, Mapping)
    assert (p.rank, p.extent, p.size("gpus"), len(p)) == (4, e, 3, 2)
    assert (dict(p), list(p.keys()), list(p.items())) == (
        {"hosts": 1, "gpus": 1},
        ["hosts", "gpus"],
        [("hosts", 1), ("gpus", 1)],
    )
    assert dict(**p) == dict(p)
    assert (p.get("x"), "x" in p, "gpus" in p) == (None, False, True)
    anything: Any = p
    for name in ("rank", "extent", "other"):
        with pytest.raises(AttributeError):
            setattr(anything, name, 1)


def test_point_is_a_value_that_equals_no_dict() -> None:
    p = Point(4, e)
    assert pickle.loads(pickle.dumps(p)) == p
    assert {p: 1}[Point(4, e)] == 1
    assert p != Point(4, Extent(["a", "b"], [2, 3]))
    assert p != Point(3, e)
    assert p != dict(p)


def test_point_text() -> None:
    assert repr(Point(1, Extent(["hosts", "gpus"], [1, 2]))) == "{'hosts': 0/1, 'gpus': 1/2}"


@pytest.mark.parametrize("rank", [-1, 6])
def test_point_outside_its_extent_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="outside the extent"):
        Point(rank, e)


def test_points_are_cheap() -> None:
    seconds = min(timeit.repeat(lambda: Point(4, e), number=1000, repeat=20)) / 1000
    assert seconds < 20e-6  # measured 0.15 us; the margin is for a busy machine
    assert not hasattr(Point(4, e), "__dict__")
