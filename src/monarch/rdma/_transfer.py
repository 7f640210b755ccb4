"""Runs transfers: small ones on the caller's thread, others on worker threads, all with a time limit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch.rdma import _errors, _work
from monarch.rdma._errors import (
    RDMABufferDroppedError,
    RDMAError,
    RDMAInitError,
    RDMAOwnerDiedError,
    RDMATimeoutError,
)
from monarch.rdma._manager import Manager
from monarch.rdma._paths import Op, Path
from monarch.rdma._peer import Cancelled, Dropped, Gone, Refused
from monarch.runtime.future import Future

_MOST = 2**64 - 1
#: a limit beyond this many seconds is none: the clock would not get there
_FOREVER = 1e9
#: bytes up to which reads of an action over sockets are asked for together
_SMALL = 256 << 10


def check_timeout(timeout: Any) -> float:
    """Seconds; math.inf for "no limit". TypeError for None and other types, OverflowError outside 0..2^64-1."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if timeout != timeout or timeout < 0 or timeout > _MOST:
        raise OverflowError("timeout must fit in an unsigned 64-bit integer")
    return math.inf if timeout > _FOREVER else float(timeout)


def never() -> bool:
    return False


def failure(manager: Manager, op: Op, path: Path | None, e: BaseException, index: int, seconds: float) -> RDMAError:
    """`e`, as the caller gets it."""
    what = f"RDMA {'write' if op.write else 'read'} of {op.nbytes} bytes failed: "
    ident, owner = op.handle.slot.id, op.handle.owner
    name = path.name if path is not None else None
    kind: type[RDMAError] = RDMAError
    if isinstance(e, RDMAError):
        kind, text = type(e), str(e.args[0])
    elif isinstance(e, Dropped):
        kind, text = RDMABufferDroppedError, f"buffer {ident} not found: {e} (owner: {owner})"
    elif isinstance(e, Gone):
        reason = f": {e}" if e.args else manager.how_it_ended(op.handle)
        kind, text = RDMAOwnerDiedError, f"the process that owns buffer {ident} is dead ({owner}){reason}"
    elif isinstance(e, Cancelled):
        kind, text = RDMATimeoutError, f"submit timed out after {seconds:g} s (owner: {owner})"
    elif isinstance(e, Refused):
        kind, text = RDMAInitError, f"no compatible RDMA backend for buffer {ident} of {owner}: {e}"
    else:
        text = f"{type(e).__name__}: {e} (owner: {owner})"
    error = kind(what + text, owner=owner, buffer_id=ident, op_index=index, backend=name)
    error.__cause__ = None if isinstance(e, (Dropped, Gone, Cancelled, Refused)) else e
    return error


def attempt(manager: Manager, op: Op, index: int, cancelled: Callable[[], bool], seconds: float) -> RDMAError | None:
    """Moves the bytes by the best path there is; may wait. The error, if any."""
    path = None
    try:
        while True:
            path = manager.path(op.handle) or manager.find_path(op.handle, cancelled)
            if cancelled():
                raise Cancelled
            try:
                if op.local.device == "cpu" and not op.handle.gpu:
                    path.run(op, cancelled)
                else:
                    _run_gpu(manager, path, op, cancelled)
                return None
            except Refused:
                manager.refuse(op.handle)
                if path.name in ("tcp", "relay"):
                    raise
            except Gone:
                manager.forget(op.handle)
                raise
    except Exception as e:
        return failure(manager, op, path, e, index, seconds)


def _run_gpu(manager: Manager, path: Path, op: Op, cancelled: Callable[[], bool]) -> None:
    if op.local.device == "cpu" and path.name in ("tcp", "relay"):
        path.run(op, cancelled)  # its owner stages it
        return
    from monarch.rdma import _cuda

    _cuda.run(manager.table, path, op, cancelled)


def start(manager: Manager, op: Op, timeout: float) -> Future[None]:
    """One transfer, begun now."""
    if op.nbytes == 0:
        return Future._of(None)
    if timeout == 0:
        return _failed(failure(manager, op, None, Cancelled(), 0, 0))
    path = None
    try:
        path = manager.path(op.handle)
        if path is not None and op.nbytes <= path.inline and op.local.device == "cpu" and not op.handle.gpu:
            try:
                path.run(op, never)
                return Future._of(None)
            except Refused:
                manager.refuse(op.handle)
    except Exception as e:
        return _failed(failure(manager, op, path, e, 0, timeout))
    return Job(manager, [op], timeout).begin().future


