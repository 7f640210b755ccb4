"""`ValueMesh`: one value per rank, kept as runs so that equal neighbours cost nothing."""

from __future__ import annotations

import itertools
import pprint
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from monarch.mesh.extent import Point
from monarch.mesh.shape import Shape
from monarch.mesh.slices import Slice, row_major_strides
from monarch.mesh.trait import MeshTrait

R = TypeVar("R", covariant=True)
Run = tuple[int, int, Any]  #: ranks start..stop-1 and what they share: a payload, or the value itself

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_NOTHING: Any = object()


def merge_runs(runs: Iterable[Run]) -> list[Run]:
    """Sorts runs `(start, stop, payload)` by rank and joins adjacent ones whose payloads are equal.

    Runs may arrive in any order and leave gaps; empty ones are dropped. Payloads are compared with `==`, so
    they should be encoded values (bytes), for which equal means the same value.

    Raises:
        ValueError: two runs hold the same rank (`Overlapping ranks detected`).
    """
    merged: list[Run] = []
    for start, stop, payload in sorted((r for r in runs if r[0] < r[1]), key=lambda r: r[0]):
        if merged:
            last_start, last_stop, last_payload = merged[-1]
            if start < last_stop:
                raise ValueError(f"Overlapping ranks detected: {start}..{stop} begins before {last_stop}")
            if start == last_stop and (payload is last_payload or payload == last_payload):
                merged[-1] = (last_start, stop, last_payload)
                continue
        merged.append((start, stop, payload))
    return merged


class _Runs:
    """Values of ranks 0..n-1 as sorted runs without gaps, decoded when first read; views share it."""

    __slots__ = ("_by_rank", "_by_run", "_decode", "_payloads", "_stops")

    def __init__(self, n: int, runs: Iterable[Run], decode: Callable[[Any], Any] | None) -> None:
        self._stops: list[int] = []
        self._payloads: list[Any] = []
        self._decode = decode  # None: payloads are the values
        self._by_run: dict[int, Any] = {}
        self._by_rank: dict[int, Any] = {}
        end = 0
        for start, stop, payload in runs:
            if start != end or stop <= start:
                raise ValueError(f"runs must be sorted and without gaps: {start}..{stop} follows {end}")
            self._stops.append(stop)
            self._payloads.append(payload)
            end = stop
        if end != n:
            raise _wrong_count(n, end)

    def value(self, rank: int) -> Any:
        """The value of one rank; always the same object once it has been decoded."""
        return self._read(bisect_right(self._stops, rank), rank)

    def values(self) -> list[Any]:
        """All values in rank order, at the cost of one list slot where a run shares its value."""
        out: list[Any] = []
        start = 0
        for run, stop in enumerate(self._stops):
            first = self._read(run, start)
            if self._shared(run):
                out.extend(itertools.repeat(first, stop - start))
            else:
                out.append(first)
                out.extend(self._read(run, rank) for rank in range(start + 1, stop))
            start = stop
        return out

    def runs(self) -> list[Run]:
        """Runs of ranks that hold the same object."""
        out: list[Run] = []
        start = 0
        for run, stop in enumerate(self._stops):
            first = self._read(run, start)
            if self._shared(run):
                out.append((start, stop, first))
            else:
                out.extend((rank, rank + 1, self._read(run, rank)) for rank in range(start, stop))
            start = stop
        return out

    def _shared(self, run: int) -> bool:
        return self._decode is None or run in self._by_run

    def _read(self, run: int, rank: int) -> Any:
        if self._decode is None:
            return self._payloads[run]
        value = self._by_run.get(run, _NOTHING)
        if value is _NOTHING:
            value = self._by_rank.get(rank, _NOTHING)
        if value is not _NOTHING:
            return value
        payload = self._payloads[run]
        if payload is _NOTHING:  # another thread has just decoded it for the whole run
            return self._by_run[run]
        value = self._decode(payload)
        # setdefault: threads that race to decode all go on with the object of the first.
        alone = self._stops[run] - (self._stops[run - 1] if run else 0) == 1
        if alone or _immutable(value):
            value = self._by_run.setdefault(run, value)
            self._payloads[run] = _NOTHING  # only after the value is there, see above
            return value
        return self._by_rank.setdefault(rank, value)


