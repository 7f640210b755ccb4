"""Handles of actor meshes: what `spawn` returns, what slices and messages carry."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch.actor._endpoint import Endpoint, EndpointProperty, NotAnEndpoint
from monarch.mesh import MeshTrait, Shape, Slice
from monarch.runtime.cell import Owned, describe
from monarch.runtime.client import current_node
from monarch.runtime.failure import Exit
from monarch.runtime.future import Future
from monarch.runtime.node import Host, Node, Port
from monarch.wire import pickling
from monarch.wire.frames import CONTROL, Frame

if TYPE_CHECKING:
    from monarch.actor._procs import Placement

T = TypeVar("T")


class StopWait(Port):
    """Waits until every rank answered or is gone."""

    def __init__(self, node: Node, ranks: dict[int, int]) -> None:
        self.node = node
        self.left = set(ranks.values())
        self.ranks = ranks
        self.lock = threading.Lock()
        self.future: Future[None] = Future._make()
        self.ident = node.open_port(self)
        if not self.left:
            self.future._settle(None)

    def deliver(self, frame: Frame) -> None:
        self.done(frame.rank)

    def node_down(self, node: int, exit: Exit) -> None:
        rank = self.ranks.get(node)
        if rank is not None:
            self.done(rank)

    def node_down_all(self, reason: str) -> None:
        self.future._settle(None)

    def done(self, rank: int) -> None:
        with self.lock:
            self.left.discard(rank)
            left = len(self.left)
        if not left:
            self.node.close_port(self.ident)
            self.future._settle(None)


class ActorMesh(MeshTrait, Generic[T]):
    """Actors of one class, one on each process of a proc mesh; or a slice or view of them.

    Attributes are endpoints (`mesh.method.call(...)`). Only the handle that `spawn` returned may `stop` them; copies,
    slices and handles that travelled are references. Lifetime follows the owner, never Python references.
    """

    def __init__(
        self,
        cls: type[T],
        name: str,
        full_name: str,
        ident: int,
        placement: Placement,
        shape: Shape,
        parent: str,
        spawn_dims: tuple[tuple[str, ...], tuple[int, ...]],
        owned: Owned | None = None,
    ) -> None:
        self._class = cls
        self._mesh_name = name
        self._full_name = full_name
        self._id = ident
        self._placement = placement  #: where the ranks of the whole mesh live
        self._shape = shape  #: over ranks of the whole mesh
        self._parent = parent
        self._spawn_dims = spawn_dims
        self._owned = owned
        self._count = len(shape.ndslice)
        self._stopped: Future[None] | None = None
        self._ranks_cache: dict[int, int] | None = None
        self._endpoints: dict[str, Any] = {}
        self._unplaced: dict[int, Exit] = {}  #: processes that were known to be dead when it was spawned

    # -- mesh

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Sequence[str]:
        return self._shape.labels

    def _new_with_shape(self, shape: Shape) -> ActorMesh[T]:
        out: ActorMesh[T] = ActorMesh(
            self._class, self._mesh_name, self._full_name, self._id, self._placement, shape, self._parent,
            self._spawn_dims,
        )  # fmt: skip
        out._unplaced = self._unplaced
        return out

    @property
    def __name__(self) -> str:
        return self._class.__name__

    @property
    def _name(self) -> Future[str]:
        return Future._of(self._full_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_class" not in self.__dict__:
            raise AttributeError(name)
        found = self._endpoints.get(name)
        if found is None:
            found = self._endpoints[name] = self._look_up(name)
        return found

    def _look_up(self, name: str) -> Any:
        if name == "name" and not hasattr(self._class, "name"):
            return self._full_name
        attr = inspect.getattr_static(self._class, name, None)
        if attr is None and not hasattr(self._class, name):
            known = ", ".join(sorted(k for k in dir(self._class) if isinstance(
                inspect.getattr_static(self._class, k, None), EndpointProperty)))  # fmt: skip
            raise AttributeError(f"{self._class.__name__} has no endpoint {name!r}; it has: {known or 'none'}")
        if isinstance(attr, EndpointProperty):
            return Endpoint(self, name, attr._method, explicit=attr.has_explicit_port, property=attr)
        return NotAnEndpoint(self, name)

    def __repr__(self) -> str:
        return f"ActorMesh(class={self._class}, shape={self._shape}, inner={self._full_name})"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return _rebuild, (
            self._class, self._mesh_name, self._full_name, self._id, self._placement, self._shape, self._parent,
            self._spawn_dims,
        )  # fmt: skip

    # -- addressing, for endpoints

    def _target(self, index: int) -> tuple[int, int, Host]:
        """(node, message rank, host) of the element at dense position `index` of this view."""
        whole = self._shape.ndslice[index] if self._count > 1 or index else self._shape.ndslice.offset
        node = self._placement.node(whole)
        return node, index, self._placement.host_of(node)

    def _host_of(self, node: int) -> Host:
        return self._placement.host_of(node)

    def _node_ranks(self) -> dict[int, int]:
        """node -> dense rank in this view, for all its elements."""
        ranks = self._ranks_cache
        if ranks is None:
            place = self._placement.node
            ranks = self._ranks_cache = {place(whole): i for i, whole in enumerate(self._shape.ndslice)}
        return ranks

    def _known_dead(self) -> int | None:
        """The dense position of a rank of this view that this process knows to be dead; None when it knows of none."""
        node = current_node()
        ranks = self._node_ranks() if node.down or self._owned_failures(node) else {}
        for target in node.down.keys() & ranks.keys():
            return ranks[target]
        failed = self._owned_failures(node)
        return next((i for i, whole in enumerate(self._shape.ndslice) if whole in failed), None) if failed else None

    def _owned_failures(self, node: Node) -> set[int]:
        return node.tree.failures_of(self._id)

    def _exit(self, target: int, exit: Exit) -> Exit:
        """`exit`, said as a failed placement when that process was dead before this mesh was spawned."""
        if target in self._unplaced and not exit.before:
            return exit._replace(before="error spawning actor mesh: statuses: ")
        return exit

    def _view_dims(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return tuple(self._shape.labels), tuple(self._shape.ndslice.sizes)

    def _result_shape(self) -> Shape:
        return Shape(list(self._shape.labels), Slice.new_row_major(list(self._shape.ndslice.sizes)))

    def _display(self, whole: int) -> str:
        labels, sizes = self._spawn_dims
        name = f"{self._class.__module__}.{self._class.__qualname__}"
        return f"{self._parent}.<{name} {self._mesh_name}{describe('', labels, sizes, whole)}>"

    def _display_of(self, node: int) -> str:
        return self._display(self._placement.rank_of(node))

    # -- lifetime

    @property
    def initialized(self) -> Future[None]:
        """Done when the actors exist on their processes; does not wait for `__init__`.

        RuntimeError when a process was known to be dead at the spawn, or did not start.
        """
        out: Future[None] = Future._make()
        ready = self._placement.ready()
        if self._unplaced:
            statuses = "; ".join(
                f"rank {self._placement.rank_of(n)}: {exit.describe()}" for n, exit in self._unplaced.items()
            )
            out._settle(error=RuntimeError(f"error spawning actor mesh: statuses: {statuses}"))
            return out
        if ready is None:
            return Future._of(None)

        def copy() -> None:
            error = ready._error
            if error is not None:
                out._settle(error=error)
            else:
                out._settle_lazily(lambda: (ready._result(), None)[1])

        ready._on_ready(copy)
        return out

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stops all actors of the mesh: queued messages first, then `__cleanup__`. Idempotent.

        NotImplementedError on slices and references: stopping requires an owned ActorMesh.
        """
        if self._owned is None:
            raise NotImplementedError(
                f"stopping {self._mesh_name} requires an owned ActorMesh: this handle is a slice or a reference; "
                "stop the handle that spawn() returned"
            )
        return self._owned.stop(reason)

    def _stop(self, reason: str, node: Node) -> Future[None]:
        if self._stopped is None:
            wait = StopWait(node, self._node_ranks())
            self._stopped = wait.future
            body = pickling.dump_bytes(("stop_actor", reason))
            template = Frame(CONTROL, 0, node.id, self._id, (b"", body), reply=wait.ident)
            for target, exit in node.cast(list(wait.ranks.items()), template, self._host_of):
                wait.node_down(target, exit)
        return self._stopped


def _rebuild(*args: Any) -> ActorMesh[Any]:
    return ActorMesh(*args)
