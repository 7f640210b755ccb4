"""`ValueMesh`: access, views, pickling, lazy decoding and sharing; and `merge_runs`."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.mesh import Extent, Point, Shape, Slice, ValueMesh, merge_runs


def shape(**sizes: int) -> Shape:
    return Shape(list(sizes), Slice.new_row_major(list(sizes.values())))


def grid() -> ValueMesh[str]:
    return ValueMesh(shape(y=2, x=3), ["00", "01", "02", "10", "11", "12"])


def test_values_in_rank_order_with_dense_points() -> None:
    e = Extent(["y", "x"], [2, 3])
    vm = grid()
    assert vm.values() == ["00", "01", "02", "10", "11", "12"]
    assert list(vm) == list(vm.items()) == [(Point(r, e), v) for r, v in enumerate(vm.values())]
    assert dict(vm.items())[Point(4, e)] == "11"
    assert (len(vm), vm.size(), vm.sizes, vm.extent) == (6, 6, {"y": 2, "x": 3}, e)


def test_item_and_get() -> None:
    vm = grid()
    assert (vm.item(y=1, x=2), vm.item(x=0, y=1), vm.get(4)) == ("12", "10", "11")
    assert vm.slice(y=0, x=1).item() == "01"


def test_views_follow_the_values() -> None:
    vm = grid()
    cols = vm.slice(x=slice(1, 3))
    assert (cols.values(), cols.item(y=1, x=0), cols.get(2)) == (["01", "02", "11", "12"], "11", "11")
    assert [p.rank for p, _ in cols] == [0, 1, 2, 3]
    assert cols.slice(x=1).values() == ["02", "12"]
    assert vm.slice(x=1).flatten("n").slice(n=1).item() == "11"
    assert vm.flatten("n").values() == vm.values()
    assert vm.flatten("n").split(n=("a", "b"), b=2).item(a=2, b=0) == "11"
    assert vm.rename(x="col").item(y=0, col=2) == "02"


def test_a_shape_with_offset_and_strides_lists_values_by_position() -> None:
    vm = ValueMesh(Shape(["y", "x"], Slice(offset=7, sizes=[2, 2], strides=[1, 10])), ["a", "b", "c", "d"])
    assert (vm.values(), vm.get(1), vm.item(y=1, x=0)) == (["a", "b", "c", "d"], "b", "c")
    assert vm.slice(x=1).values() == ["b", "d"]


@given(st.data())
def test_pickles_by_shape_and_values(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.sampled_from([None, 1, "a", [1]]), min_size=12, max_size=12))
    vm = ValueMesh(shape(a=3, b=4), values)
    for view in (vm, vm.slice(b=slice(1, 4, 2)), vm.slice(a=1), vm.slice(a=1, b=2), vm.flatten("n")):
        again = pickle.loads(pickle.dumps(view))
        assert type(again) is ValueMesh
        assert (again.extent, again.values()) == (view.extent, view.values())
        assert again.flatten("n").values() == view.values() if len(view) in (1, 12) else True


def test_from_indexed_takes_any_order_and_the_last_write() -> None:
    vm = ValueMesh.from_indexed(shape(x=3), [(2, "c"), (0, "z"), (1, "b"), (0, "a")])
    assert vm.values() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda: ValueMesh(shape(x=2), (1, 2)), TypeError, "list"),  # type: ignore[arg-type]
        (lambda: ValueMesh(shape(x=2), [1]), ValueError, "expected 2 ranks, but contains 1"),
        (lambda: ValueMesh(shape(x=2), [1, 2, 3]), ValueError, "expected 2 ranks, but contains 3"),
        (
            lambda: ValueMesh.from_indexed(shape(x=2), [(0, 1)]),
            ValueError,
            "expected 2 ranks, but contains 1",
        ),
        (
            lambda: ValueMesh.from_indexed(shape(x=2), [(0, 1), (1, 1), (2, 1)]),
            ValueError,
            "expected 2 ranks, but contains 3",
        ),
        (
            lambda: ValueMesh.from_indexed(shape(x=2), [(0, 1), (9, 1)]),
            ValueError,
            "expected 2 ranks, but contains 1",
        ),
        (lambda: ValueMesh._from_encoded(shape(x=2), [(0, 1, b"")], bytes), ValueError, "expected 2 ranks"),
        (lambda: ValueMesh._from_encoded(shape(x=2), [(1, 2, b"")], bytes), ValueError, "without gaps"),
        (lambda: grid().item(y=0), KeyError, "missing dimensions"),
        (lambda: grid().item(y=0, x=0, z=0), KeyError, r"item has extra dimensions: \['z'\]"),
        (lambda: grid().item(y=0, x=3), IndexError, "out of range"),
        (lambda: grid().item(y=0, x=-1), IndexError, "out of range"),
        (lambda: grid().get(6), ValueError, "out of range"),
        (lambda: grid().get(-1), ValueError, "out of range"),
        (lambda: grid()[0], TypeError, "not subscriptable"),  # type: ignore[index]
        (lambda: setattr(grid(), "name", 1), AttributeError, "name"),
        (lambda: grid().slice(z=0), TypeError, "dimension labeled"),
    ],
)
def test_errors(wrong: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wrong()


def test_text() -> None:
    assert repr(grid().slice(x=slice(0, 2)).rename(y="h")) == (
        "ValueMesh({h: 2, x: 2}):\n"
        "  (({'h': 0/2, 'x': 0/2}, '00'),\n"
        "   ({'h': 0/2, 'x': 1/2}, '01'),\n"
        "   ({'h': 1/2, 'x': 0/2}, '10'),\n"
        "   ({'h': 1/2, 'x': 1/2}, '11'))"
    )
    assert str(grid().slice(x=0, y=0)) == "ValueMesh({}):\n  (({}, '00'),)"


def test_equality_is_identity_and_the_class_takes_a_subscript() -> None:
    vm = grid()
    same: object = grid()
    assert vm == vm
    assert vm != same
    assert ValueMesh[int](shape(x=1), [1]).item(x=0) == 1


class Decoder:
    """Unpickles, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, payload: bytes) -> Any:
        self.calls += 1
        return pickle.loads(payload)


