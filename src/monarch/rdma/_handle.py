"""What travels: who owns a region, its registration, and every way to reach it, in about 200 bytes."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from typing import NamedTuple

from monarch.rdma._table import CUDA, Slot
from monarch.runtime.node import Host

#: version, flags, pid, slot index, the table's descriptor, the arena's, owner node, agent node, machine, table, cookie,
#: id, address, size, guard, the arena's id, offset in it
_FIXED = struct.Struct("<BBIIIIQQQQQQQQQQQ")
_VERSION = 1


class Shared(NamedTuple):
    """Where a region lies in an arena of its owner (see `_slab`): the arena's descriptor there, its id, the offset."""

    fd: int
    ident: int
    at: int


NOT_SHARED = Shared(0, 0, 0)


class Handle(NamedTuple):
    """A registration, as other processes see it."""

    node: int
    host: Host
    machine: int
    pid: int
    table: int
    cookie: int
    slot: Slot
    table_fd: int
    shared: Shared
    proc: str

    def pack(self) -> bytes:
        s = self.slot
        fixed = _FIXED.pack(
            _VERSION, s.flags, self.pid, s.at, self.table_fd, self.shared.fd, self.node, self.host.agent,
            self.machine, self.table, self.cookie, s.id, s.address, s.size, s.guard, self.shared.ident, self.shared.at,
        )  # fmt: skip
        return fixed + "\n".join((self.host.address, self.proc)).encode()

    @property
    def gpu(self) -> bool:
        return bool(self.slot.flags & CUDA)

    @property
    def owner(self) -> str:
        """`rdma_manager.<proc>@<address>`, for people."""
        return f"rdma_manager.{self.proc}@{self.host.address or 'local'}"


def unpack(data: bytes) -> Handle:
    """The handle behind `Handle.pack`. ValueError when the bytes are not one."""
    if len(data) < _FIXED.size or data[0] != _VERSION:
        raise ValueError("these bytes are not an RDMABuffer handle of this version of monarch")
    (
        _, flags, pid, index, table_fd, fd, node, agent, machine, table, cookie, ident, address, size, guard, arena, at,
    ) = _FIXED.unpack_from(data)  # fmt: skip
    where, _, proc = data[_FIXED.size :].decode().partition("\n")
    slot = Slot(index, ident, address, size, guard, flags)
    return Handle(node, Host(agent, where), machine, pid, table, cookie, slot, table_fd, Shared(fd, arena, at), proc)


@functools.lru_cache(maxsize=1)
def machine() -> int:
    """This machine and its pid namespace, as 64 bits: two processes with the same one may see each other's memory.

    0 where nothing identifies them; such processes never try.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        text = f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1