def start_all(manager: Manager, ops: Sequence[Op], plan: Plan, timeout: float) -> Future[None]:
    """All of `ops`, begun now; fails, when all are done or the time is up, with all that failed."""
    if sum(op.nbytes for op in ops) == 0:
        return Future._of(None)
    if timeout == 0:
        late = {i: failure(manager, op, None, Cancelled(), i, 0) for i, op in enumerate(ops) if op.nbytes}
        return _failed(_errors.together(late, len(ops)))
    quick = plan.quick(manager)
    if quick is not None and quick():
        return Future._of(None)
    return Job(manager, ops, timeout, together=True).begin().future


class Plan:
    """What an action has found out about how to run: kept while its queue does not change."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._runs: list[tuple[Op, Path, Callable[[], bool]]] | None = None
        self._small = sum(op.nbytes for op in ops)

    def quick(self, manager: Manager) -> Callable[[], bool] | None:
        """Runs everything on the caller's thread, if it is little and the paths allow; None otherwise."""
        runs = self._runs
        if runs is None or any(manager.path(op.handle) is not path for op, path, _ in runs):
            runs = self._runs = self._make(manager)
        if not runs:
            return None
        return lambda: all(run() for _, _, run in runs)

    def _make(self, manager: Manager) -> list[tuple[Op, Path, Callable[[], bool]]]:
        groups: dict[Path, list[Op]] = {}
        for op in self._ops:
            if op.nbytes:
                try:
                    path = manager.path(op.handle)
                except Exception:
                    return []
                if path is None or self._small > path.inline or op.local.device != "cpu" or op.handle.gpu:
                    return []
                groups.setdefault(path, []).append(op)
        runs = []
        for path, ops in groups.items():
            run = path.prepare(ops)
            if run is None:
                return []
            runs.append((ops[0], path, run))
        return runs


def _failed(error: RDMAError) -> Future[None]:
    future: Future[None] = Future._make()
    future._settle(error=error)
    return future


class Job:
    """Transfers on worker threads, one job for each owner, with one time limit for all."""

    def __init__(self, manager: Manager, ops: Sequence[Op], timeout: float, together: bool = False) -> None:
        self.manager, self.ops, self.timeout, self._together = manager, ops, timeout, together
        self.future: Future[None] = Future._make()
        self.failures: dict[int, RDMAError] = {}
        self._expired = False
        self._lock = threading.Lock()
        groups: dict[int, list[int]] = {}
        for i, op in enumerate(ops):
            if op.nbytes:
                groups.setdefault(op.handle.node, []).append(i)
        self._groups = list(groups.values())
        self._left = len(self._groups)
        self._pending = {i for g in self._groups for i in g}
        self._timer: Any = None

    def begin(self) -> Job:
        if self.timeout != math.inf:
            self._timer = self.manager.node.poller.call_later(self.timeout, self._expire)
        for group in self._groups:
            _work.submit(lambda group=group: self._run(group))  # type: ignore[misc]
        return self

    def _run(self, group: list[int]) -> None:
        done = self._run_together(group)
        for i in group:
            error = done[i] if i in done else attempt(self.manager, self.ops[i], i, self._is_expired, self.timeout)
            with self._lock:
                self._pending.discard(i)
                if error is not None:
                    self.failures[i] = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            if self._timer is not None:
                self._timer.cancel()
            self._finish()

    def _run_together(self, group: list[int]) -> dict[int, RDMAError | None]:
        """Small reads over sockets, without waiting for each answer before the next question."""
        small = [i for i in group if self._is_small_read(self.ops[i])]
        small = [i for i in small if self.ops[i].local.device == "cpu"]
        if len(small) < 2:
            return {}
        try:
            path = self.manager.path(self.ops[small[0]].handle)
            failed = path.run_many([self.ops[i] for i in small], self._is_expired) if path is not None else None
        except Exception:
            return {}  # one by one, each with its own error
        if failed is None:
            return {}
        out: dict[int, RDMAError | None] = dict.fromkeys(small)
        for at, e in failed.items():
            i = small[at]
            out[i] = failure(self.manager, self.ops[i], path, e, i, self.timeout)
        return out

    @staticmethod
    def _is_small_read(op: Op) -> bool:
        return not op.write and op.runs is None and op.nbytes <= _SMALL

    def _is_expired(self) -> bool:
        return self._expired

    def _expire(self) -> None:
        """On the runtime thread. What is under way stops at its next look; the caller is told now."""
        self._expired = True
        with self._lock:
            late = {i: failure(self.manager, self.ops[i], None, Cancelled(), i, self.timeout) for i in self._pending}
            self.failures = late | self.failures
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            failures = dict(self.failures)
        if not failures:
            self.future._settle(None)
        elif self._together:
            self.future._settle(error=_errors.together(failures, len(self.ops)))
        else:
            self.future._settle(error=failures[0])
