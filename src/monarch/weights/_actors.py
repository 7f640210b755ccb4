"""Endpoints for trainers and generators, and ways to bring one version to many: push and a tree."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch.actor import Actor, endpoint
from monarch.mesh import Point
from monarch.rdma import RDMABuffer
from monarch.weights._errors import LayoutMismatch
from monarch.weights._layout import WeightLayout, Weights, named_tensors
from monarch.weights._publisher import WeightHandle, WeightPublisher

if TYPE_CHECKING:
    from monarch.actor import Port


def _asynchronous(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return run


def _match_kind(cls: type, mixin: type, names: Sequence[str]) -> None:
    """An actor's endpoints are all async or all not: those of the mixin become what the actor's own are."""
    ours = set(names)
    for name in dir(cls):
        prop = inspect.getattr_static(cls, name, None)
        method = getattr(prop, "_method", None)
        if name not in ours and method is not None and inspect.iscoroutinefunction(method):
            for mine in names:
                plain = inspect.getattr_static(mixin, mine)._method
                setattr(cls, mine, endpoint(_asynchronous(plain)))
            return


class WeightSource(Actor):
    """An actor that publishes weights: subclass it and call `publish_weights` when the model exists.

    Adds the endpoints `weight_handle`, `weight_version`, `weight_state_dict`, `weight_notify`; in an actor with async
    endpoints they are async too.
    """

    _weight_publisher: WeightPublisher | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _match_kind(cls, WeightSource, ("weight_handle", "weight_version", "weight_state_dict", "weight_notify"))

    def publish_weights(self, source: Weights | None = None, **options: Any) -> int:
        """The first time: makes the publisher (`options` as for WeightPublisher). Later, without arguments: publishes.

        Returns the version.
        """
        if source is not None:
            if self._weight_publisher is not None:
                self._weight_publisher.close()
            self._weight_publisher = WeightPublisher(source, **options)
            return self._weight_publisher.version
        return self._publisher().publish()

    def _publisher(self) -> WeightPublisher:
        if self._weight_publisher is None:
            raise RuntimeError(f"{type(self).__name__} has not called publish_weights(model) yet")
        return self._weight_publisher

    @endpoint
    def weight_handle(self, layout: bool = True) -> WeightHandle | None:
        """For `WeightSubscriber`; None where memory cannot be shared."""
        p = self._publisher()
        return p.handle(layout=layout) if p.shared else None

    @endpoint
    def weight_version(self) -> int:
        return self._publisher().version

    @endpoint
    def weight_state_dict(self) -> tuple[dict[str, torch.Tensor], int]:
        """(state dict, version), by message."""
        return self._publisher().state_dict()

    @endpoint
    def weight_notify(self, port: Port[int]) -> int:
        """`port` gets each new version; returns the current one."""
        self._publisher().notify(port)
        return self._publisher().version


class WeightSink(Actor):
    """An actor that is given weights: subclass it and call `receive_weights` with the module they go into.

    Adds the endpoints `weight_inbox`, `weight_apply`, `weight_pull`, which `push` and `broadcast` use.
    """

    _sink_target: Weights | None = None
    _sink_layout: WeightLayout | None = None
    _sink_memory: torch.Tensor
    _sink_buffer: RDMABuffer
    _sink_version = -1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _match_kind(cls, WeightSink, ("weight_inbox", "weight_apply", "weight_pull"))

    def receive_weights(self, target: Weights) -> None:
        self._sink_target = target
        self._sink_layout = None

    @property
    def received_version(self) -> int:
        """The version that was applied last; -1 before the first."""
        return self._sink_version

    @endpoint
    def weight_inbox(self, layout: WeightLayout) -> RDMABuffer:
        """Memory that a version of `layout` can be written into; the same for every call with that layout."""
        if self._sink_target is None:
            raise RuntimeError(f"{type(self).__name__} has not called receive_weights(model) yet")
        if self._sink_layout != layout:
            layout.check(WeightLayout.from_module(self._sink_target), dtypes=False)
            if self._sink_layout is not None:
                self._sink_buffer.drop().get(timeout=60)
            self._sink_memory = torch.empty(layout.nbytes, dtype=torch.uint8)
            self._sink_buffer = RDMABuffer(self._sink_memory)
            self._sink_layout = layout
        return self._sink_buffer

    @endpoint
    def weight_apply(self, version: int) -> int:
        """The inbox holds `version`, complete: into the module with it."""
        if self._sink_target is None or self._sink_layout is None:
            raise LayoutMismatch("no weights were written yet: weight_inbox comes first")
        tensors, views = named_tensors(self._sink_target), self._sink_layout.views(self._sink_memory)
        names = [e.name for e in self._sink_layout.unique()]
        with torch.no_grad():
            torch._foreach_copy_([tensors[n] for n in names], [views[n] for n in names])
        self._sink_version = version
        return version

    @endpoint
    def weight_pull(self, source: RDMABuffer, timeout: float = 60) -> None:
        """Fills the inbox from another inbox, or from a publisher's slot."""
        source.read_into(self._sink_memory, nbytes=self._sink_memory.numel(), timeout=timeout).get()


def _members(meshes: Any) -> list[Any]:
    """The single actors of a mesh, or of several."""
    if isinstance(meshes, Iterable) and not hasattr(meshes, "weight_inbox"):
        return [one for mesh in meshes for one in _members(mesh)]
    extent = meshes.extent
    return [meshes.slice(**Point(rank, extent)) for rank in range(extent.nelements)]


def push(publisher: WeightPublisher, meshes: Any, *, timeout: float = 60) -> int:
    """Writes the current version into all `WeightSink` actors of `meshes` (one mesh or several), and has it applied.

    The publisher must not publish `slots - 1` versions meanwhile. Returns the version; raises what failed.
    """
    memory, version = publisher.current_slot()
    members = _members(meshes)
    inboxes = [m.weight_inbox.call_one(publisher.layout) for m in members]
    writes = [inbox.get(timeout=timeout).write_from(memory, timeout=timeout) for inbox in inboxes]
    for w in writes:
        w.get(timeout=timeout)
    for applied in [m.weight_apply.call_one(version) for m in members]:
        applied.get(timeout=timeout)
    return version


def broadcast(publisher: WeightPublisher, actors: Any, fanout: int = 2, *, timeout: float = 60) -> int:
    """Brings the current version to all `WeightSink` actors through a tree: each that has it serves `fanout` others.

    The publisher's host sends it `fanout` times, however many there are. Returns the version; raises what failed.
    """
    if fanout < 1:
        raise ValueError(f"fanout must be at least 1, got {fanout}")
    memory, version = publisher.current_slot()
    waiting = _members(actors)
    inboxes = [m.weight_inbox.call_one(publisher.layout) for m in waiting]
    todo = list(zip(waiting, [i.get(timeout=timeout) for i in inboxes], strict=True))
    root = RDMABuffer(memory)
    try:
        level = [root]
        while todo:
            pulls, reached = [], []
            for source in level:
                for _ in range(min(fanout, len(todo))):
                    actor, inbox = todo.pop(0)
                    pulls.append(actor.weight_pull.call_one(source, timeout))
                    reached.append(inbox)
            for p in pulls:
                p.get(timeout=timeout)
            level = reached
    finally:
        root.drop().get(timeout=timeout)
    for applied in [m.weight_apply.call_one(version) for m in waiting]:
        applied.get(timeout=timeout)
    return version
