"""The page that a publisher shows to all readers: which slot holds which version, and who is reading which.

Words of 64 bits. Readers fetch the head in one small read before and one after the bytes: a slot whose stamp is even
and has not changed was not written to meanwhile. In lease mode they also write their cell, by which the publisher knows
not to reuse a slot; a cell is a hint that saves retries, the stamps decide.

    0..7    format, incarnation, current version, current slot, number of slots, directory generation, bytes, layout
    8..     for each slot: stamp, version, checksum
    then    for each cell: reader, slot + 1, count
    then    for each slot: length and bytes of its RDMABuffer handle
"""

from __future__ import annotations

import pickle
import random
from typing import NamedTuple

from monarch.rdma import RDMABuffer, get_rdma_backend

FORMAT = 0x4D57_0001
MAX_SLOTS = 32
CELLS = 256
_HEAD = 8
_SLOTS_AT = _HEAD
_CELLS_AT = _SLOTS_AT + 3 * MAX_SLOTS
_DIRECTORY_AT = _CELLS_AT + 3 * CELLS
_ENTRY = 64  #: words for a handle
WORDS = _DIRECTORY_AT + _ENTRY * MAX_SLOTS
HEAD_BYTES = 8 * _CELLS_AT
CELL_BYTES = 24


class Slot(NamedTuple):
    stamp: int
    version: int
    checksum: int


class _Words:
    """The words that both sides read."""

    def __init__(self, nbytes: int) -> None:
        self.memory = bytearray(nbytes)
        self._words = memoryview(self.memory).cast("q")

    @property
    def version(self) -> int:
        return self._words[2]

    @property
    def current(self) -> int:
        return self._words[3]

    @property
    def slots(self) -> int:
        return self._words[4]


class Head(_Words):
    """What a reader has fetched."""

    def __init__(self) -> None:
        super().__init__(HEAD_BYTES)

    def check(self) -> None:
        if self._words[0] != FORMAT:
            raise ValueError("that is not a weight publisher of this version of monarch")

    @property
    def incarnation(self) -> int:
        return self._words[1]

    @property
    def generation(self) -> int:
        return self._words[5]

    @property
    def layout(self) -> int:
        return self._words[7]

    def slot(self, i: int) -> Slot:
        at = _SLOTS_AT + 3 * i
        return Slot(*self._words[at : at + 3])


class Page(_Words):
    """The publisher's page."""

    def __init__(self, nbytes: int, layout: int) -> None:
        super().__init__(8 * WORDS)
        self._words[1] = self.incarnation = random.SystemRandom().getrandbits(62) | 1
        self._words[2] = -1
        self._words[6], self._words[7] = nbytes, layout
        self._words[0] = FORMAT
        #: None where memory cannot be shared: the versions are then only sent by message
        self.buffer = RDMABuffer(memoryview(self.memory)) if get_rdma_backend() != "none" else None

    def add_slot(self, buffer: RDMABuffer | None) -> int:
        i = self._words[4]
        data = pickle.dumps(buffer, 5) if buffer is not None else b""
        assert len(data) <= 8 * (_ENTRY - 1), "an RDMABuffer handle outgrew its place"
        at = 8 * (_DIRECTORY_AT + _ENTRY * i)
        self.memory[at : at + 8] = len(data).to_bytes(8, "little")
        self.memory[at + 8 : at + 8 + len(data)] = data
        self._words[_SLOTS_AT + 3 * i + 1] = -1
        self._words[4] = i + 1
        self._words[5] += 1
        return i

    def begin(self, i: int) -> None:
        """From now on slot `i` is being written: its stamp is odd."""
        self._words[_SLOTS_AT + 3 * i] += 1

    def finish(self, i: int, version: int, checksum: int) -> None:
        """Slot `i` holds `version`, which becomes the current one."""
        at = _SLOTS_AT + 3 * i
        self._words[at + 1] = version
        self._words[at + 2] = checksum
        self._words[at] += 1
        self._words[3] = i
        self._words[2] = version

    def cells(self) -> list[tuple[int, int, int]]:
        """(reader, slot, count) of the cells in use."""
        w = self._words
        found = []
        for at in range(_CELLS_AT, _DIRECTORY_AT, 3):
            if w[at + 1] and w[at]:
                found.append((w[at], w[at + 1] - 1, w[at + 2]))
        return found


def cell_at(i: int) -> int:
    """Byte offset of cell `i` in the page."""
    return 8 * (_CELLS_AT + 3 * i)


def directory(page: RDMABuffer, slots: int, timeout: float) -> list[RDMABuffer]:
    """The slots' handles, read from a page."""
    data = bytearray(8 * _ENTRY * slots)
    page.read_into(data, offset=8 * _DIRECTORY_AT, nbytes=len(data), timeout=timeout).get()
    out = []
    for i in range(slots):
        at = 8 * _ENTRY * i
        n = int.from_bytes(data[at : at + 8], "little")
        out.append(pickle.loads(bytes(data[at + 8 : at + 8 + n])))
    return out
