"""The owner's side: the registered regions of this process, in a table that other processes can look at.

A slot is 64 bytes: id, address, size, guard address, guard mask, guard value, flags, and a word that is always 0. Slot
0 is the head: cookie, number of slots, descriptor of the table's file. A reader fetches the data and then, in the same
system call, the slot: if the slot still holds the id then the memory was registered, and so alive, all the while. A
writer holds a shared lock on the slot's byte of the table's file while it writes; `drop` clears the slot first, and
lets go of the memory when no writer holds that lock.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

from monarch.rdma import _vm
from monarch.rdma._memory import Region

log = logging.getLogger("monarch.rdma")

SLOT = 64
SLOTS = 1 << 18
READONLY, CUDA, SLAB = 1, 2, 4
TABLE_NAME = "monarch-rdma"  #: of the file in memory
#: seconds between tries to free a dropped region that somebody is still writing to
_RETRY = 0.01


class Slot(NamedTuple):
    """A registration as its slot describes it, and where that slot is: number `at` of the table."""

    at: int
    id: int
    address: int
    size: int
    guard: int
    flags: int


class Table:
    """The registrations of this process. Thread-safe."""

    def __init__(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        self.pid = os.getpid()
        self._later = later
        size = SLOTS * SLOT
        if _vm.AVAILABLE:
            self.fd = os.memfd_create(TABLE_NAME, os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
            self._locks = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        else:
            self.fd = self._locks = -1
            self._map = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words = memoryview(self._map).cast("Q")
        self.cookie = random.SystemRandom().getrandbits(63) | 1
        self._words[1] = SLOTS
        self._words[2] = max(self.fd, 0)
        self._words[0] = self.cookie
        self._regions: dict[int, tuple[int, Region]] = {}
        self._free: list[int] = []
        self._next = 1
        self._mutex = threading.Lock()

    def add(self, region: Region, flags: int) -> Slot:
        """Registers; nothing is copied or touched. Raises RuntimeError when all slots are taken."""
        with self._mutex:
            if self._free:
                index = self._free.pop()
            elif self._next < SLOTS:
                index = self._next
                self._next += 1
            else:
                raise RuntimeError(f"this process has {SLOTS - 1} registered RDMA buffers: drop() those not needed")
            ident = random.getrandbits(62) | (1 << 62)
            flags |= READONLY if region.readonly else 0
            self._regions[ident] = (index, region)
        at = index * 8
        words = self._words
        guard = region.guard.address or self.address + index * SLOT + 56
        words[at + 1] = region.address
        words[at + 2] = region.nbytes
        words[at + 3] = guard
        words[at + 4] = region.guard.mask
        words[at + 5] = region.guard.value
        words[at + 6] = flags
        words[at] = ident
        return Slot(index, ident, region.address, region.nbytes, guard, flags)

    def get(self, ident: int) -> Region | None:
        """The region, if it is registered and its memory is where it was."""
        found = self._regions.get(ident)
        if found is None:
            return None
        region = found[1]
        g = region.guard
        if g.address and ctypes.c_uint64.from_address(g.address).value & g.mask != g.value:
            return None
        return region

    def slot(self, ident: int) -> Slot | None:
        found = self._regions.get(ident)
        if found is None:
            return None
        index, region = found
        w = self._words[index * 8 : index * 8 + 8]
        return Slot(index, ident, region.address, region.nbytes, w[3], w[6])

    def drop(self, ident: int) -> bool:
        """Forgets a registration; transfers that start from now on fail. False when there was none."""
        with self._mutex:
            found = self._regions.pop(ident, None)
            if found is None:
                return False
            self._words[found[0] * 8] = 0
        self._let_go(*found)
        return True

    def _let_go(self, index: int, region: Region) -> None:
        """Frees the slot, and with the last reference the memory, when nobody writes to it any more."""
        if self._locks >= 0:
            if not _vm.lock(self._locks, index, exclusive=True):
                self._later(_RETRY, lambda: self._let_go(index, region))
                return
            _vm.unlock(self._locks, index)
        with self._mutex:
            self._free.append(index)

    def live(self) -> list[tuple[int, int, str]]:
        """(id, bytes, device) of what is registered."""
        with self._mutex:
            return [(i, r.nbytes, r.device) for i, (_, r) in self._regions.items()]
