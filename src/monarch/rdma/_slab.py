"""Memory that other processes of this host can map: a copy out of it needs no system call and no second copy.

`allocate` hands out pieces of arenas, files in memory (memfd). A reader opens the arena through `/proc/<pid>/fd` once
and keeps it mapped, and with it the owner's table: reading is a look at the slot, a memcpy, another look. Whether the
owner lives is asked of its pidfd.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import random
import select
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.rdma import _vm
from monarch.rdma._handle import Handle, Shared
from monarch.rdma._paths import Op, Path
from monarch.rdma._peer import CHUNK, Cancelled, Dropped, Gone, Refused
from monarch.rdma._table import READONLY, SLOTS, TABLE_NAME

if TYPE_CHECKING:
    import torch

#: bytes of an arena at least; what is not touched costs nothing
ARENA = 64 << 20
_ALIGN = 64
_NAME = "monarch-slab-{:016x}"


class _Arena(NamedTuple):
    address: int
    size: int
    fd: int
    ident: int
    map: weakref.ref[mmap.mmap]


class _Arenas:
    """The arenas of this process, by address. An arena is freed with the last memory that was handed out from it."""

    def __init__(self) -> None:
        self._all: list[_Arena] = []
        self._lock = threading.RLock()
        self._current: mmap.mmap | None = None
        self._at = 0

    def allocate(self, nbytes: int) -> memoryview:
        with self._lock:
            if self._current is None or self._at + nbytes > len(self._current):
                self._current, self._at = self._make(max(ARENA, nbytes)), 0
            view = memoryview(self._current)[self._at : self._at + nbytes]
            self._at += -(-nbytes // _ALIGN) * _ALIGN
            if nbytes >= ARENA:
                self._current = None
            return view

    def _make(self, size: int) -> mmap.mmap:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        ident = random.SystemRandom().getrandbits(64)
        fd = os.memfd_create(_NAME.format(ident), os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            made = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        arena = _Arena(address, size, fd, ident, weakref.ref(made))
        bisect.insort(self._all, arena, key=lambda a: a.address)
        weakref.finalize(made, self._forget, address, fd)
        return made

    def _forget(self, address: int, fd: int) -> None:
        with self._lock:
            self._all = [a for a in self._all if a.address != address]
        os.close(fd)

    def find(self, address: int, nbytes: int) -> tuple[Shared, mmap.mmap] | None:
        """How others find these bytes, and what keeps them; None when they are ordinary memory."""
        if not self._all:
            return None
        with self._lock:
            i = bisect.bisect_right(self._all, address, key=lambda a: a.address) - 1
            if i < 0:
                return None
            a = self._all[i]
            made = a.map()
            if made is None or address + nbytes > a.address + a.size:
                return None
            return Shared(a.fd, a.ident, address - a.address), made


_arenas = _Arenas()
find = _arenas.find


def allocate(nbytes: int) -> memoryview:
    """`nbytes` of zeroed memory that other processes of this host map when they transfer it: the fastest rung.

    For memory that is registered for long and read often; where it cannot be shared (not Linux), it is ordinary memory
    and transfers take the other paths. Freed with its last reference; small pieces lie in an arena of 64 MiB together,
    which is freed as a whole. Raises ValueError for a size that is not positive.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes must be a positive number of bytes, got {nbytes!r}")
    if not _vm.AVAILABLE:
        return memoryview(bytearray(nbytes))
    return _arenas.allocate(nbytes)


def allocate_tensor(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor of zeros in memory from `allocate`. dtype: torch's default when None. Raises as `torch.empty`."""
    import torch

    want = torch.empty(*shape, dtype=dtype, device="meta")
    if want.numel() == 0:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(allocate(want.numel() * want.element_size()), dtype=want.dtype).view(want.shape)


class Mapped(Path):
    """The memory of another process of this host, as far as it was allocated here; see the module's text."""

    name = "slab"
    inline = 1 << 20

    def __init__(self, handle: Handle) -> None:
        """Raises Refused, Gone."""
        self.pid, self.cookie = handle.pid, handle.cookie
        self._maps: dict[int, tuple[Any, int]] = {}
        self._lock = threading.Lock()
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(handle.pid)
            self._table = self._open(handle.table_fd, TABLE_NAME)
        except ProcessLookupError:
            raise Gone from None
        except (OSError, AttributeError) as e:
            self.close()
            raise Refused(str(e)) from None
        self._words = memoryview(self._table).cast("Q")
        if self._words[0] != handle.cookie:
            self.close()
            raise Gone
        self._alive = select.poll()
        self._alive.register(self._pidfd, select.POLLIN)

    def _open(self, fd: int, name: str) -> mmap.mmap:
        mine = os.open(f"/proc/{self.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.readlink(f"/proc/self/fd/{mine}") != f"/memfd:{name} (deleted)":
                raise FileNotFoundError(f"descriptor {fd} of process {self.pid} is another file by now")
            return mmap.mmap(mine, 0)
        finally:
            os.close(mine)

    def close(self) -> None:
        self._maps.clear()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _address(self, handle: Handle) -> int:
        found = self._maps.get(handle.shared.ident)
        if found is None:
            with self._lock:
                try:
                    made = self._open(handle.shared.fd, _NAME.format(handle.shared.ident))
                except FileNotFoundError:
                    raise Dropped("its memory is not there any more") from None
                except OSError as e:
                    raise Refused(e.strerror) from None
                found = self._maps[handle.shared.ident] = (made, ctypes.addressof(ctypes.c_char.from_buffer(made)))
        if handle.shared.at + handle.slot.size > len(found[0]):
            raise Dropped("the handle does not match the registration")
        return found[1] + handle.shared.at

    def _check(self, handle: Handle) -> None:
        if self._pidfd < 0 or self._alive.poll(0):
            raise Gone
        slot = handle.slot
        if not 0 < slot.at < SLOTS:
            raise Dropped("there is no such registration")
        w = self._words
        if w[slot.at * 8] != slot.id:
            self._maps.pop(handle.shared.ident, None)  # a mapping that is still needed is made again
            raise Dropped("it was dropped")
        if (w[slot.at * 8 + 1], w[slot.at * 8 + 2]) != (slot.address, slot.size):
            raise Dropped("the handle does not match the registration")

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        handle = op.handle
        self._check(handle)
        if op.end > handle.slot.size:
            raise Dropped("the handle does not match the registration")
        if op.write and self._words[handle.slot.at * 8 + 6] & READONLY:
            raise PermissionError("the buffer is read-only memory")
        base = self._address(handle)
        here, at = op.local.address, 0
        if op.runs is not None:
            for offset, n in op.runs.parts(op.offset, 0, op.nbytes):
                _vm.copy(here + at, base + offset, n)
                at += n
        else:
            there = base + op.offset
            while True:
                n = min(op.nbytes - at, CHUNK)
                _vm.copy(*((there + at, here + at) if op.write else (here + at, there + at)), n)
                at += n
                if at == op.nbytes:
                    break
                if cancelled():
                    raise Cancelled
        self._check(handle)

    def prepare(self, ops: Sequence[Op]) -> Callable[[], bool] | None:
        def run() -> bool:
            try:
                for op in ops:
                    self.run(op, lambda: False)
            except Exception:
                return False
            return True

        return run if not any(op.write for op in ops) else None
