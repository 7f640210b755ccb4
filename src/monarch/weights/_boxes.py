"""Blocks of an array: where they begin, how large they are, what two have in common and what one leaves of another."""

from __future__ import annotations

import math
from typing import NamedTuple


class Box(NamedTuple):
    """The elements from `offset` to `offset + shape`, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """None when they have no element in common."""
        start, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            first = max(a, b)
            size = min(a + n, b + m) - first
            if size <= 0:
                return None
            start.append(first)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    def subtract(self, hole: Box) -> list[Box]:
        """What is left without `hole`, a box inside this one, as boxes that do not overlap."""
        out = []
        offset, shape = list(self.offset), list(self.shape)
        for d in range(len(shape)):
            before = hole.offset[d] - offset[d]
            after = offset[d] + shape[d] - hole.offset[d] - hole.shape[d]
            if before:
                out.append(Box(tuple(offset), (*shape[:d], before, *shape[d + 1 :])))
            if after:
                start = hole.offset[d] + hole.shape[d]
                out.append(Box((*offset[:d], start, *offset[d + 1 :]), (*shape[:d], after, *shape[d + 1 :])))
            offset[d], shape[d] = hole.offset[d], hole.shape[d]
        return out

    def relative_to(self, origin: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a - b for a, b in zip(self.offset, origin, strict=True))
