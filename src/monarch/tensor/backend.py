"""Workers as actors: the backend of engines on process meshes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from monarch.actor import ActorMesh, ProcMesh, send
from monarch.mesh import Shape, Slice
from monarch.runtime.client import current_node
from monarch.runtime.future import Future
from monarch.runtime.node import new_id
from monarch.tensor.engine import Batch, mapped


class ActorBackend:
    """One `Worker` actor on each process of `procs`."""

    def __init__(self, procs: ProcMesh, name: str) -> None:
        from monarch.tensor.worker.actor import Worker

        self.ident = new_id()
        labels = list(procs._labels)
        local = "gpus" if "gpus" in labels else "gpu"
        self.mesh: Any = procs.spawn(name, Worker, self.ident, tuple(procs._ndslice), local, {})
        self._node = current_node()
        self._parts: dict[Slice, Any] = {}
        self.mesh.ask.call(([], []), ("barrier",)).get()

    def _part(self, ranks: Slice | None) -> Any:
        if ranks is None:
            return self.mesh
        part = self._parts.get(ranks)
        if part is None:
            whole: ActorMesh[Any] = self.mesh
            labels = [f"d{i}" for i in range(ranks.ndim)]
            part = self._parts[ranks] = whole._new_with_shape(Shape(labels, ranks))
        return part

    def post(self, batch: Batch, ranks: Slice | None) -> None:
        self._part(ranks).run.broadcast(batch)

    def ask(self, batch: Batch, ranks: Slice | None, question: tuple[Any, ...]) -> Future[list[Any]]:
        answers = self._part(ranks).ask.call(batch, question)
        return mapped(answers, lambda mesh: list(mesh.values()))

    def ask_each(self, batch: Batch, ranks: Slice | None, question: tuple[Any, ...]) -> Iterator[Future[Any]]:
        answers: Iterator[Future[Any]] = self._part(ranks).ask.stream(batch, question)
        return answers

    def ask_port(self, batch: Batch, ranks: Slice | None, question: tuple[Any, ...], port: Any) -> None:
        send(self._part(ranks).ask, (batch, question), {}, port=port)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._node.poller.call_later(seconds, callback)

    def open_store(self) -> tuple[str, int]:
        first = self._part(Slice(offset=0, sizes=[], strides=[]))
        found: tuple[str, int] = first.open_store.call_one(self._store_host()).get()
        return found

    def handle(self) -> Any:
        return self.mesh

    def host_name(self, index: int) -> str:
        hosts = self.mesh._placement.hosts
        return socket.gethostname() if len(hosts) == 1 else f"host{index}"

    def _store_host(self) -> str:
        placement = self.mesh._placement
        if len(placement.hosts) == 1:
            return "127.0.0.1"
        return ""

    def close(self) -> None:
        try:
            self.mesh.stop("the tensor engine was shut down").get(timeout=30)
        except NotImplementedError:
            pass
