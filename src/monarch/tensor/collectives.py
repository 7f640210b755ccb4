"""Reductions over dimensions of a mesh, and copies between meshes: checks and commands."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.tensor import checks, sites, streams
from monarch.tensor.codes import RECEIVE, REDUCE, SEND
from monarch.tensor.fetch import use
from monarch.tensor.handle import UNUSED, Group, Tensor, make
from monarch.tensor.mesh import DeviceMesh, device_mesh_of
from monarch.tensor.meta import fresh

REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_BITS = ("band", "bor", "bxor")
_tokens = itertools.count(1)


def _requires_grad(t: Any) -> tuple[str, str] | None:
    if torch.is_grad_enabled() and t.requires_grad:
        return "REQUIRES_GRAD", "requires grad, and the operation has no derivative"
    return None


def _check(func: Any, tensors: list[Any], lane: Any, written: Any, stream: bool = True) -> None:
    if any(t._group.lane is not lane or t._group.flags & ~UNUSED for t in tensors) or (
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    ):
        error = checks.refusal(func, tensors, {}, lane, written, _requires_grad, stream)
        if error is not None:
            raise error
    for t in tensors:
        use(t)


def _dims(mesh: DeviceMesh, dims: Any) -> tuple[str, ...]:
    names = (dims,) if isinstance(dims, str) else tuple(dims)
    for name in names:
        if name not in mesh.names:
            raise KeyError(f"dim {name} not found: the tensor's mesh has {list(mesh.names)}")
    if len(set(names)) != len(names):
        raise ValueError(f"reduce: a dimension is named twice in {names}")
    return names or tuple(mesh.names)


def reduce_one(t: Tensor, dims: Any, reduction: str, scatter: bool, mesh: Any, inplace: bool, out: Any) -> Tensor:
    """See `Tensor.reduce`."""
    if mesh is not None:
        raise NotImplementedError("reduce(mesh=...): reduce on the tensor's own mesh, then use to_mesh")
    here = t._group.lane.mesh
    names = _dims(here, dims)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is unknown: it is one of {', '.join(REDUCTIONS)}")
    what = f"reduction {reduction!r}{' with scatter' if scatter else ''}"
    if (reduction == "stack" or scatter) and len(names) != 1:
        raise ValueError(f"{what} is not valid for multiple dimensions: {names}; name one, or flatten the mesh")
    if inplace:
        if scatter or reduction == "stack":
            raise ValueError(f"{what} is not valid for in-place reduce: its result has another shape or meaning")
        if out is not None:
            raise ValueError("reduce: give out= or reduce in place, not both")
    if reduction == "avg" and not (t.dtype.is_floating_point or t.dtype.is_complex):
        raise TypeError(f"reduction 'avg' needs a floating dtype, not {t.dtype}: use 'sum', or convert with .float()")
    if reduction in _BITS and (t.dtype.is_floating_point or t.dtype.is_complex):
        raise TypeError(f"reduction {reduction!r} needs an integer or bool dtype, not {t.dtype}")
    if reduction in ("min", "max") and t.dtype.is_complex:
        raise TypeError(f"reduction {reduction!r} has no meaning for {t.dtype}")
    shape = list(t.shape)
    if scatter:
        n = here.size(names[0])
        if not shape or shape[0] != n:
            raise TypeError(
                f"When scattering results the outer dimension of the tensor must be the size of the mesh dimension "
                f"{names[0]!r}, which is {n}; the tensor's shape is {t.shape}"
            )
        if reduction != "stack":
            shape = shape[1:]
    elif reduction == "stack":
        shape = [here.size(names[0]), *shape]
    lane = t._group.lane.engine.lane(here, streams.active.stream)
    operands = [t]
    if out is not None:
        if not isinstance(out, Tensor):
            raise TypeError(f"reduce: out must be a distributed tensor, not {type(out).__name__}")
        if list(out.shape) != shape or out.dtype is not t.dtype:
            raise ValueError(
                f"Reduce expects the shape to be {torch.Size(shape)} of {t.dtype}, "
                f"but out has {out.shape} of {out.dtype}"
            )
        operands.append(out)
    _check(reduce_one, operands, lane, {id(out)} if out is not None else ())
    engine = lane.engine
    engine.need_store()
    written = out if out is not None else t if inplace else None
    if written is not None:
        written._group.const = None
        result = make(written._meta, written._group)
    else:
        result = make(fresh(shape, t.dtype, t.device), Group(lane))
    command = (
        REDUCE, sites.here(), tuple(x._ref.ident for x in operands), (result._ref.ident,), lane.take_dead(),
        names, reduction, scatter, "out" if out is not None else "inplace" if inplace else "new",
        tuple(shape), t.dtype, str(t.device),
    )  # fmt: skip
    engine.emit(lane, command)
    return result


def reduce(
    tensors: Any, dims: Any, reduction: str = "sum", scatter: bool = False, mesh: Any = None, _inplace: bool = False
) -> Any:
    """Combines the values of workers along `dims` of the tensors' mesh, for each tensor of a pytree.

    `dims`: a name or a tuple of names; `()` means all. `reduction`: stack, sum, avg, product, min, max, band, bor or
    bxor.

    | call                         | collective     | result on each worker, of N peers with values t[r], being i     |
    |------------------------------|----------------|-----------------------------------------------------------------|
    | `reduce(d, op)`              | all-reduce     | op over the peers, same shape; several dims allowed             |
    | `reduce(d, "stack")`         | all-gather     | shape [N, *shape], entry r is t[r]                              |
    | `reduce(d, op, scatter=True)`| reduce-scatter | needs shape[0] == N; shape[1:]; op over r of t[r][i]            |
    | `reduce(d, "stack", True)`   | all-to-all     | needs shape[0] == N; same shape; entry r is t[r][i]             |

    Raises KeyError for unknown dims, ValueError for repeated ones and for combinations that have no meaning, TypeError
    for shapes that cannot be scattered, tensors that require grad, are dropped, lent or of another stream,
    AttributeError for leaves that are no tensors.
    """
    return pytree.tree_map(
        lambda t: t.reduce(dims, reduction=reduction, scatter=scatter, mesh=mesh, _inplace=_inplace), tensors
    )


def reduce_(tensors: Any, dims: Any, reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> Any:
    """`reduce` in place."""
    return reduce(tensors, dims, reduction, scatter, mesh, _inplace=True)


class MeshSliceTensor:
    """The values of a tensor on part of its mesh: `to_mesh` moves them."""

    def __init__(self, tensor: Tensor, part: DeviceMesh) -> None:
        self.tensor, self.slicing = tensor, part

    def to_mesh(self, mesh: Any, stream: Any = None) -> Tensor:
        """A copy of the part on `mesh`; see `monarch.to_mesh`."""
        return move(self.tensor, self.slicing, mesh, stream)

    def __repr__(self) -> str:
        return f"MeshSliceTensor({self.tensor!r}, {self.slicing})"


def routes(source: DeviceMesh, target: DeviceMesh) -> list[tuple[int, int]]:
    """(sender, receiver) for each worker of `target`, dimensions matched by name. ValueError when they do not fit."""
    missing = [n for n in source.names if n not in target.names]
    if missing:
        raise ValueError(f"to_mesh: the destination mesh does not have dimensions {missing}; slice them first")
    for n in source.names:
        if source.size(n) != target.size(n):
            raise ValueError(
                f"to_mesh: dimension {n!r} has a different length on the two meshes: {source.size(n)} here, "
                f"{target.size(n)} there"
            )
    extra = [n for n in target.names if n not in source.names]
    if extra and any(target.size(n) > 1 for n in extra):
        warnings.warn(
            f"to_mesh sends one value to all workers along {extra}: that is slow for large tensors", UserWarning,
            stacklevel=4,
        )  # fmt: skip
    pairs = []
    for receiver in target.processes:
        where = dict(zip(target.names, target.processes.coordinates(receiver)))
        pairs.append((source.processes.nditem([where[n] for n in source.names]), receiver))
    return pairs


def move(t: Tensor, source: DeviceMesh, mesh: Any, stream: Any = None) -> Tensor:
    """See `to_mesh`. `source`: the part of the tensor's mesh to take the values from."""
    target = device_mesh_of(mesh, "to_mesh: mesh")
    lane = t._group.lane
    engine = lane.engine
    if target._engine is not engine:
        raise ValueError("to_mesh: the destination mesh belongs to another tensor engine (other processes)")
    _check(move, [t], lane, (), stream=False)
    pairs = routes(source, target)
    to = lane.stream if stream is None else stream
    there = engine.lane(target, to)
    site = sites.here()
    token = next(_tokens)
    out = make(t._meta if t.is_contiguous() and not t._meta.offset and _whole(t) else
               fresh(t.shape, t.dtype, t.device), Group(there))  # fmt: skip
    from_lane = lane if source is lane.mesh else engine.lane(source, lane.stream)
    engine.need_peers()
    engine.emit(from_lane, (SEND, site, (t._ref.ident,), (), from_lane.take_dead(), token, pairs))
    engine.emit(there, (RECEIVE, site, (), (out._ref.ident,), there.take_dead(), token, pairs, str(t.device)))
    return out


def _whole(t: Tensor) -> bool:
    return bool(t._meta.nbytes == t.numel() * t.dtype.itemsize)


def to_mesh(tensors: Any, mesh: Any, stream: Any = None) -> Any:
    """Copies each tensor of a pytree to another mesh of the same engine: dimensions are matched by name.

    A dimension that only the destination has is broadcast along, with a UserWarning. Always a copy: later writes to
    one side do not show on the other. `stream`: of the result; the tensor's own when None. ValueError when dimensions
    do not fit, TypeError for tensors that require grad, are dropped or lent mutably.
    """
    target = device_mesh_of(mesh, "to_mesh: mesh")
    return pytree.tree_map(lambda t: t.to_mesh(target, stream), tensors, is_leaf=_is_slice)


def slice_mesh(tensors: Any, **dims: Any) -> Any:
    """The values on part of the mesh, for each tensor of a pytree: to be moved with `to_mesh`."""
    return pytree.tree_map(lambda t: t.slice_mesh(**dims), tensors)


def _is_slice(x: Any) -> bool:
    return isinstance(x, MeshSliceTensor)
