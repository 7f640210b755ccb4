"""`RDMAAction`: many transfers as one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch.rdma import _transfer
from monarch.rdma._buffer import RDMABuffer, gather_ops, read_op, write_op
from monarch.rdma._manager import manager
from monarch.rdma._paths import Op
from monarch.rdma._runs import Runs
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from monarch.rdma._buffer import Memory


class RDMAAction:
    """A plan of transfers with any number of owners, run by `submit` as often as wanted.

    Queue with `read_remote` and `write_remote` (destination first); both check at the call and return the action. The
    order of the operations within one submit is not defined: those that touch the same bytes race.
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._plan: _transfer.Plan | None = None
        self._lock = threading.Lock()
        self._running: list[Future[None]] = []

    def read_remote(self, dst: Memory, src: RDMABuffer) -> RDMAAction:
        """Queues `src.read_into(dst)`. Raises ValueError as that does."""
        return self._add(read_op(src, dst))

    def write_remote(self, dst: RDMABuffer, src: Memory) -> RDMAAction:
        """Queues `dst.write_from(src)`. Raises ValueError as that does."""
        return self._add(write_op(dst, src))

    def read_into(self, src: RDMABuffer, dst: Memory) -> RDMAAction:
        """`read_remote` with the handle first, as older programs have it."""
        return self.read_remote(dst, src)

    def write_from(self, dst: RDMABuffer, src: Memory) -> RDMAAction:
        """`write_remote` under the name that older programs use."""
        return self.write_remote(dst, src)

    def _gather(self, dst: Any, src: RDMABuffer, offset: int, count: int, runs: Runs) -> RDMAAction:
        """Queues the read of `count` runs of `src`, the first at `offset` bytes, into `dst`, packed."""
        for op in gather_ops(src, dst, offset, count, runs):
            self._add(op)
        return self

    def fetch_add(self, src: RDMABuffer, dst: Any, add: int) -> RDMAAction:
        """Remote atomics are part of the interface; no backend offers them."""
        raise NotImplementedError("Not yet supported")

    def compare_and_swap(self, src: RDMABuffer, dst: Any, compare: int, swap: int) -> RDMAAction:
        """Remote atomics are part of the interface; no backend offers them."""
        raise NotImplementedError("Not yet supported")

    def _add(self, op: Op) -> RDMAAction:
        with self._lock:
            if self._running:
                raise RuntimeError(
                    "this RDMAAction is currently being submitted; await the in-flight submit before mutating it"
                )
            self._ops.append(op)
            self._plan = None
        return self

    def submit(self, *, timeout: float = 60) -> Future[None]:
        """Runs all that is queued; the future gives None when everything is done.

        timeout  seconds for all of it together. Submits of one action run one after another.

        All operations are attempted. If any fails, the future raises one RDMAError that names each failed one by its
        index; `failures` holds the errors by index.
        """
        seconds = _transfer.check_timeout(timeout)
        with self._lock:
            ops = tuple(self._ops)
            if not ops:
                return Future._of(None)
            if self._plan is None:
                self._plan = _transfer.Plan(ops)
            plan = self._plan
            before = self._running[-1] if self._running else None
            out: Future[None] = Future._make()
            self._running.append(out)

        def begin() -> None:
            inner = _transfer.start_all(manager(), ops, plan, seconds)
            inner._on_ready(lambda: self._done(inner, out))

        if before is None:
            begin()
        else:
            before._on_ready(begin)
        return out

    def _done(self, inner: Future[None], out: Future[None]) -> None:
        with self._lock:
            self._running.remove(out)
        out._settle(None, inner._error)

    def __repr__(self) -> str:
        return f"<RDMAAction of {len(self._ops)} operations, {sum(op.nbytes for op in self._ops)} bytes>"
