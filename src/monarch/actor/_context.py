"""Where code runs: the actor, its rank, its process, its creator."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from monarch.actor._names import ActorAddr
from monarch.mesh import Extent, Point
from monarch.runtime.cell import Cell
from monarch.runtime.client import Root, current_here
from monarch.runtime.node import RANK_MASK

if TYPE_CHECKING:
    from monarch.actor._procs import ProcMesh


class CreatorInstance:
    """Who spawned an actor: a picklable link of the chain up to the root."""

    def __init__(
        self, name: str, class_name: str | None, rank: Point, proc: ProcMesh | None, proc_mesh: ProcMesh | None,
        creator: CreatorInstance | None, display: str,
    ) -> None:  # fmt: skip
        self.name, self.class_name, self.rank = name, class_name, rank
        self.proc, self.proc_mesh, self.creator = proc, proc_mesh, creator
        self._display = display

    def __str__(self) -> str:
        return self._display

    __repr__ = __str__

    def __reduce__(self) -> Any:
        return CreatorInstance, (
            self.name, self.class_name, self.rank, self.proc, self.proc_mesh, self.creator, self._display,
        )  # fmt: skip


class Instance:
    """The running actor, as `context().actor_instance`. Not picklable."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._is_root = isinstance(cell, Root)

    @property
    def rank(self) -> Point:
        """Position in the mesh it was spawned on; `{}` for the client."""
        spec = self._cell.spec
        return Point(self._cell.rank, Extent(list(spec.labels), list(spec.sizes)))

    @property
    def name(self) -> str:
        return self._cell.spec.name

    @property
    def class_name(self) -> str | None:
        return self._cell.spec.class_name or None

    @property
    def actor_id(self) -> ActorAddr:
        cell = self._cell
        node = cell.node
        address = node.address or f"{socket.gethostname()}"
        suffix = cell.spec.full_name.rpartition("-")[2]
        label = cell.spec.full_name.rpartition("-")[0] or "client"
        return ActorAddr(addr=address, proc_name=self._proc_name(), actor_name=f"{label}<{suffix}>")

    def _proc_name(self) -> str:
        node = self._cell.node
        return f"{node.name}<{node.id:x}>"

    @property
    def proc_id(self) -> str:
        """The process's identity: `<name>-<rank>` and a unique suffix."""
        return f"{self._proc_name()}@{self._cell.node.address}"

    @property
    def proc(self) -> ProcMesh:
        """The process it runs in, as a zero-dimensional proc mesh (a reference)."""
        from monarch.actor._procs import own_proc

        return own_proc()

    @property
    def proc_mesh(self) -> ProcMesh:
        """The proc mesh it was spawned on (a reference)."""
        mesh: ProcMesh | None = self._cell.spec.mesh
        return self.proc if mesh is None else mesh

    @property
    def creator(self) -> CreatorInstance | None:
        found: CreatorInstance | None = self._cell.spec.creator
        return found

    def as_creator(self) -> CreatorInstance:
        spec = self._cell.spec
        return CreatorInstance(spec.name, self.class_name, self.rank, self.proc, spec.mesh, spec.creator, str(self))

    def stop(self, reason: str | None = None) -> None:
        """Ends this actor cleanly; the running call may still answer."""
        self._end(reason or "the actor stopped itself", False)

    def abort(self, reason: str | None = None) -> None:
        """Fails this actor: its owner is told. The running call may still answer."""
        self._end(f"actor aborted: {reason or 'no reason provided'}", True)

    kill = abort

    def _end(self, reason: str, failed: bool) -> None:
        end_now = getattr(self._cell, "end_now", None)
        if end_now is None:
            raise RuntimeError("the client cannot be stopped like an actor; use shutdown_context()")
        end_now(reason, failed)

    def __str__(self) -> str:
        return self._cell.display

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle the running actor's Instance; send .creator, .proc or .actor_id")


class Context:
    """What `context()` returns: the actor that runs, and the rank of its message in the handle that was called."""

    __slots__ = ("_labels", "_rank", "_sizes", "actor_instance")

    def __init__(self, instance: Instance, labels: tuple[str, ...], sizes: tuple[int, ...], rank: int) -> None:
        self.actor_instance = instance
        self._labels, self._sizes, self._rank = labels, sizes, rank

    @property
    def message_rank(self) -> Point:
        return Point(self._rank, Extent(list(self._labels), list(self._sizes)))

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a Context; send the values it holds")


def context() -> Context:
    """The context of the running code. In the user's script: the root client, made on first use."""
    now = current_here()
    cell = now.cell
    if cell.instance is None:
        cell.instance = Instance(cell)
    return Context(cell.instance, now.labels, now.sizes, now.rank)


def current_rank() -> Point:
    """The rank of the running message in the handle it was sent through."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The dimensions of the handle the running message was sent through."""
    now = current_here()
    return dict(zip(now.labels, now.sizes, strict=True))


def current_actor_name() -> str:
    """The identity of the running actor, as text."""
    return str(context().actor_instance.actor_id)


_unused = RANK_MASK