def encoded(n: int, value: object, decode: Callable[[Any], Any]) -> ValueMesh[Any]:
    return ValueMesh._from_encoded(shape(x=n), [(0, n, pickle.dumps(value))], decode)


def test_nothing_is_decoded_before_it_is_read() -> None:
    decode = Decoder()
    vm = encoded(4, [1], decode).slice(x=slice(1, 3)).rename(x="z")
    assert decode.calls == 0
    vm.get(0)
    assert decode.calls == 1


def test_ranks_of_one_run_get_distinct_mutable_objects_that_stay_the_same() -> None:
    vm = encoded(3, [1], Decoder())
    first = vm.values()
    assert first == [[1], [1], [1]]
    assert len({id(v) for v in first}) == 3
    assert all(a is b for a, b in zip(first, vm.values(), strict=True))
    assert vm.slice(x=1).item() is first[1]


@pytest.mark.parametrize("value", [None, True, 7, 1.5, 2j, "text", b"bytes", (), (1, ("a", None))])
def test_immutable_values_are_decoded_once_for_a_run(value: object) -> None:
    decode = Decoder()
    vm = encoded(3, value, decode)
    assert vm.values() == [value] * 3
    assert all(v is vm.get(0) for v in vm.values())
    assert decode.calls == 1


def test_a_tuple_that_holds_a_list_is_not_shared() -> None:
    a, b = encoded(2, ([],), Decoder()).values()
    assert a is not b
    assert a[0] is not b[0]


def test_an_error_in_decoding_surfaces_at_that_value() -> None:
    vm: ValueMesh[str] = ValueMesh._from_encoded(
        shape(x=3), [(0, 1, b"a"), (1, 2, b"\xff"), (2, 3, b"c")], bytes.decode
    )
    assert (vm.get(0), vm.item(x=2), vm.slice(x=slice(0, 3, 2)).values()) == ("a", "c", ["a", "c"])
    for _ in range(2):
        with pytest.raises(UnicodeDecodeError):
            vm.get(1)
    with pytest.raises(UnicodeDecodeError):
        vm.values()


def test_a_million_equal_results_cost_a_few_objects() -> None:
    n = 1_000_000
    tracemalloc.start()
    try:
        vm = encoded(n, None, pickle.loads)
        assert vm.get(n - 1) is None
        half = vm.slice(x=slice(0, n, 2))
        assert half.item(x=n // 2 - 1) is None
        again = pickle.loads(pickle.dumps(vm))
        assert (len(again), again.get(n // 2)) == (n, None)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert len(pickle.dumps(vm)) < 1000
    assert vm.values() == [None] * n


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12), st.randoms(use_true_random=False))
def test_merging_joins_equal_neighbours_in_any_arrival_order(payloads: list[bytes], random: Any) -> None:
    singles = [(i, i + 1, p) for i, p in enumerate(payloads)]
    random.shuffle(singles)
    merged = merge_runs(singles)
    assert [p for start, stop, p in merged for _ in range(start, stop)] == payloads
    assert [start for start, _, _ in merged[1:]] == [stop for _, stop, _ in merged[:-1]]
    assert all(a[2] != b[2] for a, b in itertools.pairwise(merged))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.sampled_from([b"a", b"b"])), max_size=6))
def test_merging_refuses_exactly_the_overlaps(parts: list[tuple[int, int, bytes]]) -> None:
    runs = [(start, start + n, p) for start, n, p in parts]
    ranks = [r for start, stop, _ in runs for r in range(start, stop)]
    if len(set(ranks)) != len(ranks):
        with pytest.raises(ValueError, match="Overlapping ranks detected"):
            merge_runs(runs)
        return
    by_rank = {r: p for start, stop, p in runs for r in range(start, stop)}
    assert {r: p for start, stop, p in merge_runs(runs) for r in range(start, stop)} == by_rank


def test_merge_examples() -> None:
    same = [(r, r + 1, b"v") for r in (3, 1, 9, 0, 2, 8, 4, 7, 5, 6)]
    assert merge_runs(same) == [(0, 10, b"v")]
    odd = [(r, r + 1, b"w" if r == 5 else b"v") for r in range(10)]
    assert merge_runs(odd) == [(0, 5, b"v"), (5, 6, b"w"), (6, 10, b"v")]
    assert merge_runs([]) == []
    assert merge_runs([(4, 6, b"v"), (0, 2, b"v")]) == [(0, 2, b"v"), (4, 6, b"v")]
