"""The actor in each worker process: takes batches of commands, hands them to streams, answers questions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from monarch.actor import Actor, endpoint
from monarch.mesh import Shape, Slice
from monarch.tensor.codes import Failure
from monarch.tensor.worker import calls, comms, reductions
from monarch.tensor.worker.moves import Mailbox
from monarch.tensor.worker.streams import Poison, WorkerStream
from monarch.tensor.worker.templates import Template
from monarch.wire import pickling

#: engine id -> the worker of that engine in this process
workers: dict[int, Worker] = {}


class Lane:
    """A mesh and a stream, as one worker sees them."""

    __slots__ = ("issued", "layout", "stream")

    def __init__(self, layout: tuple[Any, ...], stream: WorkerStream) -> None:
        self.layout, self.stream = layout, stream
        self.issued = 0  #: number of the last command that was given to it


class Worker(Actor):
    """Executes the operations of one engine. `ident`: the engine's id; `rank`: of this worker, of `size`."""

    def __init__(self, ident: int, ranks: tuple[int, ...], local_dim: str, env: dict[str, str]) -> None:
        from monarch.actor import context

        instance = context().actor_instance
        self.rank = instance.rank.rank
        self.world = len(ranks)
        self.ident = ident
        self.table: dict[int, Any] = {}
        self.templates: dict[int, Template] = {}
        self.functions: dict[int, Any] = {}
        self.recordings: dict[int, Any] = {}
        self.groups: dict[Any, Any] = {}
        self.mailbox = Mailbox()
        self.borrows: dict[int, Any] = {}
        self.borrow_lock = threading.Lock()
        self.objects: dict[int, Any] = {}
        self.store: Any = None  #: the store through which communicators meet, on the worker that has it
        self.store_address: tuple[str, int] | None = None
        self.peers: Any = None
        self._peers: dict[int, Any] = {}
        self.lanes: dict[int, Lane | None] = {}
        self.streams: dict[int, WorkerStream] = {}
        self.failures: list[Failure] = []
        _set_environment(self.rank, self.world, instance.rank, local_dim, env)
        torch.seed()
        workers[ident] = self

    @endpoint
    def run(self, batch: Any) -> None:
        self.take(batch)

    @endpoint(explicit_response_port=True)
    def ask(self, port: Any, batch: Any, question: tuple[Any, ...]) -> None:
        self.take(batch)
        kind, *rest = question
        if kind in ("call", "propagate"):
            lane = self.lanes[rest[0]]
            rest.insert(0, 0 if lane is None else lane.issued)
        to_port = kind == "call" and isinstance(rest[-1], list)
        getattr(self, f"_ask_{kind}")(port if to_port else port.send, *rest)

    @endpoint
    def open_store(self, host: str) -> tuple[str, int]:
        """Starts the store through which communicators meet."""
        return comms.open_store(self, host)

    @endpoint
    def deliver(self, token: Any, value: Any) -> None:
        """Takes a value that another worker sends."""
        self.mailbox.put(token, value)

    def peer(self, rank: int) -> Any:
        found = self._peers.get(rank)
        if found is None:
            shape = Shape([], Slice(offset=rank, sizes=[], strides=[]))
            found = self._peers[rank] = self.peers._new_with_shape(shape)
        return found

    def __cleanup__(self, exc: Exception | None) -> None:
        for stream in self.streams.values():
            stream.put(None)
        workers.pop(self.ident, None)

    # -- commands

    def take(self, batch: Any) -> None:
        definitions, segments = batch
        for d in definitions:
            getattr(self, f"_define_{d[0]}")(*d[1:])
        lanes = self.lanes
        for ident, start, commands in segments:
            lane = lanes[ident]
            if lane is not None:
                lane.issued = start + len(commands)
                lane.stream.put((start, commands, lane))

    def _define_op(self, tid: int, template: bytes) -> None:
        self.templates[tid] = Template(*pickling.loads(template))

    def _define_stream(self, ident: int, name: str) -> None:
        self.streams[ident] = WorkerStream(self, name, ident)

    def _define_lane(self, ident: int, stream: int, layout: tuple[Any, ...]) -> None:
        _, offset, sizes, strides = layout
        member = self.rank in Slice(offset=offset, sizes=list(sizes), strides=list(strides))
        self.lanes[ident] = Lane(layout, self.streams[stream]) if member else None

    def _define_function(self, ident: int, function: Any) -> None:
        self.functions[ident] = function

    def _define_store(self, host: str, port: int) -> None:
        self.store_address = (host, port)

    def _define_peers(self, mesh: Any) -> None:
        self.peers = mesh

    def _define_recording(self, ident: int, recording: Any) -> None:
        self.recordings[ident] = recording

    # -- questions

    def _ask_fetch(self, reply: Callable[[Any], None], lane: int, rank: int, ids: list[int]) -> None:
        here = self.lanes[lane]
        if here is None:  # does not take part
            return reply(None)

        def answer() -> None:
            values = [self.table.get(i) for i in ids]
            for v in values:
                if isinstance(v, Poison):
                    return reply(v.failure)
            if rank != self.rank:
                return reply(None)
            reply([_to_client(v) for v in values])

        here.stream.put(answer)

    def _ask_call(
        self, reply: Callable[[Any], None], order: int, lane: int, fid: int, data: bytes, ids: Any, mutated: Any,
        site: int, only: Any = None,
    ) -> None:  # fmt: skip
        here = self.lanes[lane]
        if here is None:
            return reply(None)
        frames = only if isinstance(only, list) else None
        if frames is not None:  # the answer goes to a port of the user
            reply, only = calls.for_port(reply, frames), None
        calls.ask_call(self, reply, here.stream, fid, data, ids, mutated, site, order, only)

    def _ask_propagate(
        self, reply: Callable[[Any], None], number: int, lane: int, fid: int, data: bytes, ids: Any, order: Any,
        site: int,
    ) -> None:  # fmt: skip
        here = self.lanes[lane]
        if here is None:
            return reply(None)
        calls.ask_propagate(self, reply, here.stream, fid, data, ids, order, site, number)

    def _ask_finish(self, reply: Callable[[Any], None]) -> None:
        self.when_all_done(lambda: reply(min(self.failures, default=None, key=lambda f: f.order)))

    def _ask_barrier(self, reply: Callable[[Any], None]) -> None:
        self.when_all_done(lambda: reply(None))

    def when_all_done(self, then: Callable[[], None]) -> None:
        """Calls `then` once every stream has done what it was given so far."""
        streams = list(self.streams.values())
        left = len(streams)
        if not left:
            return then()
        lock = threading.Lock()

        def one() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                then()

        for s in streams:
            s.put(one)


_handlers = reductions


def _to_client(v: Any) -> Any:
    return v.detach().cpu() if isinstance(v, torch.Tensor) else v


def _set_environment(rank: int, size: int, point: Any, local_dim: str, env: dict[str, str]) -> None:
    extent = point.extent
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_dim in extent.labels:
        local, local_size = point[local_dim], extent.sizes[extent.labels.index(local_dim)]
    else:
        local_size = devices or size
        local = rank % local_size
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(local_size),
        CUDA_VISIBLE_DEVICES=str(local), NCCL_IGNORE_TOPO_LOAD_FAILURE="true", **env,
    )  # fmt: skip
    os.environ.setdefault("NCCL_HOSTID", f"{os.uname().nodename}_{rank // local_size}")
