"""Another process of this machine, reached through the kernel: reads and writes that notice drops and deaths.

Every read fetches the buffer's slot after the data, in one system call; every write holds the slot's lock and looks at
the slot first. See `_table` for what a slot says and `_vm` for the calls.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch.rdma import _vm
from monarch.rdma._runs import Runs
from monarch.rdma._table import SLOT, Slot

#: bytes moved between two looks at whether the transfer was given up
CHUNK = 64 << 20
#: operations of one action that go into one system call, each being three ranges
_BATCH = _vm.MAX_RANGES // 3
#: seconds that a writer waits for a slot's lock: only a drop holds it, for microseconds
_LOCK_WAIT = 5.0


class Refused(Exception):
    """The kernel does not let us look into that process."""


class Gone(Exception):
    """That process ended."""


class Dropped(Exception):
    """The registration is not there any more; the text says in which way."""


class Cancelled(Exception):
    """The transfer was given up meanwhile."""


class Move(NamedTuple):
    """`nbytes` between local memory at `address` and `offset` bytes into the region of `slot`."""

    slot: Slot
    offset: int
    address: int
    nbytes: int


def _never() -> bool:
    return False


class Peer:
    """See the module's text. Made by a probe that reads the other's cookie; raises Refused or Gone."""

    def __init__(self, pid: int, table: int, cookie: int) -> None:
        self.pid = pid
        self.table = table
        self._lock_fd = -1
        self._holders: dict[int, int] = {}
        self._mutex = threading.Lock()
        if not _vm.AVAILABLE:
            raise Refused("this system has no process_vm_readv")
        head = array("Q", [0, 0, 0])
        try:
            n = _vm.read(pid, array("Q", [head.buffer_info()[0], 24]), array("Q", [table, 24]))
        except OSError as e:
            if e.errno == errno.ESRCH:
                raise Gone from None
            if e.errno == errno.EFAULT:  # another process by now has that pid
                raise Gone from None
            raise Refused(e.strerror) from None
        if n != 24 or head[0] != cookie:
            raise Gone
        self.slots = head[1]
        self._fd_there = head[2]

    def close(self) -> None:
        with self._mutex:
            if self._lock_fd >= 0 and not self._holders:
                os.close(self._lock_fd)
                self._lock_fd = -1

    # -- reading

    def _fetch(self, slot: Slot, address: int, n: int, remote: array[int]) -> None:
        """The `n` bytes of the ranges `remote` -> `address`, and in the same call the slot, which must be intact."""
        check = array("Q", (0, 0, 0, 0, 0, 0, 0))
        remote.extend((self.table + slot.at * SLOT, 48, slot.guard, 8))
        try:
            moved = _vm.read(self.pid, array("Q", (address, n, check.buffer_info()[0], 56)), remote)
        except OSError as e:
            raise self._explain(e, slot) from None
        if moved != n + 56:
            raise self._explain(None, slot)
        if check[0] != slot.id or check[6] & check[4] != check[5] or check[1] != slot.address:
            raise _why(check, slot)

    def read(self, m: Move, cancelled: Callable[[], bool] = _never) -> None:
        """Region -> local memory."""
        slot, offset, address, left = m
        while True:
            n = left if left <= CHUNK else CHUNK
            self._fetch(slot, address, n, array("Q", (slot.address + offset, n)))
            left -= n
            if not left:
                return
            if cancelled():
                raise Cancelled
            offset += n
            address += n

    def gather(self, m: Move, runs: Runs, cancelled: Callable[[], bool] = _never) -> None:
        """Runs of the region, the first at `m.offset` -> local memory, packed."""
        slot, offset, address, left = m
        row, most = 0, min(_vm.MAX_RANGES - 2, max(1, CHUNK // runs.length))
        while left:
            count = min(most, left // runs.length)
            n = count * runs.length
            self._fetch(slot, address, n, runs.ranges(slot.address + offset, row, count))
            left -= n
            address += n
            row += count
            if left and cancelled():
                raise Cancelled

    def compile(self, moves: Sequence[Move]) -> Callable[[], bool]:
        """A function that does all these small reads with few system calls; False if any of them must be redone
        one by one, by `read`, which says why it fails. The function may be used again and again, by one thread."""
        batches = []
        for start in range(0, len(moves), _BATCH):
            part = moves[start : start + _BATCH]
            check = array("Q", bytes(56 * len(part)))
            base = check.buffer_info()[0]
            local, remote, total = array("Q"), array("Q"), 0
            for i, (slot, offset, address, n) in enumerate(part):
                at = base + 56 * i
                local.extend((address, n, at, 56))
                remote.extend((slot.address + offset, n, self.table + slot.at * SLOT, 48, slot.guard, 8))
                total += n + 56
            ids = array("Q", [m.slot.id for m in part])
            batches.append((local, remote, check, total, ids))

        def run() -> bool:
            for local, remote, check, total, ids in batches:
                try:
                    if _vm.read(self.pid, local, remote) != total:
                        return False
                except OSError:
                    return False
                if check[0::7] != ids:
                    return False
                for guard, mask, value in zip(check[6::7], check[4::7], check[5::7]):
                    if guard & mask != value:
                        return False
            return True

        return run

    def _explain(self, e: OSError | None, slot: Slot) -> Exception:
        if e is not None and e.errno == errno.ESRCH:
            return Gone()
        if e is not None and e.errno in (errno.EPERM, errno.EACCES):
            return Refused(e.strerror)
        try:
            self.check(slot)
        except (Gone, Dropped, Refused) as why:
            return why
        return Dropped("its memory is not there any more: it was unmapped while registered")

    def check(self, slot: Slot) -> None:
        """Raises Dropped or Gone unless the registration is intact."""
        check = array("Q", (0, 0, 0, 0, 0, 0, 0))
        at = check.buffer_info()[0]
        remote = array("Q", (self.table + slot.at * SLOT, 48, slot.guard, 8))
        try:
            n = _vm.read(self.pid, array("Q", (at, 56)), remote)
        except OSError as e:
            if e.errno in (errno.EPERM, errno.EACCES):
                raise Refused(e.strerror) from None
            raise Gone from None
        if check[0] != slot.id:
            raise _why(check, slot)
        if n != 56 or check[6] & check[4] != check[5] or check[1] != slot.address:
            raise _why(check, slot)

    def slot(self, index: int, ident: int) -> Slot:
        """What the other's table says about a registration. Raises Dropped, Gone."""
        if not 0 < index < self.slots:
            raise Dropped("there is no such registration")
        words = array("Q", bytes(SLOT))
        try:
            here, there = words.buffer_info()[0], self.table + index * SLOT
            _vm.read(self.pid, array("Q", (here, SLOT)), array("Q", (there, SLOT)))
        except OSError:
            raise Gone from None
        if words[0] != ident:
            raise Dropped("it was dropped")
        return Slot(index, ident, words[1], words[2], words[3], words[6])

    # -- writing

    def write(self, m: Move, cancelled: Callable[[], bool] = _never) -> None:
        """Local memory -> region."""
        slot, offset, address, left = m
        self._hold(slot.at)
        try:
            while True:
                self.check(slot)
                n = left if left <= CHUNK else CHUNK
                try:
                    moved = _vm.write(self.pid, array("Q", (address, n)), array("Q", (slot.address + offset, n)))
                except OSError as e:
                    raise self._explain(e, slot) from None
                if moved != n:
                    raise self._explain(None, slot)
                left -= n
                if not left:
                    break
                if cancelled():
                    raise Cancelled
                offset += n
                address += n
            self.check(slot)  # a memoryview that was released meanwhile
        finally:
            self._release(slot.at)

    def _hold(self, index: int) -> None:
        """A shared lock on the slot, held by this process for all its threads."""
        end = 0.0
        while True:
            with self._mutex:
                if self._lock_fd < 0:
                    try:
                        self._lock_fd = os.open(f"/proc/{self.pid}/fd/{self._fd_there}", os.O_RDWR | os.O_CLOEXEC)
                    except FileNotFoundError:
                        raise Gone from None
                    except OSError as e:
                        raise Refused(e.strerror) from None
                held = self._holders.get(index, 0)
                if held or _vm.lock(self._lock_fd, index, exclusive=False):
                    self._holders[index] = held + 1
                    return
            now = time.monotonic()
            end = end or now + _LOCK_WAIT
            if now > end:
                raise Dropped("it is being dropped")
            time.sleep(0.0005)  # between tries: a drop looks at the lock for microseconds

    def _release(self, index: int) -> None:
        with self._mutex:
            held = self._holders.pop(index) - 1
            if held:
                self._holders[index] = held
            else:
                _vm.unlock(self._lock_fd, index)


def _why(check: array[int], slot: Slot) -> Dropped:
    if check[0] != slot.id:
        return Dropped("it was dropped")
    if check[1] != slot.address:
        return Dropped("the handle does not match the registration")
    if check[4] == 1:
        return Dropped("its memoryview was released")
    return Dropped("its tensor's memory was moved or resized")
