"""`Slice`: a strided box of integer ranks (offset, sizes, strides), without names for its dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import index as as_int
from typing import overload


class Slice:
    """The ranks `offset + sum(c[d] * strides[d])` for `0 <= c[d] < sizes[d]`, in row-major order of `c`.

    With zero dimensions it holds one rank, the offset. Strides may be in any order. A value: immutable,
    compared and hashed by its three parts.

    Args:
        offset: the rank at position 0.
        sizes: elements along each dimension.
        strides: distance in ranks between neighbours along each dimension.

    Raises:
        ValueError: `sizes` and `strides` differ in length, a number is negative, or two positions would
            have the same rank.
    """

    __slots__ = ("_greedy", "_len", "_offset", "_order", "_sizes", "_strides")

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        self._offset = as_int(offset)
        self._sizes = tuple(map(as_int, sizes))
        self._strides = tuple(map(as_int, strides))
        if len(self._sizes) != len(self._strides):
            raise ValueError(f"sizes and strides differ in length: {self!r}")
        if min((self._offset, *self._sizes, *self._strides)) < 0:
            raise ValueError(f"offset, sizes and strides must not be negative: {self!r}")
        self._len = math.prod(self._sizes)
        # A dimension of one element never moves the rank, so only the others, widest stride first, matter.
        moving = [d for d, n in enumerate(self._sizes) if n > 1]
        self._order = tuple(sorted(moving, key=self._strides.__getitem__, reverse=True))
        # Greedy: each stride exceeds the whole span of the narrower ones, so division finds coordinates.
        self._greedy, span = True, 0
        for d in reversed(self._order):
            self._greedy = self._greedy and self._strides[d] > span
            span += (self._sizes[d] - 1) * self._strides[d]
        if self._len and not self._greedy and self._overlaps():
            raise ValueError(f"two positions have the same rank: {self!r}")

    def _overlaps(self) -> bool:
        if any(self._strides[d] == 0 for d in self._order):
            return True
        # Two positions share a rank iff some difference d != 0 with |d[i]| < sizes[i] moves the rank by 0.
        # Shifted to be non-negative, d = 0 is the middle of a box twice as wide: is it the only solution?
        dims = [(2 * self._sizes[d] - 1, self._strides[d]) for d in self._order]
        middle = sum((n // 2) * stride for n, stride in dims)
        return len(list(itertools.islice(_solutions(middle, dims), 2))) > 1

    @staticmethod
    def new_row_major(sizes: Sequence[int]) -> Slice:
        """The dense slice `0 .. prod(sizes)` in row-major order."""
        return Slice(offset=0, sizes=sizes, strides=row_major_strides(sizes))

    @staticmethod
    def from_list(ranks: Iterable[int]) -> list[Slice]:
        """Covers `ranks`, in the order given, by the longest increasing arithmetic runs, from the left.

        `[1, 3, 5]` gives one slice of stride 2; `[1, 2, 4, 5, 6]` gives `1..2` and `4..6`; `[]` gives `[]`.
        """
        runs: list[list[int]] = []
        for rank in ranks:
            run = runs[-1] if runs else []
            extends = len(run) > 1 and rank - run[-1] == run[1] - run[0]
            if extends or (len(run) == 1 and rank > run[0]):
                run.append(rank)
            else:
                runs.append([rank])
        return [Slice(offset=r[0], sizes=[len(r)], strides=[r[1] - r[0] if len(r) > 1 else 1]) for r in runs]

    @property
    def offset(self) -> int:
        """The rank at position 0."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """Elements along each dimension (a fresh list)."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """Distance in ranks between neighbours along each dimension (a fresh list)."""
        return list(self._strides)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._sizes)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        if self._strides == row_major_strides(self._sizes):
            yield from range(self._offset, self._offset + self._len)
            return
        # A stride of 0 is only possible for a dimension of at most one element; range() refuses a step of 0.
        axes = [range(0, n * (stride or 1), stride or 1) for n, stride in zip(self._sizes, self._strides)]
        for steps in itertools.product(*axes):
            yield self._offset + sum(steps)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._locate(rank) is not None

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[int, ...]: ...
    def __getitem__(self, position: int | slice) -> int | tuple[int, ...]:
        """The rank at a position, or a tuple of ranks for a slice of positions.

        Raises:
            IndexError: the position is beyond the end.
            TypeError: the position is negative or not an integer.
        """
        if isinstance(position, slice):
            return tuple(self._at(i) for i in range(*position.indices(self._len)))
        i = as_int(position)
        if i < 0:
            raise TypeError(f"position in a slice must not be negative: {i}")
        if i >= self._len:
            raise IndexError(f"position {i} out of range for {self._len} elements")
        return self._at(i)

    def get(self, position: int) -> int:
        """The rank at a position; ValueError when it is not in `0 .. len(self) - 1`."""
        i = as_int(position)
        if not 0 <= i < self._len:
            raise ValueError(f"position {i} out of range for {self._len} elements")
        return self._at(i)

    def index(self, rank: int) -> int:
        """The position of a rank, the inverse of `get`; ValueError when the slice does not hold it."""
        position = 0
        for n, c in zip(self._sizes, self.coordinates(rank)):
            position = position * n + c
        return position

    def coordinates(self, rank: int) -> list[int]:
        """The index of a rank along each dimension; ValueError when the slice does not hold it."""
        found = self._locate(as_int(rank))
        if found is None:
            raise ValueError(f"rank {rank} is not in {self!r}")
        return found

    def nditem(self, coords: Sequence[int]) -> int:
        """The rank at one index per dimension; IndexError for a wrong count or an index out of range."""
        if len(coords) != len(self._sizes):
            raise IndexError(f"expected {len(self._sizes)} coordinates, got {len(coords)}")
        rank = self._offset
        for c, n, stride in zip(coords, self._sizes, self._strides):
            if not 0 <= c < n:
                raise IndexError(f"coordinates {list(coords)} out of range for sizes {self.sizes}")
            rank += c * stride
        return rank

    def _at(self, position: int) -> int:
        rank = self._offset
        for n, stride in zip(reversed(self._sizes), reversed(self._strides)):
            position, c = divmod(position, n)
            rank += c * stride
        return rank

    def _locate(self, rank: int) -> list[int] | None:
        rest = rank - self._offset
        if rest < 0 or not self._len:
            return None
        coords = [0] * len(self._sizes)
        if self._greedy:
            for d in self._order:
                c, rest = divmod(rest, self._strides[d])
                if c >= self._sizes[d]:
                    return None
                coords[d] = c
            return None if rest else coords
        dims = [(self._sizes[d], self._strides[d]) for d in self._order]
        for found in _solutions(rest, dims):
            for d, c in zip(self._order, found):
                coords[d] = c
            return coords
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slice):
            return NotImplemented
        mine = (self._offset, self._sizes, self._strides)
        return mine == (other._offset, other._sizes, other._strides)

    def __hash__(self) -> int:
        return hash((self._offset, self._sizes, self._strides))

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self._offset}, sizes: {self.sizes}, strides: {self.strides} }}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._offset, self._sizes, self._strides)


NDSlice = Slice


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense row-major box of these sizes."""
    strides = itertools.accumulate(reversed(sizes[1:]), lambda stride, n: stride * n, initial=1)
    return tuple(reversed(list(strides))) if sizes else ()


def _rebuild(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Slice:
    return Slice(offset=offset, sizes=sizes, strides=strides)


def _solutions(target: int, dims: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """All `c` with `0 <= c[i] < size[i]` and `sum(c[i] * stride[i]) == target`, strides all positive.

    Only needed where strides interleave (sizes [2, 2], strides [3, 2]); then division alone is not enough.
    The bounds and the congruence below leave few candidates for one dimension after another.
    """
    if not dims:
        if target == 0:
            yield ()
        return
    (size, stride), rest = dims[0], dims[1:]
    span = sum((n - 1) * s for n, s in rest)
    low = max(0, -((span - target) // stride))  # the least c that the other dimensions can still complete
    high = min(size - 1, target // stride)
    step = 1
    if rest:
        # What the other dimensions add is a multiple of their gcd: c * stride == target (mod gcd).
        modulus = math.gcd(*(s for _, s in rest))
        common = math.gcd(stride, modulus)
        if target % common:
            return
        step = modulus // common
        first = target // common * pow(stride // common, -1, step) % step if step > 1 else 0
        low += (first - low) % step
    for c in range(low, high + 1, step):
        for tail in _solutions(target - c * stride, rest):
            yield (c, *tail)
