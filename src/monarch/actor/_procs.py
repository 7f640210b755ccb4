"""Handles of process meshes: spawn actors on them, slice them, stop them."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from monarch.actor import _mock
from monarch.actor._actor import validate
from monarch.actor._endpoint import _signature, dump_call
from monarch.actor._mesh import ActorMesh, StopWait
from monarch.actor._names import label_of, suffix
from monarch.config import store
from monarch.mesh import MeshTrait, Shape, Slice
from monarch.runtime import client
from monarch.runtime.calls import ManyCall
from monarch.runtime.cell import SURELY_FITS, Owned, check_size
from monarch.runtime.child import react_to_death
from monarch.runtime.client import current_here, current_host, current_node
from monarch.runtime.failure import Exit
from monarch.runtime.future import Future
from monarch.runtime.node import RANK_MASK, Host, Node, NodeDown, new_id
from monarch.runtime.ports import link_ports
from monarch.wire import pickling
from monarch.wire.frames import CONTROL, ERROR, Frame

T = TypeVar("T")

_futures: dict[int, Future[Any]] = {}  # proc mesh id -> when its processes are ready; in the owner's process


class Placement:
    """Which process each rank of an actor mesh lives in. Compact: computed, not listed."""

    __slots__ = ("_dense", "base", "hosts", "per_host", "ranks")

    def __init__(self, base: int, hosts: tuple[Host, ...], per_host: int, ranks: Slice) -> None:
        self.base, self.hosts, self.per_host, self.ranks = base, hosts, per_host, ranks
        self._dense = ranks.offset == 0 and ranks == Slice.new_row_major(list(ranks.sizes))

    def node(self, rank: int) -> int:
        return self.base | (rank if self._dense else self.ranks[rank])

    def rank_of(self, node: int) -> int:
        proc = node & RANK_MASK
        return proc if self._dense else self.ranks.index(proc)

    def host_of(self, node: int) -> Host:
        hosts = self.hosts
        return hosts[0] if len(hosts) == 1 else hosts[(node & RANK_MASK) // self.per_host]

    def ready(self) -> Future[Any] | None:
        return _futures.get(self.base)

    def __reduce__(self) -> Any:
        return _rebuild_placement, (self.base, tuple(map(tuple, self.hosts)), self.per_host, self.ranks)


def _rebuild_placement(base: int, hosts: tuple[tuple[Any, ...], ...], per_host: int, ranks: Slice) -> Placement:
    return Placement(base, tuple(Host(*h) for h in hosts), per_host, ranks)


class SpawnWait(ManyCall):
    """Waits until every process of a mesh is ready; the loss of a host fails it too."""

    hosts: tuple[Host, ...] = ()

    def failed(self) -> bool:
        """After it settled: some process did not start."""
        return self.future._error is not None or any(f is not None and f.flags & ERROR for f in self.frames)

    def node_down(self, node: int, exit: Exit) -> None:
        if any(h.agent == node for h in self.hosts):
            self._close()
            self.future._settle(error=RuntimeError(exit.describe()))
        else:
            super().node_down(node, exit)


class ProcMesh(MeshTrait):
    """Processes, one per rank. Made by `HostMesh.spawn_procs`; a slice or a copy is a reference."""

    def __init__(
        self,
        base: int,
        name: str,
        hosts: tuple[Host, ...],
        per_host: int,
        shape: Shape,
        host_dims: tuple[str, ...] = (),
        owned: Owned | None = None,
        root: Shape | None = None,
    ) -> None:
        self._root = shape if root is None else root  #: of all processes that were spawned together
        self._base, self._proc_name, self._hosts, self._per_host = base, name, hosts, per_host
        self._shape = shape
        self._host_dims = host_dims
        self._owned = owned
        self._stop_future: Future[None] | None = None
        self._commands: Any = None

    # -- mesh

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Sequence[str]:
        return self._shape.labels

    def _new_with_shape(self, shape: Shape) -> ProcMesh:
        if shape == self._shape:
            return self
        return self._with_shape(shape)

    def _with_shape(self, shape: Shape) -> ProcMesh:
        return ProcMesh(
            self._base, self._proc_name, self._hosts, self._per_host, shape, self._host_dims, root=self._root
        )

    def __reduce__(self) -> Any:
        return _rebuild, (
            self._base, self._proc_name, tuple(map(tuple, self._hosts)), self._per_host, self._shape, self._host_dims,
            None if self._root == self._shape else self._root,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"ProcMesh(name={self._proc_name}, shape={self._shape})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcMesh):
            return NotImplemented
        return self._base == other._base and self._shape == other._shape

    def __hash__(self) -> int:
        return hash((self._base, self._shape))

    @property
    def name(self) -> str:
        return self._proc_name

    @property
    def host_mesh(self) -> Any:
        """The hosts these processes run on, one element per host."""
        from monarch.actor._hosts import HostMesh

        used = sorted({r // self._per_host for r in self._shape.ndslice}) if len(self._hosts) > 1 else [0]
        hosts = tuple(self._hosts[i] for i in used)
        if len(hosts) == 1:
            return HostMesh(hosts, Shape([], Slice(offset=0, sizes=[], strides=[])))
        return HostMesh(hosts, Shape(["hosts"], Slice.new_row_major([len(hosts)])))

    def _nodes(self) -> dict[int, int]:
        return {self._base | rank: rank for rank in self._shape.ndslice}

    # -- actors

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> T:
        """Starts one actor of `Class` on each process; returns at once with their mesh (typed as `Class`).

        `__init__` gets the arguments and runs before the first message. Raises TypeError for arguments that do not
        fit, ValueError for a class that cannot be an actor, what pickling raises for arguments that cannot be sent,
        RuntimeError when the processes were stopped (or, with `refuse_spawn_on_failed_procs`, when an actor that this
        program owns failed on one of them).
        """
        if not isinstance(name, str):
            raise TypeError(f"spawn: name must be a string, not {type(name).__name__}")
        actual = _mock.get_actor_class(Class)
        is_async = validate(actual)
        init = actual.__init__
        sig = _signature(init, 1) if init is not object.__init__ else None
        if sig is not None:
            try:
                sig.bind(*args, **kwargs)
            except TypeError as e:
                raise TypeError(f"{actual.__name__}.__init__{sig}: {e}") from None
        elif args or kwargs:
            raise TypeError(f"{actual.__name__}.__init__() takes no arguments, {len(args) + len(kwargs)} given")
        if self._stop_future is not None:
            raise RuntimeError("`ProcMesh` has already been stopped")
        try:
            payload = pickling.dumps((actual, args, kwargs))
        except Exception:
            dump_call(args, kwargs, f"{actual.__name__}.__init__")
            raise
        now = current_here()
        cell, node = now.cell, current_node()
        labels, sizes = tuple(self._shape.labels), tuple(self._shape.ndslice.sizes)
        ident = new_id()
        full_name = f"{label_of(name)}-{suffix()}"
        class_name = f"{actual.__module__}.{actual.__qualname__}"
        from monarch.actor._context import Instance

        if cell.instance is None:
            cell.instance = Instance(cell)
        creator = None if cell.id == client.ROOT_ACTOR else cell.instance.as_creator()
        spec = (
            name, full_name, class_name, labels, sizes, node.id, tuple(current_host()), cell.id, cell.display, creator,
            is_async, self._new_reference(),
        )  # fmt: skip
        body = pickling.dump_bytes(("spawn", *spec))
        placement = Placement(self._base, self._hosts, self._per_host, self._shape.ndslice)
        shape = Shape(list(labels), Slice.new_row_major(list(sizes)))
        mesh: ActorMesh[T] = ActorMesh(actual, name, full_name, ident, placement, shape, cell.display, (labels, sizes))
        ranks = mesh._node_ranks()
        if store.effective("refuse_spawn_on_failed_procs"):
            poisoned = sorted(rank for n, rank in ranks.items() if n in node.tree.poisoned)
            if poisoned:
                raise RuntimeError(
                    f"error spawning actor mesh {name!r}: Cannot spawn new actors on mesh with supervision events: an "
                    f"actor failed on ranks {poisoned}. Spawn on a slice without them or on new processes, or leave "
                    "refuse_spawn_on_failed_procs off"
                )

        def stop(reason: str) -> Future[None]:
            return cell.stop_mesh(ident, lambda: mesh._stop(reason, node))

        mesh._owned = Owned(full_name, mesh._display, stop, mesh)
        if payload.nbytes > SURELY_FITS:
            check_size(payload, cell, None)
        if payload.passengers:
            link_ports(payload.passengers, [(n, ident) for n in ranks], placement.host_of)
        cell.own(ident, ranks, placement.host_of, False, mesh._owned)
        template = Frame(CONTROL, 0, node.id, ident, (b"", body, payload.stream(), *payload.buffers), sender=cell.id)
        for gone, exit in node.cast(list(ranks.items()), template, placement.host_of):
            mesh._unplaced[gone] = exit
            react_to_death(node, gone, exit)
        return cast(T, mesh)

    def _new_reference(self) -> ProcMesh:
        return self._with_shape(self._shape)

    # -- lifetime

    @property
    def initialized(self) -> Future[bool]:
        """True when every process is up and its bootstrap callable is done; raises what went wrong."""
        future = _futures.get(self._base)
        if future is None:
            return Future._of(True)
        out: Future[bool] = Future._make()

        def copy() -> None:
            out._settle_lazily(lambda: (future._result(), True)[1])

        future._on_ready(copy)
        return out

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Ends the processes: actors' cleanup first, then SIGTERM, then SIGKILL. They are gone when it is done.

        Idempotent. ValueError on slices and references.
        """
        if self._owned is None:
            raise ValueError(
                "ProcMesh is not owned; must be stopped by an owner: this handle is a slice or a reference"
            )
        return self._owned.stop(reason)

    def _stop(self, reason: str, node: Node) -> Future[None]:
        if self._stop_future is None:
            wait = StopWait(node, self._nodes())
            self._stop_future = wait.future
            _futures.pop(self._base, None)
            by_host: dict[Host, list[int]] = {}
            placement = Placement(self._base, self._hosts, self._per_host, self._shape.ndslice)
            for n in self._nodes():
                by_host.setdefault(placement.host_of(n), []).append(n)
            for host, nodes in by_host.items():
                answer = _HostStopped(wait, nodes, host.agent)
                answer.ident = node.open_port(answer)
                frame = node.control_frame(host.agent, "stop_procs", nodes, reason, reply=answer.ident)
                try:
                    node.send(frame, host)
                except NodeDown as e:
                    answer.node_down(host.agent, e.exit)
        return self._stop_future

    async def __aenter__(self) -> ProcMesh:
        if self._stop_future is not None:
            raise RuntimeError("`ProcMesh` has already been stopped")
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if self._stop_future is None:
            await self.stop()

    # -- the rest of the compatible surface

    def activate(self) -> Any:
        """Torch operations inside `with procs.activate():` run on every process; see `monarch.tensor`.

        Starts the tensor engine on first use. RuntimeError with USE_TENSOR_ENGINE=0, or for a stopped mesh.
        """
        return self._tensors("activate").activate()

    def rank_tensor(self, dim: str | Sequence[str]) -> Any:
        """Each process's coordinate along `dim` as a distributed 0-d int64 tensor; needs an active mesh."""
        return self._tensors("rank_tensor").rank(dim)

    def rank_tensors(self) -> dict[str, Any]:
        """`rank_tensor` of each dimension, by name."""
        found: dict[str, Any] = self._tensors("rank_tensors").ranks
        return found

    def to_table(self) -> str:
        """The mesh as a text grid, one cell per process."""
        return str(self._tensors("to_table").to_table())

    def _tensors(self, what: str) -> Any:
        """The device mesh of these processes. The tensor engine lies above this layer, so it is looked up by name."""
        if os.environ.get("USE_TENSOR_ENGINE", "1") == "0":
            raise RuntimeError(f"ProcMesh.{what}() needs the tensor engine, which is off: USE_TENSOR_ENGINE=0")
        return importlib.import_module("monarch.tensor.procs").device_mesh(self)

    async def logging_option(
        self,
        stream_to_client: bool = False,
        aggregate_window_sec: int | None = None,
        level: int = logging.INFO,
    ) -> None:
        """Sets the level of the root logger in every process. ValueError for a level outside 0..255.

        Output of processes on this host already appears on the client's own streams.
        """
        if not 0 <= level <= 255:
            raise ValueError(f"Invalid logging level: {level}")
        if aggregate_window_sec is not None and not stream_to_client:
            raise RuntimeError("cannot set aggregate window without streaming to client")
        if stream_to_client and not store.effective("enable_log_forwarding"):
            warnings.warn(
                "stream_to_client=True has no effect: log forwarding is disabled "
                "(configure(enable_log_forwarding=True) before spawn_procs)",
                UserWarning,
                stacklevel=2,
            )
        from monarch.actor._logs import LevelSetter

        await cast(Any, self.spawn("logger", LevelSetter)).set_level.call(level)

    async def sync_workspace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("use HostMesh.sync_workspace: code is synchronised per host, not per process")