class ValueMesh(MeshTrait, Generic[R]):
    """One value for each rank of a shape: what `call()` returns.

    Iterating gives `(point, value)` pairs in rank order; points are dense ranks in this mesh's extent.
    There is no `mesh[...]`; use `item(**coords)` or `get(rank)`. Slicing and reshaping share the values.

    Args:
        shape: labels and ranks.
        values: a list with one value per rank, in row-major order.

    Raises:
        TypeError: `values` is not a list.
        ValueError: there are more or fewer values than ranks.
    """

    __slots__ = ("_runs", "_shape", "_space")

    _shape: Shape
    _runs: _Runs  # values by position in _space
    _space: Slice  # the ranks this mesh was made for; a slice of the mesh has fewer

    def __init__(self, shape: Shape, values: list[R]) -> None:
        if not isinstance(values, list):
            raise TypeError(f"values must be a list, not {type(values).__name__}")
        if len(values) != len(shape):
            raise _wrong_count(len(shape), len(values))
        self._shape = shape
        self._space = shape.ndslice
        self._runs = _Runs(len(shape), _runs_of_same(values), None)

    @classmethod
    def from_indexed(cls, shape: Shape, pairs: Iterable[tuple[int, R]]) -> ValueMesh[R]:
        """A mesh from `(dense rank, value)` pairs in any order; of several for a rank the last one counts.

        Raises:
            ValueError: a rank is missing or outside the shape.
        """
        n = len(shape)
        by_rank = dict(pairs)
        inside = sum(1 for rank in by_rank if 0 <= rank < n)
        if inside != n or len(by_rank) != n:
            raise _wrong_count(n, inside if inside != n else len(by_rank))
        return cls(shape, [by_rank[rank] for rank in range(n)])

    @classmethod
    def _from_encoded(cls, shape: Shape, runs: Iterable[Run], decode: Callable[[Any], Any]) -> ValueMesh[R]:
        """A mesh from sorted runs `(start, stop, payload)` over dense ranks, as `merge_runs` makes them.

        `decode(payload)` is called when a rank is first read, and raises there if it must. Ranks of one run
        get distinct objects, as if each had sent its own, unless the value is immutable.
        """
        return cls._over(shape, _Runs(len(shape), runs, decode), shape.ndslice)

    @classmethod
    def _over(cls, shape: Shape, runs: _Runs, space: Slice) -> ValueMesh[R]:
        mesh = cls.__new__(cls)
        mesh._shape, mesh._runs, mesh._space = shape, runs, space
        return mesh

    def __setattr__(self, name: str, value: object) -> None:
        # MeshTrait has no __slots__, so instances do have a dict; keep a mistyped name from landing in it.
        if name not in ValueMesh.__slots__:
            raise AttributeError(f"cannot set attribute {name!r} of a ValueMesh")
        super().__setattr__(name, value)

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Sequence[str]:
        return self._shape.labels

    def _new_with_shape(self, shape: Shape) -> ValueMesh[R]:
        return self._over(shape, self._runs, self._space)

    def _positions(self) -> Iterable[int] | None:
        """Where the values of this mesh lie in `_runs`, in rank order; None for all of them in order."""
        mine, space = self._ndslice, self._space
        if mine is space or (len(mine) == len(space) and _dense(mine) and _dense(space)):
            return None
        return map(space.index, mine)

    def _value(self, rank: int) -> R:
        value: R = self._runs.value(self._space.index(self._ndslice.get(rank)))
        return value

    def values(self) -> list[R]:
        """All values in rank order (a fresh list)."""
        positions = self._positions()
        return self._runs.values() if positions is None else [self._runs.value(p) for p in positions]

    def items(self) -> Iterator[tuple[Point, R]]:
        """`(point, value)` pairs in rank order."""
        extent = self.extent
        for rank in range(len(self)):
            yield Point(rank, extent), self._value(rank)

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def item(self, **coords: int) -> R:
        """The value at one index for each dimension; `item()` for a mesh of zero dimensions.

        Raises:
            KeyError: a dimension is missing or unknown.
            IndexError: an index is negative or beyond its dimension.
        """
        labels = self._labels
        extra = [label for label in coords if label not in labels]
        if extra:
            raise KeyError(f"item has extra dimensions: {extra}")
        missing = [label for label in labels if label not in coords]
        if missing:
            raise KeyError(f"item is missing dimensions: {missing}")
        rank = self._ndslice.nditem([coords[label] for label in labels])
        value: R = self._runs.value(self._space.index(rank))
        return value

    def get(self, rank: int) -> R:
        """The value of a dense rank `0 .. len(self) - 1`; ValueError when it is out of range."""
        if not 0 <= rank < len(self):
            raise ValueError(f"rank {rank} out of range for a mesh of {len(self)}")
        return self._value(rank)

    def __repr__(self) -> str:
        return f"ValueMesh({self.extent}):\n{textwrap.indent(pprint.pformat(tuple(self.items())), '  ')}"

    def __reduce__(self) -> tuple[object, ...]:
        positions = self._positions()
        if positions is None:
            runs = self._runs.runs()
        else:
            runs = list(_runs_of_same(self._runs.value(p) for p in positions))
        return _rebuild, (self._shape, runs)


def _rebuild(shape: Shape, runs: list[Run]) -> ValueMesh[Any]:
    return ValueMesh._over(shape, _Runs(len(shape), runs, None), shape.ndslice)


def _wrong_count(expected: int, actual: int) -> ValueError:
    return ValueError(f"expected {expected} ranks, but contains {actual}")


def _dense(ranks: Slice) -> bool:
    return ranks._strides == row_major_strides(ranks._sizes)


def _immutable(value: object) -> bool:
    # Exact types: a subclass of int or tuple may carry state.
    return type(value) in _ATOMS or (type(value) is tuple and all(map(_immutable, value)))


def _runs_of_same(values: Iterable[Any]) -> Iterator[Run]:
    """Runs of adjacent values that are the same object."""
    start, stop, last = 0, 0, _NOTHING
    for value in values:
        if value is not last and stop:
            yield start, stop, last
            start = stop
        last, stop = value, stop + 1
    if stop:
        yield start, stop, last
