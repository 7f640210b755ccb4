"""Pooled shared memory for large payloads between processes of one host.

A segment is an anonymous memory file (`memfd`): it has no name, so nothing is left on disk or in /dev/shm when
processes die, however they die. The sender copies a payload into a free segment and sends a ticket; each receiver
opens the sender's descriptor through /proc once, maps it, keeps the mapping, and gives the segment back when the
last object built on its memory is gone. Segments are pooled because a fresh page costs ten times a warm one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence

from monarch.wire.frames import Bytes

#: sender's pid, descriptor, segment id, bytes mapped, number of parts, number of borrowers
TICKET = struct.Struct("<IIQQII")
AVAILABLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
_ALIGN = 64


class Segment:
    """A memory file of `capacity` bytes, owned by this process and lent to receivers."""

    __slots__ = ("_map", "borrowers", "capacity", "fd", "id", "view")

    def __init__(self, ident: int, capacity: int) -> None:
        self.fd = os.memfd_create("monarch-payload", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity)
        self.view = memoryview(self._map)
        self.id = ident
        self.capacity = capacity
        self.borrowers: list[int] = []

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)


class SegmentPool:
    """The segments this process sends from. Thread-safe. `limit` bounds all its memory, in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._free: dict[int, list[Segment]] = {}
        self._lent: dict[int, Segment] = {}
        self._total = 0
        self._next = 1

    def pack(self, parts: Sequence[Bytes], borrowers: Sequence[int]) -> bytes | None:
        """Copies `parts` into a segment lent to the nodes `borrowers`; the ticket, or None when there is no room."""
        lengths = [memoryview(p).nbytes for p in parts]
        starts, at = [], 0
        for n in lengths:
            starts.append(at)
            at += -(-n // _ALIGN) * _ALIGN
        segment = self._take(max(at, 1), borrowers)
        if segment is None:
            return None
        for start, n, part in zip(starts, lengths, parts, strict=True):
            segment.view[start : start + n] = memoryview(part).cast("B") if n else b""
        head = TICKET.pack(os.getpid(), segment.fd, segment.id, segment.capacity, len(parts), len(borrowers))
        return head + struct.pack(f"<{2 * len(parts)}Q", *starts, *lengths)

    def _take(self, size: int, borrowers: Sequence[int]) -> Segment | None:
        capacity = max(1 << 16, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(capacity)
            if free:
                segment = free.pop()
            else:
                while self._total + capacity > self.limit and self._drop_one_free():
                    pass
                if self._total + capacity > self.limit:
                    return None
                try:
                    segment = Segment(self._next, capacity)
                except OSError:
                    return None
                self._next += 1
                self._total += capacity
            segment.borrowers = list(borrowers)
            self._lent[segment.id] = segment
            return segment

    def _drop_one_free(self) -> bool:
        for segments in self._free.values():
            if segments:
                segment = segments.pop()
                self._total -= segment.capacity
                segment.close()
                return True
        return False

    def give_back(self, ident: int, borrower: int) -> None:
        """`borrower` no longer uses segment `ident`."""
        with self._lock:
            segment = self._lent.get(ident)
            if segment is None or borrower not in segment.borrowers:
                return
            segment.borrowers.remove(borrower)
            if not segment.borrowers:
                del self._lent[ident]
                self._free.setdefault(segment.capacity, []).append(segment)

    def borrower_gone(self, borrower: int) -> None:
        """The process of node `borrower` died: whatever it had borrowed is free."""
        with self._lock:
            idents = [i for i, s in self._lent.items() if borrower in s.borrowers]
        for ident in idents:
            while ident in self._lent and borrower in self._lent[ident].borrowers:
                self.give_back(ident, borrower)

    def in_use(self) -> int:
        """Segments lent out now."""
        return len(self._lent)

    def close(self) -> None:
        with self._lock:
            while self._drop_one_free():
                pass
            for segment in self._lent.values():
                with contextlib.suppress(BufferError):
                    segment.close()
            self._lent.clear()


class MappedSegments:
    """The segments of other processes that this process has mapped."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self._lock = threading.Lock()

    def open(self, ticket: Bytes, release: Callable[[int], None]) -> list[memoryview]:
        """The parts behind a ticket. `release(segment id)` is called once, when no object uses them any more.

        Raises OSError when the sender is gone.
        """
        pid, fd, ident, capacity, n, borrowers = TICKET.unpack_from(ticket)
        numbers = struct.unpack_from(f"<{2 * n}Q", ticket, TICKET.size)
        if borrowers > 1:
            # Others build on the same pages: this receiver's writes must stay its own. A private mapping copies a page
            # when it is first written, and cannot be kept for the next message, since written pages would go stale.
            mapped = self._map(pid, fd, capacity, mmap.MAP_PRIVATE)
        else:
            with self._lock:
                known = self._maps.get((pid, ident))
                if known is None:
                    known = self._maps[pid, ident] = self._map(pid, fd, capacity, mmap.MAP_SHARED)
                mapped = known
        whole = (ctypes.c_ubyte * capacity).from_buffer(mapped)  # ctypes objects can be watched; memoryviews cannot
        weakref.finalize(whole, release, ident).atexit = False
        view = memoryview(whole).cast("B")
        return [view[start : start + size] for start, size in zip(numbers[:n], numbers[n:], strict=True)]

    @staticmethod
    def _map(pid: int, fd: int, capacity: int, flags: int) -> mmap.mmap:
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(theirs, capacity, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(theirs)

    def forget_process(self, pid: int) -> None:
        """Drops the mappings of a process that ended; objects still built on them stay valid."""
        with self._lock:
            for key in [k for k in self._maps if k[0] == pid]:
                del self._maps[key]