class _HostStopped(StopWait):
    """One host's part of a stop: all its processes are gone when the agent says so."""

    def __init__(self, whole: StopWait, nodes: list[int], host: int) -> None:
        self.whole, self.nodes, self.host = whole, nodes, host
        self.node = whole.node
        self.ident = 0

    def deliver(self, frame: Frame) -> None:
        self.node.close_port(self.ident)
        for n in self.nodes:
            self.whole.done(n & RANK_MASK)

    def node_down(self, node: int, exit: Exit) -> None:
        if node == self.host:
            self.deliver(Frame(0, 0, 0))

    def node_down_all(self, reason: str) -> None:
        self.deliver(Frame(0, 0, 0))


def _rebuild(
    base: int, name: str, hosts: tuple[tuple[Any, ...], ...], per_host: int, shape: Shape, host_dims: tuple[str, ...],
    root: Shape | None = None,
) -> ProcMesh:  # fmt: skip
    return ProcMesh(base, name, tuple(Host(*h) for h in hosts), per_host, shape, host_dims, root=root)


def own_proc() -> ProcMesh:
    """The process this code runs in, zero-dimensional."""
    node = current_node()
    host = current_host()
    rank = node.id & RANK_MASK
    shape = Shape([], Slice(offset=rank, sizes=[], strides=[]))
    return ProcMesh(node.id & ~RANK_MASK, node.name, (host,), 1 << 24, shape)


_callbacks: list[Callable[[ProcMesh], None]] = []


def register_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """`callback` gets each new ProcMesh before `spawn_procs` returns it, in registration order."""
    _callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """ValueError when it was not registered."""
    if callback not in _callbacks:
        raise ValueError(f"{callback!r} is not a registered spawn callback")
    _callbacks.remove(callback)


def get_active_proc_meshes() -> list[ProcMesh]:
    """Meshes owned by code of this process and not stopped."""
    node = current_node()
    with node.tree.lock:
        return [m.handle.mesh for cell in node.cells for m in node.tree.owned_by(cell) if m.is_procs]
