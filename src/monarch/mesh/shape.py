"""`Shape` and `Region`: a slice of ranks whose dimensions have labels; and how selectors cut one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import index as as_int

from monarch.mesh.extent import Extent, Point
from monarch.mesh.slices import Slice


class _Labelled:
    """What `Shape` and `Region` share: labels that name the dimensions of a slice, as a value."""

    __slots__ = ("_labels", "_slice")

    def __init__(self, labels: Sequence[str], slice: Slice) -> None:
        self._labels = tuple(labels)
        self._slice = slice
        if len(self._labels) != slice.ndim:
            raise ValueError(f"{len(self._labels)} labels but {slice.ndim} dimensions")
        if len(set(self._labels)) != len(self._labels):
            raise ValueError(f"duplicate dimension labels: {list(self._labels)}")

    @property
    def labels(self) -> list[str]:
        """Dimension labels in order (a fresh list)."""
        return list(self._labels)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not isinstance(other, _Labelled):
            return NotImplemented
        return self._labels == other._labels and self._slice == other._slice

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    def __repr__(self) -> str:
        labels = json.dumps(self.labels, ensure_ascii=False)
        return f"{type(self).__name__} {{ labels: {labels}, slice: {self._slice!r} }}"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._labels, self._slice)


class Shape(_Labelled):
    """A slice of ranks with labelled dimensions. A value: immutable and hashable.

    Args:
        labels: names of the dimensions, outermost first.
        slice: the ranks, with as many dimensions.

    Raises:
        ValueError: labels and dimensions differ in number, or a label repeats.
    """

    __slots__ = ()

    @staticmethod
    def unity() -> Shape:
        """The shape of zero dimensions, which holds rank 0 alone."""
        return Shape([], Slice(offset=0, sizes=[], strides=[]))

    @property
    def ndslice(self) -> Slice:
        """The ranks, without labels."""
        return self._slice

    @property
    def extent(self) -> Extent:
        """Labels and sizes, without the ranks."""
        return Extent(self._labels, self._slice._sizes)

    @property
    def region(self) -> Region:
        """The same labels and ranks as a `Region`."""
        return Region(self._labels, self._slice)

    def at(self, label: str, index: int) -> Shape:
        """The shape at one index of a dimension, which is dropped.

        Raises:
            ValueError: no such dimension, or the index is beyond it.
            OverflowError: the index is negative.
        """
        d = self._dimension(label)
        i = as_int(index)
        if i < 0:
            raise OverflowError(f"index {i} of dimension {label!r} is negative")
        if i >= self._slice._sizes[d]:
            raise ValueError(f"index {i} of dimension {label!r} out of range in {self}")
        return self._cut({d: i})

    def select(self, label: str, selection: slice) -> Shape:
        """The shape within a range of a dimension, which is kept; bounds and steps as for a Python list.

        Raises:
            ValueError: no such dimension, the step is not positive, or nothing is left.
        """
        return self._cut({self._dimension(label): selection})

    def index(self, **indices: int) -> Shape:
        """`at` for several dimensions at once."""
        shape = self
        for label, i in indices.items():
            shape = shape.at(label, i)
        return shape

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank along each dimension; ValueError when the shape does not hold the rank."""
        return dict(zip(self._labels, self._slice.coordinates(rank)))

    def ranks(self) -> list[int]:
        """All ranks, in row-major order."""
        return list(self._slice)

    def __len__(self) -> int:
        return len(self._slice)

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={n}" for label, n in zip(self._labels, self._slice._sizes)) + "}"

    def _dimension(self, label: str) -> int:
        if label not in self._labels:
            raise ValueError(f"label {label!r} not found in {self}")
        return self._labels.index(label)

    def _cut(self, selectors: dict[int, int | slice]) -> Shape:
        """Applies selectors by dimension number; integers must be in range."""
        offset = self._slice.offset
        labels, sizes, strides = [], [], []
        for d, (n, stride) in enumerate(zip(self._slice._sizes, self._slice._strides)):
            selector = selectors.get(d, slice(None))
            if not isinstance(selector, slice):
                offset += selector * stride
                continue
            start, stop, step = selector.indices(n)
            chosen = range(start, stop, step)
            if step < 0:
                raise ValueError(f"step {step} of dimension {self._labels[d]!r} is not positive")
            if d in selectors and not chosen:
                raise ValueError(f"empty range {start}..{stop} of dimension {self._labels[d]!r} of size {n}")
            offset += start * stride
            labels.append(self._labels[d])
            sizes.append(len(chosen))
            strides.append(stride * step)
        return Shape(labels, Slice(offset=offset, sizes=sizes, strides=strides))


class ShapeExt:
    """The selection rule of meshes, for bare shapes."""

    @staticmethod
    def slice(shape: Shape, **selectors: int | slice) -> Shape:
        """Cuts a shape by dimension: an integer drops the dimension, a `slice` keeps it.

        Raises:
            TypeError: no such dimension, or a selector that is neither integer nor `slice`.
            IndexError: an integer is negative or beyond its dimension.
            ValueError: a `slice` selects nothing, or its step is not positive.
        """
        unknown = [label for label in selectors if label not in shape._labels]
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise TypeError(f"Shape does not have dimension labeled {names}; it has {shape.labels}")
        cuts: dict[int, int | slice] = {}
        for label, selector in selectors.items():
            d = shape._labels.index(label)
            if not isinstance(selector, slice):
                selector = as_int(selector)
                if not 0 <= selector < shape._slice._sizes[d]:
                    raise IndexError(f"index out of range: {label}={selector} in {shape}")
            cuts[d] = selector
        return shape._cut(cuts)


class Region(_Labelled):
    """Labelled ranks that may be part of a larger space. A value: immutable and hashable.

    Args:
        labels: names of the dimensions, outermost first.
        slice: the ranks, with as many dimensions.

    Raises:
        ValueError: labels and dimensions differ in number, or a label repeats.
    """

    __slots__ = ()

    def slice(self) -> Slice:
        """The ranks, without labels."""
        return self._slice

    def as_shape(self) -> Shape:
        """The same labels and ranks as a `Shape`."""
        return Shape(self._labels, self._slice)

    def point_of_base_rank(self, rank: int) -> Point:
        """Where a rank of the larger space lies in this region; ValueError when it is outside."""
        return Point(self._slice.index(rank), Extent(self._labels, self._slice._sizes))

    def __len__(self) -> int:
        return len(self._slice)


def iter_ranks(ranks: Slice | Sequence[Slice]) -> Iterator[int]:
    """The ranks of one slice in order, or of several slices with each rank only at its first occurrence."""
    if isinstance(ranks, Slice):
        yield from ranks
        return
    seen: set[int] = set()
    for part in ranks:
        for rank in part:
            if rank not in seen:
                seen.add(rank)
                yield rank
