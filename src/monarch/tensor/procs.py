"""Engines of process meshes: made on first use, shared by all slices and handles of the same processes."""

from __future__ import annotations

import threading
from typing import Any

from monarch.actor import ProcMesh
from monarch.mesh import Shape, Slice
from monarch.runtime.client import current_node
from monarch.tensor.backend import ActorBackend
from monarch.tensor.engine import Engine
from monarch.tensor.mesh import DeviceMesh, mesh_of

_lock = threading.RLock()


def root_of(procs: ProcMesh) -> ProcMesh:
    """All processes that were spawned together with those of `procs`."""
    root = procs._root
    return procs if root is None or root == procs._shape else procs._with_shape(root)


def _engines() -> dict[Any, Engine]:
    node: Any = current_node()
    found: dict[Any, Engine] | None = getattr(node, "_tensor_engines", None)
    if found is None:
        found = node._tensor_engines = {}
    return found


def existing_engine(procs: ProcMesh) -> Engine | None:
    root = root_of(procs)
    return _engines().get((root._base, tuple(root._ndslice)))


def device_mesh(procs: ProcMesh) -> DeviceMesh:
    """The device mesh of a process mesh; starts the engine when there is none."""
    root = root_of(procs)
    key = (root._base, tuple(root._ndslice))
    with _lock:
        engines = _engines()
        engine = engines.get(key)
        if engine is None or engine.closed:
            engine = engines[key] = new_engine(root)
    return _mesh_in(engine, root, procs._shape)


def new_engine(root: ProcMesh) -> Engine:
    if root._stop_future is not None:
        raise RuntimeError("`ProcMesh` has already been stopped")
    engine = Engine(ActorBackend(root, "tensor_worker"), len(root._ndslice), root.name)
    engine.root = root
    engine.per_host = len(root._ndslice) // len(root._hosts) if root._ndslice.ndim else 1
    engine.mesh = _mesh_in(engine, root, root._shape)
    return engine


def _mesh_in(engine: Engine, root: ProcMesh, shape: Shape) -> DeviceMesh:
    """The mesh of `shape`, whose ranks are those of the processes, in ranks of the engine's workers."""
    ndslice, whole = shape.ndslice, root._ndslice
    if whole != Slice.new_row_major(list(whole.sizes)):
        if ndslice != whole:
            raise ValueError("slices of these processes must be contiguous and start at offset 0")
        ndslice = Slice.new_row_major(list(whole.sizes))
    return mesh_of(engine, tuple(shape.labels), ndslice)


def spawn_tensor_engine(proc_mesh: ProcMesh) -> DeviceMesh:
    """A further engine on a process mesh, with handles, streams and an `exit()` of its own."""
    engine = new_engine(root_of(proc_mesh))
    return _mesh_in(engine, engine.root, proc_mesh._shape)
