"""Copies between workers, and between streams of one worker.

Values travel as messages between the workers (through shared memory on one host): a sender never waits for its
receiver, so two workers that send to each other cannot block each other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from monarch.tensor import codes
from monarch.tensor.worker.comms import PATIENCE
from monarch.tensor.worker.streams import Poison, handlers

if TYPE_CHECKING:
    from monarch.tensor.worker.actor import Lane
    from monarch.tensor.worker.streams import WorkerStream


class Mailbox:
    """Values on their way to streams of this worker, by token."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self._changed = threading.Condition()

    def put(self, token: Any, value: Any) -> None:
        with self._changed:
            self._values[token] = value
            self._changed.notify_all()

    def take(self, token: Any, keep: bool = False) -> Any:
        """Waits for a value. TimeoutError when it does not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: token in self._values, PATIENCE.total_seconds()):
                raise TimeoutError("the value did not arrive from the worker that sends it")
            return self._values[token] if keep else self._values.pop(token)

    def discard(self, token: Any) -> None:
        with self._changed:
            self._values.pop(token, None)


def _send(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    value = table[c[2][0]]
    token, pairs = c[5], c[6]
    worker = stream.worker
    for sender, receiver in pairs:
        if sender != worker.rank:
            continue
        if receiver == sender:
            kept = value.failure if isinstance(value, Poison) else value.clone(memory_format=torch.contiguous_format)
            worker.mailbox.put(token, kept)
        else:
            sent = value.failure if isinstance(value, Poison) else value.cpu().contiguous()
            worker.peer(receiver).deliver.broadcast(token, sent)


def _receive(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    token, device = c[5], c[7]
    value = stream.worker.mailbox.take(token)
    if isinstance(value, codes.Failure):
        table[c[3][0]] = Poison(value)
    else:
        table[c[3][0]] = value if device == "cpu" else value.to(device)


class Loan:
    """A borrow, as its worker sees it."""

    def __init__(self) -> None:
        self.lent, self.back = threading.Event(), threading.Event()
        self.value: Any = None
        self.poison: Any = None
        self.mark: Any = None  #: CUDA event of the side that went on last


def _loan(stream: WorkerStream, ident: int) -> Loan:
    worker = stream.worker
    with worker.borrow_lock:
        found = worker.borrows.get(ident)
        if found is None:
            found = worker.borrows[ident] = Loan()
        return found


def _mark(loan: Loan, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_cuda:
        loan.mark = torch.cuda.Event()
        loan.mark.record()


def _lend(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    loan = _loan(stream, c[5])
    loan.value = table.get(c[2][0])
    _mark(loan, loan.value)
    loan.lent.set()


def _wait(event: threading.Event, loan: Loan) -> None:
    if not event.wait(PATIENCE.total_seconds()):
        raise TimeoutError("the other stream of a borrow did not get there")
    if loan.mark is not None:
        torch.cuda.current_stream().wait_event(loan.mark)


def _take(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    loan = _loan(stream, c[5])
    _wait(loan.lent, loan)
    table[c[3][0]] = loan.value


def _give_back(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    loan = _loan(stream, c[5])
    found = table.get(c[2][0]) if c[2] else None
    loan.poison = found if isinstance(found, Poison) and c[6] else None
    _mark(loan, loan.value)
    loan.back.set()


def _resume(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    ident, used = c[5], c[6]
    loan = _loan(stream, ident)
    if used:
        _wait(loan.back, loan)
        if loan.poison is not None:
            stream.poison_aliases(c[2][0], loan.poison, table)
    with stream.worker.borrow_lock:
        stream.worker.borrows.pop(ident, None)


handlers[codes.SEND] = _send
handlers[codes.RECEIVE] = _receive
handlers[codes.LEND] = _lend
handlers[codes.TAKE] = _take
handlers[codes.GIVE_BACK] = _give_back
handlers[codes.RESUME] = _resume
