"""The ladder: the ways to move bytes between two processes. The first that both ends support is taken.

    local    same process: a copy
    slab     same host, memory allocated through `monarch.rdma.allocate`: a copy out of a mapping that stays
    vm       same host, ordinary memory: process_vm_readv/writev
    nixl     an RDMA NIC on both sides
    tcp      sockets of our own, served by the host agent of the owner (by the owner, where the agent may not look in)
    relay    the framework's own messages, where no socket can be opened: tunnels, TLS

A path raises Refused when it turns out not to work (the next rung is tried), Gone, Dropped, Cancelled or RDMAError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch.rdma import _vm
from monarch.rdma._handle import Handle
from monarch.rdma._memory import Region
from monarch.rdma._peer import CHUNK, Cancelled, Dropped, Move, Peer
from monarch.rdma._runs import Runs
from monarch.rdma._table import Table


class Op(NamedTuple):
    """One transfer: `nbytes` between `local` and `offset` bytes into the region of `handle`."""

    handle: Handle
    write: bool
    offset: int
    local: Region
    nbytes: int
    runs: Runs | None = None  #: for reads that gather: then `nbytes` is that of all runs

    @property
    def move(self) -> Move:
        return Move(self.handle.slot, self.offset, self.local.address, self.nbytes)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes if self.runs is None else self.runs.end(self.offset, self.nbytes)


class Path:
    """One way to one process."""

    name = ""
    #: transfers up to this many bytes run on the caller's thread: they take less time than to hand them over
    inline = 0

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        raise NotImplementedError

    def prepare(self, ops: Sequence[Op]) -> Callable[[], bool] | None:
        """A function that does `ops` together, and that returns False if they must be run one by one after all."""
        return None

    def run_many(self, ops: Sequence[Op], cancelled: Callable[[], bool]) -> dict[int, Exception] | None:
        """Small reads, without waiting for each before the next: the errors by position. None: run them one by one."""
        return None

    def close(self) -> None:
        """Lets go of descriptors."""


class Local(Path):
    """Same process."""

    name = "local"
    inline = 1 << 20

    def __init__(self, table: Table) -> None:
        self.table = table

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        at, left = 0, op.nbytes
        while True:
            region = self.table.get(op.handle.slot.id)
            if region is None:
                raise Dropped("it was dropped, or its memory released or moved")
            if op.end > region.nbytes:
                raise Dropped("the handle does not match the registration")
            if op.runs is not None:
                for offset, n in op.runs.parts(op.offset, 0, op.nbytes):
                    _vm.copy(op.local.address + at, region.address + offset, n)
                    at += n
                return
            n = min(left, CHUNK)
            there, here = region.address + op.offset + at, op.local.address + at
            _vm.copy(*((there, here) if op.write else (here, there)), n)
            left -= n
            at += n
            if not left:
                return
            if cancelled():
                raise Cancelled


class SameHost(Path):
    """Another process of this machine, through the kernel."""

    name = "vm"
    inline = 1 << 20

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        if op.runs is not None:
            self.peer.gather(op.move, op.runs, cancelled)
        else:
            (self.peer.write if op.write else self.peer.read)(op.move, cancelled)

    def prepare(self, ops: Sequence[Op]) -> Callable[[], bool] | None:
        if any(op.write or op.runs is not None or op.nbytes > CHUNK for op in ops):
            return None
        return self.peer.compile([op.move for op in ops])

    def close(self) -> None:
        self.peer.close()
