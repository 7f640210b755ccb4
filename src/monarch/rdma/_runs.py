"""Reads of many equally long, equally spaced runs: what a column of a matrix, or a block of it, is in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple


class Runs(NamedTuple):
    """Runs of `length` bytes, the next `stride` bytes after the last; they arrive packed, one behind the other."""

    length: int
    stride: int

    def end(self, offset: int, nbytes: int) -> int:
        """Where the last of them ends, for `nbytes` in all from `offset` on."""
        if not nbytes:
            return offset
        return offset + (nbytes // self.length - 1) * self.stride + self.length

    def parts(self, offset: int, start: int, n: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the pieces that make up the packed bytes `start` to `start + n`."""
        row, skip = divmod(start, self.length)
        while n > 0:
            size = min(self.length - skip, n)
            yield offset + row * self.stride + skip, size
            n -= size
            row, skip = row + 1, 0

    def ranges(self, address: int, start: int, count: int) -> array[int]:
        """address, length, address, length, ... of `count` whole runs from number `start` on."""
        out = array("Q", bytes(16 * count))
        first = address + start * self.stride
        out[0::2] = array("Q", range(first, first + count * self.stride, self.stride))
        out[1::2] = array("Q", [self.length]) * count
        return out
