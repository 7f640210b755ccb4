"""Streams of a worker: one thread each, which carries out commands in order and turns failures into poisoned values."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from monarch.mesh import Slice
from monarch.runtime import cell
from monarch.tensor import codes
from monarch.tensor.codes import Failure

if TYPE_CHECKING:
    from monarch.tensor.worker.actor import Lane, Worker

log = logging.getLogger("monarch.tensor")


class Poison:
    """Stands in the table for a value that could not be computed."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


Handler = Callable[["WorkerStream", "Lane", Any, Any], Any]
#: code -> what carries the command out: (stream, lane, command, table)
handlers: dict[int, Handler] = {}


class WorkerStream:
    """See the module's text."""

    def __init__(self, worker: Worker, name: str, ident: int) -> None:
        self.worker, self.name, self.ident = worker, name, ident
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._queue.put
        run = contextvars.copy_context().run
        self.thread = threading.Thread(target=lambda: run(self._main), name=f"monarch-stream-{name}", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        take = self._queue.get
        torch.set_grad_enabled(False)
        if torch.cuda.is_available() and self.name != "main":
            torch.cuda.set_stream(torch.cuda.Stream())
        while True:
            item = take()
            if item is None:
                return
            try:
                if type(item) is tuple:
                    start, commands, lane = item
                    self.execute(start, commands, lane, self.worker.table)
                    del start, commands, lane
                else:
                    item()
            except BaseException:  # a fault of ours: the thread must live on to answer
                log.exception("stream %s", self.name)
            item = None

    def execute(self, start: int, commands: list[Any], lane: Lane, table: dict[int, Any]) -> None:
        """Carries out commands; a failing one poisons what it defines or writes."""
        templates = self.worker.templates
        c: Any = None
        for n, c in enumerate(commands):
            if c[4]:
                for d in c[4]:
                    table.pop(d, None)
            code = c[0]
            if code < 0:
                if code != codes.DELETE:
                    self._special(start + n, lane, c, table)
                continue
            try:
                result = templates[code].call(table, c[2], c[5] if len(c) > 5 else None)
            except BaseException as e:
                self._failed(e, start + n, c, templates[code].mutated, table)
                del e
                continue
            outs = c[3]
            if outs:
                if len(outs) == 1:
                    if type(result) in (list, tuple):
                        result = result[0]
                    table[outs[0]] = result
                else:
                    for i, x in zip(outs, _flat(result)):
                        if i:
                            table[i] = x

    def _special(self, order: int, lane: Lane, c: Any, table: dict[int, Any]) -> None:
        try:
            handlers[c[0]](self, lane, c, table)
        except BaseException as e:
            self._failed(e, order, c, c[7] if c[0] == codes.CALL else (), table)

    def _failed(self, e: BaseException, order: int, c: Any, mutated: Any, table: dict[int, Any]) -> None:
        poison = next((v for i in c[2] if isinstance(v := table.get(i), Poison)), None)
        if poison is None:
            user_part(e)
            if c[0] == codes.CALL and cell.fetch_sources is not None:
                cell.fetch_sources(e)
            text = "".join(traceback.format_exception(e))
            failure = Failure(order, c[1], self.worker.rank, text)
            self.worker.failures.append(failure)
            poison = Poison(failure)
        self.poison(c, mutated, poison, table)

    def poison(self, c: Any, mutated: Any, poison: Poison, table: dict[int, Any]) -> None:
        """Makes the results of a command, and everything that shares memory with what it writes, errors."""
        for i in c[3]:
            if i:
                table[i] = poison
        for m in mutated:
            self.poison_aliases(c[2][m], poison, table)

    def poison_aliases(self, ident: int, poison: Poison, table: dict[int, Any]) -> None:
        value = table.get(ident)
        table[ident] = poison
        if not isinstance(value, torch.Tensor):
            return
        where = value.untyped_storage()._cdata
        for tab in {id(table): table, id(self.worker.table): self.worker.table}.values():
            for i, x in list(tab.items()):
                if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == where:
                    tab[i] = poison


def user_part(e: BaseException) -> BaseException:
    """The exception with the traceback from where code of the user, or torch, begins."""
    from monarch.tensor.worker import streams

    tb = e.__traceback__
    own = streams.__file__.rsplit("/", 1)[0]
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith((own, "<string>")):
        tb = tb.tb_next
    return e.with_traceback(tb)


def _flat(result: Any) -> list[Any]:
    out: list[Any] = []
    for x in result:
        if isinstance(x, (list, tuple)):
            out.extend(x)
        else:
            out.append(x)
    return out


# -- small commands


def _constant(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    # in-place operations write into the value: it must be this worker's own
    table[c[3][0]] = c[5].clone()


def _rank(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    (labels, offset, sizes, strides), names = c[5], c[6]
    rank = stream.worker.rank
    if names is not None:
        where = Slice(offset=offset, sizes=list(sizes), strides=list(strides)).coordinates(rank)
        rank = 0
        for name in names:
            at = labels.index(name)
            rank = rank * sizes[at] + where[at]
    table[c[3][0]] = torch.tensor(rank)


handlers[codes.CONSTANT] = _constant
handlers[codes.RANK] = _rank
