"""Values of distributed tensors, back on the client."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.runtime.future import Future
from monarch.tensor import checks, streams
from monarch.tensor.codes import Failure
from monarch.tensor.engine import Engine
from monarch.tensor.handle import Tensor
from monarch.tensor.mesh import DeviceMesh, active


def shard_rank(mesh: DeviceMesh, shard: Any, coords: dict[str, int]) -> int:
    """The worker at given coordinates. None given: the first. ValueError, KeyError, IndexError for wrong ones."""
    wanted = {**(shard or {}), **coords}
    if not wanted:
        return mesh.processes.nditem([0] * mesh.processes.ndim)
    for name in wanted:
        if name not in mesh.names:
            raise KeyError(f"mesh does not have dimension {name!r}; it has {list(mesh.names)}")
    missing = [name for name in mesh.names if name not in wanted]
    if missing:
        raise ValueError(f"Missing key {missing[0]!r}: give a coordinate for each of {list(mesh.names)}, or for none")
    for name, n in zip(mesh.names, mesh.processes.sizes):
        at = wanted[name]
        if not isinstance(at, int) or not 0 <= at < n:
            raise IndexError(f"coordinate {name}={at!r} is out of range: the mesh has {n} along {name!r}")
    return mesh.processes.nditem([wanted[name] for name in mesh.names])


def fetch_shard(obj: Any, shard: dict[str, int] | None = None, **coords: int) -> Future[Any]:
    """Copies each tensor in the pytree `obj` from one worker; other leaves pass through. The future has the tree.

    `shard` and keywords: the worker's coordinates, all dimensions of the mesh or none (then the first worker).
    `obj=None`: a barrier, done when every worker has done everything issued before, on all streams.
    Raises ValueError without a mesh or with missing coordinates, KeyError for unknown dimensions, IndexError for
    coordinates out of range, TypeError for tensors of different meshes or of another stream than the active one. The
    future raises `RemoteException` when a tensor depends on an operation that failed.
    """
    leaves, spec = pytree.tree_flatten(obj)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    mesh = tensors[0].mesh if tensors else active.mesh
    if mesh is None:
        raise ValueError("fetch_shard: no device mesh is active, and the object holds no distributed tensor")
    engine: Engine = mesh._engine
    rank = shard_rank(mesh, shard, coords)
    if obj is None:
        return engine.ask(engine.mesh, ("barrier",), lambda answers: None)
    if not tensors:
        return Future._of(obj)
    lane = engine.lane(mesh, streams.active.stream)
    if any(t._group.lane is not lane or t._group.flags for t in tensors):
        error = checks.refusal(fetch_shard, tensors, {}, lane, ())
        if error is not None:
            raise error
        for t in tensors:
            use(t)

    def decode(answers: list[Any]) -> Any:
        values = first_error(engine, answers)
        found = iter(next(v for v in values if v is not None))
        filled = [next(found) if isinstance(x, Tensor) else x for x in leaves]
        return pytree.tree_unflatten(filled, spec)

    return engine.ask(mesh, ("fetch", lane.ident, rank, [t._ref.ident for t in tensors]), decode)


def use(t: Tensor) -> None:
    """Notes a read of a tensor outside of an operator."""
    from monarch.tensor.handle import UNUSED

    if t._group.flags & UNUSED:
        t._group.origin.first_use()


def first_error(engine: Any, answers: list[Any]) -> list[Any]:
    """The answers; raises when one of them is a failure."""
    errors = [a for a in answers if isinstance(a, Failure)]
    if errors:
        if not any(e.text for e in errors):  # a collective passed the fact on: ask who failed
            more = engine.ask(engine.mesh, ("finish",), lambda a: a).get()
            errors += [e for e in more if e is not None]
        raise engine.failure(errors)
    return answers


def inspect(obj: Any, shard: dict[str, int] | None = None, **coords: int) -> Any:
    """`fetch_shard(...)`, waited for."""
    return fetch_shard(obj, shard, **coords).get()


def show(obj: Any, shard: dict[str, int] | None = None, **coords: int) -> Any:
    """Fetches a tensor and shows it as a picture with the package `torchshow` (ModuleNotFoundError without it)."""
    value = inspect(obj, shard, **coords)
    import torchshow  # type: ignore[import-not-found]

    return torchshow.show(value)


_unused = (torch,)
