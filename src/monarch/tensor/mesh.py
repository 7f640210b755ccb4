"""Device meshes: which workers an operation runs on, and which mesh is active on this thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from monarch.mesh import MeshTrait, Shape, Slice
from monarch.tensor import handle, sites, streams
from monarch.tensor.codes import RANK
from monarch.tensor.meta import fresh


class DeviceMesh(MeshTrait):
    """Workers of one tensor engine, laid out over named dimensions.

    Meshes of the same workers with the same dimensions are one object, however they were sliced.
    """

    mesh_name = "default"

    def __init__(self, engine: Any, labels: tuple[str, ...], ndslice: Slice) -> None:
        self._engine = engine
        self._shape = Shape(list(labels), ndslice)
        self.names = labels
        self.processes = ndslice  #: ranks of the workers in the whole engine
        self._layout = (labels, ndslice.offset, tuple(ndslice.sizes), tuple(ndslice.strides))
        self._activations: list[Any] = []

    @property
    def client(self) -> Any:
        """The engine that the mesh belongs to."""
        return self._engine

    @property
    def _ndslice(self) -> Slice:
        return self.processes

    @property
    def _labels(self) -> Sequence[str]:
        return self.names

    def _new_with_shape(self, shape: Shape) -> DeviceMesh:
        return mesh_of(self._engine, tuple(shape.labels), shape.ndslice)

    def __call__(self, **dims: Any) -> DeviceMesh:
        warnings.warn("mesh(dim=...) is deprecated: use mesh.slice(dim=...)", DeprecationWarning, stacklevel=2)
        return self.slice(**dims)

    def activate(self) -> Any:
        """Torch operations of this thread run on the workers from now on; as a context manager, until it ends."""
        if self._engine.closed:
            raise RuntimeError(f"the tensor engine of {self._engine.name} was shut down by exit()")
        activation = Activation(self)
        self._activations.append(activation)
        return activation

    def deactivate(self) -> None:
        """Undoes the last `activate()` of this mesh; RuntimeError when there is none."""
        if not self._activations:
            raise RuntimeError("this mesh is not active")
        self._activations.pop().__exit__(None, None, None)

    def rank(self, dims: Any) -> Any:
        """Each worker's coordinate along `dims` (a name; of several names, combined row-major): 0-d int64."""
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        for name in names:
            if name not in self.names:
                raise KeyError(f"mesh does not have dimension {name!r}; it has {list(self.names)}")
        return self._ranks_of(names)

    @property
    def ranks(self) -> dict[str, Any]:
        """`rank` of each dimension, by name."""
        return {name: self.rank(name) for name in self.names}

    def process_idx(self) -> Any:
        """The number of each worker in the whole engine: 0-d int64."""
        return self._ranks_of(None)

    def _ranks_of(self, names: tuple[str, ...] | None) -> Any:
        import torch

        where = active.mesh
        if where is None:
            raise TypeError("Remote functions require an active device mesh: rank() needs mesh.activate()")
        if where._engine is not self._engine or not set(where.processes) <= set(self.processes):
            raise TypeError(f"the active mesh {where} is not part of {self}")
        lane = self._engine.lane(where, streams.active.stream)
        out = handle.make(fresh((), torch.int64, torch.device("cpu")), handle.Group(lane))
        command = (RANK, sites.here(), (), (out._ref.ident,), lane.take_dead(), self._layout, names)
        self._engine.emit(lane, command)
        return out

    def to_tensor(self) -> Any:
        """The ranks of the workers, as a local int32 tensor of the mesh's shape."""
        import torch

        from monarch.tensor.meta import locally

        with locally():
            return torch.tensor(list(self.processes), dtype=torch.int32).reshape(self.processes.sizes)

    def to_table(self) -> str:
        """The mesh as a text grid, one cell per worker."""
        from monarch.tensor.table import to_table

        return to_table(self)

    def exit(self) -> None:
        """Waits for all issued work (60 s at most), raises an error nobody has seen, ends the engine's workers."""
        self._engine.close()

    def rotate(self, **kwargs: Any) -> Any:
        raise NotImplementedError("DeviceMesh.rotate")

    def stack(self, **kwargs: Any) -> Any:
        raise NotImplementedError("DeviceMesh.stack")

    def process_group(self, dims: Any) -> Any:
        """A new process group over `dims` (a name or several), for `torch.distributed` in remote functions."""
        from monarch.tensor.groups import RemoteProcessGroup

        return RemoteProcessGroup((dims,) if isinstance(dims, str) else tuple(dims), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        from monarch.tensor import carry

        return carry.reduce_named("mesh", "a device mesh", self._layout)

    def __repr__(self) -> str:
        return f"<DeviceMesh(names({self.names}), processes({list(self.processes)})) at {id(self):#x}>"


def mesh_of(engine: Any, labels: tuple[str, ...], ndslice: Slice) -> DeviceMesh:
    key = (labels, ndslice)
    found: DeviceMesh | None = engine.meshes.get(key)
    if found is None:
        found = engine.meshes.setdefault(key, DeviceMesh(engine, labels, ndslice))
    return found


def device_mesh_of(mesh: Any, what: str = "mesh") -> DeviceMesh:
    """The DeviceMesh in `mesh`: itself, or the one of a ProcMesh or of anything with `_device_mesh`."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    found = getattr(mesh, "_device_mesh", None)
    if isinstance(found, DeviceMesh):
        return found
    from monarch.actor import ProcMesh

    if isinstance(mesh, ProcMesh):
        from monarch.tensor.procs import device_mesh

        return device_mesh(mesh)
    raise TypeError(f"{what} must be a DeviceMesh or a ProcMesh, not {type(mesh).__name__}")


class _Active(threading.local):
    mesh: DeviceMesh | None = None


active = _Active()


def get_active_mesh() -> DeviceMesh:
    """The innermost active mesh of this thread. ValueError: no device mesh is active."""
    if active.mesh is None:
        raise ValueError("no device mesh is active: use `with mesh.activate():`")
    return active.mesh


class Mode(TorchDispatchMode):  # type: ignore[misc]
    """Sends the operations of a block to the workers of one mesh; with None, computes here."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation passes through a wrapper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.mesh is None:
            from monarch.tensor.dispatch import run_here

            return run_here(func, args, kwargs)
        return handle.issue(func, args, kwargs, self.mesh)


class Activation:
    """One activation: begins when made, ends with its `with` block."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._before = active.mesh
        self._mode = Mode(mesh)
        self._mode.__enter__()
        active.mesh = mesh
        self._open = True

    def __enter__(self) -> DeviceMesh | None:
        return self._mode.mesh

    def __exit__(self, *exc: Any) -> None:
        if self._open:
            self._open = False
            active.mesh = self._before
            self._mode.__exit__(*exc)


class _NoMesh:
    """`no_mesh.activate()`: a block in which torch computes locally."""

    def activate(self) -> Activation:
        return Activation(None)

    def __repr__(self) -> str:
        return "no_mesh"


no_mesh = _NoMesh()
