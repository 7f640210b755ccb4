"""`Slice` against brute force over its definition, and its error cases."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from monarch.mesh import NDSlice, Slice, iter_ranks


def brute_ranks(offset: int, sizes: list[int], strides: list[int]) -> list[int]:
    boxes = itertools.product(*map(range, sizes))
    return [offset + sum(c * s for c, s in zip(box, strides, strict=True)) for box in boxes]


numbers = st.tuples(
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 14)), max_size=4),
).map(lambda t: (t[0], [n for n, _ in t[1]], [s for _, s in t[1]]))


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    offset, sizes, strides = draw(numbers)
    ranks = brute_ranks(offset, sizes, strides)
    assume(len(set(ranks)) == len(ranks))
    return Slice(offset=offset, sizes=sizes, strides=strides)


@given(numbers)
def test_accepts_exactly_the_strides_that_give_distinct_ranks(
    parts: tuple[int, list[int], list[int]],
) -> None:
    offset, sizes, strides = parts
    ranks = brute_ranks(offset, sizes, strides)
    if len(set(ranks)) == len(ranks):
        assert list(Slice(offset=offset, sizes=sizes, strides=strides)) == ranks
    else:
        with pytest.raises(ValueError, match="same rank"):
            Slice(offset=offset, sizes=sizes, strides=strides)


@given(slices())
def test_positions_ranks_and_coordinates_agree(s: Slice) -> None:
    ranks = brute_ranks(s.offset, s.sizes, s.strides)
    assert len(s) == len(ranks) == math.prod(s.sizes)
    for i, coords in enumerate(itertools.product(*map(range, s.sizes))):
        assert s[i] == s.get(i) == s.nditem(coords) == ranks[i]
        assert s.index(ranks[i]) == i
        assert s.coordinates(ranks[i]) == list(coords)
    assert s[1:4] == tuple(ranks[1:4])


@given(slices())
def test_holds_no_other_ranks(s: Slice) -> None:
    ranks = set(s)
    for rank in range(-1, 200):
        assert (rank in s) == (rank in ranks)
        if rank not in ranks:
            with pytest.raises(ValueError, match="is not in"):
                s.index(rank)
            with pytest.raises(ValueError, match="is not in"):
                s.coordinates(rank)
    assert "a" not in s


@given(slices())
def test_is_a_value(s: Slice) -> None:
    again = pickle.loads(pickle.dumps(s))
    assert again == s
    assert hash(again) == hash(s)
    assert s != Slice(offset=s.offset + 1, sizes=s.sizes, strides=s.strides)
    assert s != list(s)


@given(st.lists(st.integers(0, 30)))
def test_from_list_covers_the_ranks_in_order(ranks: list[int]) -> None:
    cover = Slice.from_list(ranks)
    assert [r for s in cover for r in s] == ranks


def test_from_list_finds_arithmetic_runs() -> None:
    assert Slice.from_list([1, 3, 5]) == [Slice(offset=1, sizes=[3], strides=[2])]
    assert [list(s) for s in Slice.from_list([1, 2, 4, 5, 6])] == [[1, 2], [4, 5, 6]]
    assert Slice.from_list([]) == []
    assert Slice.from_list([7]) == [Slice(offset=7, sizes=[1], strides=[1])]


def test_new_row_major_is_dense() -> None:
    s = Slice.new_row_major([2, 3, 4])
    assert s.strides == [12, 4, 1]
    assert list(s) == list(range(24))


def test_zero_dimensions_hold_the_offset_alone() -> None:
    s = Slice(offset=5, sizes=[], strides=[])
    assert (list(s), len(s), s.ndim, s[0], s.index(5), s.nditem([]), 5 in s) == ([5], 1, 0, 5, 0, 5, True)


def test_interleaved_strides_are_accepted() -> None:
    assert list(Slice(offset=0, sizes=[2, 2], strides=[3, 2])) == [0, 2, 3, 5]


def test_overlap_check_is_fast_for_big_interleaved_slices() -> None:
    s = Slice(offset=0, sizes=[10**6, 10**6], strides=[1000003, 1000001])
    assert s.index(s.get(123456789)) == 123456789


def test_text() -> None:
    s = Slice(offset=0, sizes=[2, 3], strides=[3, 1])
    assert repr(s) == str(s) == "Slice { offset: 0, sizes: [2, 3], strides: [3, 1] }"
    assert NDSlice is Slice


def test_changing_a_returned_list_does_not_change_the_slice() -> None:
    s = Slice.new_row_major([2, 3])
    s.sizes.append(1)
    s.strides.clear()
    assert s == Slice.new_row_major([2, 3])


grid = Slice.new_row_major([2, 3])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: Slice(offset=0, sizes=[2], strides=[1, 1]), ValueError),
        (lambda: Slice(offset=0, sizes=[2, 2], strides=[1, 1]), ValueError),
        (lambda: Slice(offset=0, sizes=[2], strides=[0]), ValueError),
        (lambda: Slice(offset=-1, sizes=[2], strides=[1]), ValueError),
        (lambda: Slice(offset=0, sizes=[-2], strides=[1]), ValueError),
        (lambda: Slice(offset=0, sizes=[2], strides=[-1]), ValueError),
        (lambda: grid[6], IndexError),
        (lambda: grid[-1], TypeError),
        (lambda: grid.get(6), ValueError),
        (lambda: grid.get(-1), ValueError),
        (lambda: grid.nditem([1]), IndexError),
        (lambda: grid.nditem([0, 3]), IndexError),
        (lambda: grid.nditem([0, -1]), IndexError),
    ],
)
def test_errors(wrong: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        wrong()


def test_iter_ranks_skips_what_it_has_seen() -> None:
    one, two = Slice.new_row_major([4]), Slice(offset=0, sizes=[3], strides=[3])
    assert list(iter_ranks(one)) == [0, 1, 2, 3]
    assert list(iter_ranks([one, two])) == [0, 1, 2, 3, 6]
