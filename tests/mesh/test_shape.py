"""`Shape`, `Region` and `ShapeExt.slice` against brute force over coordinates."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh import Extent, Point, Region, Shape, ShapeExt, Slice

sizes_ = st.lists(st.integers(1, 5), max_size=4)


def shape_of(sizes: list[int]) -> Shape:
    return Shape([f"d{i}" for i in range(len(sizes))], Slice.new_row_major(sizes))


@given(sizes_, st.data())
def test_slice_picks_the_ranks_whose_coordinates_are_selected(sizes: list[int], data: st.DataObject) -> None:
    shape = shape_of(sizes)
    selectors: dict[str, int | slice] = {}
    picked: list[list[int]] = []
    for label, n in shape.extent.items():
        kind = data.draw(st.sampled_from(["none", "int", "slice"]))
        if kind == "int":
            selectors[label] = i = data.draw(st.integers(0, n - 1))
            picked.append([i])
        elif kind == "slice":
            selectors[label] = s = data.draw(st.slices(n).filter(lambda s: (s.step or 1) > 0))
            picked.append(list(range(n))[s])
        else:
            picked.append(list(range(n)))
    if not all(picked):
        with pytest.raises(ValueError, match="empty range"):
            ShapeExt.slice(shape, **selectors)
        return
    out = ShapeExt.slice(shape, **selectors)
    assert out.ranks() == [shape.ndslice.nditem(c) for c in itertools.product(*picked)]
    kept = [d for d in shape.labels if not isinstance(selectors.get(d, slice(None)), int)]
    assert out.labels == kept


@given(sizes_)
def test_coordinates_and_index_are_inverse(sizes: list[int]) -> None:
    shape = shape_of(sizes)
    for rank in shape.ranks():
        assert shape.index(**shape.coordinates(rank)).ranks() == [rank]


def test_at_drops_a_dimension() -> None:
    shape = Shape(["batch", "height", "width"], Slice.new_row_major([2, 3, 4]))
    assert shape.at("batch", 1).ndslice == Slice(offset=12, sizes=[3, 4], strides=[4, 1])
    assert shape.at("height", 2).ndslice == Slice(offset=8, sizes=[2, 4], strides=[12, 1])


def test_select_keeps_the_dimension() -> None:
    shape = Shape(["rows", "cols"], Slice.new_row_major([4, 6]))
    assert shape.select("cols", slice(0, 6, 2)).ndslice == Slice(offset=0, sizes=[4, 3], strides=[6, 2])
    assert shape.select("rows", slice(-1, None)).ranks() == shape.at("rows", 3).ranks()


grid = Shape(["y", "x"], Slice.new_row_major([2, 3]))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: Shape(["a"], Slice.new_row_major([2, 2])), ValueError),
        (lambda: Shape(["a", "a"], Slice.new_row_major([2, 2])), ValueError),
        (lambda: grid.at("z", 0), ValueError),
        (lambda: grid.at("y", 2), ValueError),
        (lambda: grid.at("y", -1), OverflowError),
        (lambda: grid.select("z", slice(0, 1)), ValueError),
        (lambda: grid.select("x", slice(2, 2)), ValueError),
        (lambda: grid.select("x", slice(None, None, -1)), ValueError),
        (lambda: grid.coordinates(6), ValueError),
        (lambda: grid.index(z=0), ValueError),
        (lambda: ShapeExt.slice(grid, z=0), TypeError),
        (lambda: ShapeExt.slice(grid, x="a"), TypeError),  # type: ignore[arg-type]
        (lambda: ShapeExt.slice(grid, x=3), IndexError),
        (lambda: ShapeExt.slice(grid, x=-1), IndexError),
        (lambda: ShapeExt.slice(grid, x=slice(3, 9)), ValueError),
        (lambda: ShapeExt.slice(grid, x=slice(None, None, -1)), ValueError),
    ],
)
def test_errors(wrong: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        wrong()


def test_error_texts() -> None:
    with pytest.raises(ValueError, match=r"^empty range"):
        grid.select("x", slice(2, 2))
    with pytest.raises(TypeError, match=r"^Shape does not have dimension labeled 'z'"):
        ShapeExt.slice(grid, z=0)
    with pytest.raises(IndexError, match=r"^index out of range"):
        ShapeExt.slice(grid, x=3)


def test_text() -> None:
    assert str(grid) == "{y=2,x=3}"
    assert repr(grid) == ('Shape { labels: ["y", "x"], slice: Slice { offset: 0, sizes: [2, 3], strides: [3, 1] } }')


def test_is_a_value() -> None:
    again = pickle.loads(pickle.dumps(grid))
    assert again == grid
    assert {grid: 1}[again] == 1
    assert grid != Shape(["x", "y"], grid.ndslice)
    assert grid != grid.region


def test_unity_holds_rank_zero() -> None:
    assert Shape.unity().ranks() == [0]
    assert len(Shape.unity()) == 1
    assert Shape.unity().extent == Extent([], [])


def test_region_places_ranks_of_the_larger_space() -> None:
    region = grid.select("x", slice(1, 3)).region
    assert region.labels == ["y", "x"]
    assert list(region.slice()) == [1, 2, 4, 5]
    assert region.as_shape().region == region
    assert region.point_of_base_rank(4) == Point(2, Extent(["y", "x"], [2, 2]))
    with pytest.raises(ValueError, match="is not in"):
        region.point_of_base_rank(3)
    assert pickle.loads(pickle.dumps(region)) == region
    assert region != Region(["y", "z"], region.slice())
