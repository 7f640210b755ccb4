"""`Extent` (named sizes) and `Point` (a rank within an extent): read-only, hashable mappings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import index as as_int
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.mesh.shape import Region


class MissingDimensionError(KeyError, ValueError):
    """A label that is not a dimension.

    A KeyError so that these classes are ordinary mappings (`in`, `.get`), and a ValueError because existing
    programs catch that.
    """

    def __str__(self) -> str:
        # KeyError would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class Extent(Mapping[str, int]):
    """Ordered dimension labels with their sizes: a mapping from label to size.

    Equal to another extent with the same labels and sizes in the same order, and never to a dict.

    Args:
        labels: names of the dimensions, outermost first.
        sizes: elements along each.

    Raises:
        ValueError: labels and sizes differ in length, a label repeats, or a size is negative.
    """

    __slots__ = ("_labels", "_nelements", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        self._labels = tuple(labels)
        self._sizes = tuple(map(as_int, sizes))
        if len(self._labels) != len(self._sizes):
            raise ValueError(f"{len(self._labels)} labels but {len(self._sizes)} sizes")
        if len(set(self._labels)) != len(self._labels):
            raise ValueError(f"duplicate dimension labels: {list(self._labels)}")
        if self._sizes and min(self._sizes) < 0:
            raise ValueError(f"sizes must not be negative: {list(self._sizes)}")
        self._nelements = math.prod(self._sizes)

    @property
    def labels(self) -> list[str]:
        """Dimension labels in order (a fresh list)."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """Sizes in the order of the labels (a fresh list)."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """Number of points: the product of the sizes, 1 for zero dimensions."""
        return self._nelements

    @property
    def region(self) -> Region:
        """The dense row-major region of this extent, from rank 0."""
        # shape.py builds on this module, so it is imported only when asked for.
        from monarch.mesh.shape import Region
        from monarch.mesh.slices import Slice

        return Region(self._labels, Slice.new_row_major(self._sizes))

    def __getitem__(self, label: str) -> int:
        return self._sizes[_dimension(self._labels, label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __contains__(self, label: object) -> bool:
        return label in self._labels

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Extent):
            return NotImplemented
        return self._labels == other._labels and self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label}: {n}" for label, n in zip(self._labels, self._sizes)) + "}"

    def __reduce__(self) -> tuple[object, ...]:
        return Extent, (self._labels, self._sizes)


class Point(Mapping[str, int]):
    """A dense row-major rank in an extent, seen as a mapping from label to the index along that dimension.

    One is made for every message, so it holds just its two parts and computes coordinates when asked.
    Equal to a point of the same rank and extent, and never to a dict.

    Args:
        rank: position in the extent, `0 <= rank < extent.nelements`.
        extent: the space it lies in.

    Raises:
        ValueError: the rank is outside the extent.
    """

    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent._nelements:
            raise ValueError(f"rank {rank} is outside the extent {extent}")
        self._rank = as_int(rank)
        self._extent = extent

    @property
    def rank(self) -> int:
        """Dense row-major rank."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The extent the point lies in."""
        return self._extent

    def size(self, label: str) -> int:
        """Size of a dimension of the extent; a missing label is a KeyError and a ValueError."""
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        extent = self._extent
        d = _dimension(extent._labels, label)
        return self._rank // math.prod(extent._sizes[d + 1 :]) % extent._sizes[d]

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent._labels)

    def __len__(self) -> int:
        return len(self._extent._labels)

    def __contains__(self, label: object) -> bool:
        return label in self._extent._labels

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return self._rank == other._rank and self._extent == other._extent

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {self[label]}/{n}" for label, n in self._extent.items()) + "}"

    def __reduce__(self) -> tuple[object, ...]:
        return Point, (self._rank, self._extent)


def _dimension(labels: tuple[str, ...], label: str) -> int:
    try:
        return labels.index(label)
    except ValueError:
        raise MissingDimensionError(f"Dimension {label!r} not found") from None
