"""`Tensor`: the client's handle of one tensor per worker; groups of aliases, and references that free themselves."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from monarch.tensor.meta import Fakes, Meta, faking

_ids = itertools.count(1)
next_id = _ids.__next__

#: why a group of aliases needs a closer look before it is used
DROPPED, FROZEN, LENT, UNUSED = 1, 2, 4, 8


class Lane:
    """The tensors of one mesh on one stream: what every operand of an operation must share."""

    __slots__ = ("dead", "engine", "ident", "mesh", "stream")

    def __init__(self, engine: Any, mesh: Any, stream: Any, ident: int) -> None:
        self.engine, self.mesh, self.stream, self.ident = engine, mesh, stream, ident
        self.dead: list[int] = []  #: values to free with the next command

    def take_dead(self) -> tuple[int, ...]:
        dead = self.dead
        n = len(dead)
        out = tuple(dead[:n])
        del dead[:n]  # other threads append meanwhile
        return out


class Group:
    """Handles whose values share a storage on the workers."""

    __slots__ = ("__weakref__", "const", "drop_site", "flags", "lane", "lent", "members", "origin")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.members: dict[int, Any] = {}  #: value id -> weak reference to its handle
        self.flags = 0
        self.const: Any = None  #: the value, for scalars that the client can compute itself
        self.origin: Any = None  #: the Borrow that made this group
        self.lent: list[Any] = []  #: live borrows of it
        self.drop_site: Any = None

    def drop(self, site: Any) -> None:
        """Frees the values of all handles now."""
        if self.flags & DROPPED:
            return
        self.flags |= DROPPED
        self.drop_site = site
        self.lane.dead.extend(self.members)


class Ref:
    """Owns one value on the workers: freed when this goes."""

    __slots__ = ("group", "ident")

    def __init__(self, ident: int, group: Group) -> None:
        self.ident, self.group = ident, group

    def __del__(self) -> None:
        group = self.group
        group.members.pop(self.ident, None)
        if not group.flags & 1:  # DROPPED; module globals may be gone when the interpreter ends
            group.lane.dead.append(self.ident)


class _Aliases:
    """The live handles of one storage."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def aliases(self) -> set[Any]:
        return {t for t in (ref() for ref in list(self._group.members.values())) if t is not None}


class _Explain(threading.local):
    """The last refusal on this thread, which torch's operators would swallow."""

    error: TypeError | None = None


explain = _Explain()


def _operator(name: str) -> Any:
    plain = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any) -> Any:
        result = plain(self, *args)
        if result is NotImplemented and explain.error is not None:
            error, explain.error = explain.error, None
            raise error
        return result

    method.__name__ = name
    return method


class Tensor(torch.Tensor):  # type: ignore[misc]
    """A tensor that every worker of `mesh` holds a value of; made by operations inside `mesh.activate()`.

    Shape, dtype, device and strides are known at once; values stay on the workers until `fetch_shard` or `inspect`.
    Freed there when the last handle goes, or at once by `drop()`.
    """

    _meta: Meta
    _group: Group
    _ref: Ref

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return issue(func, args, kwargs, None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def mesh(self) -> Any:
        """The `DeviceMesh` whose workers hold the values."""
        return self._group.lane.mesh

    @property
    def stream(self) -> Any:
        """The `Stream` it may be used on."""
        return self._group.lane.stream

    @property
    def ref(self) -> int:
        return self._ref.ident

    @property
    def dropped(self) -> bool:
        return bool(self._group.flags & DROPPED)

    def drop(self) -> None:
        """Frees the values of this tensor and of every alias of its storage now; idempotent."""
        drop_tensor(self)

    @property
    def _aliases(self) -> _Aliases:
        return _Aliases(self._group)

    @property
    def _fake(self) -> Any:
        with faking():
            return Fakes().make(self._meta, self._group)

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError("the data of a distributed tensor can only be set to another distributed tensor")
        torch.Tensor.data.__set__(self, value)
        before = self._ref
        after = value.detach()
        self._meta, self._group, self._ref = after._meta, after._group, after._ref
        self._group.members[self._ref.ident] = weakref.ref(self)
        del before

    def reduce(
        self, dims: Any, reduction: str = "sum", scatter: bool = False, mesh: Any = None, _inplace: bool = False,
        out: Any = None,
    ) -> Tensor:  # fmt: skip
        """Combines the workers' values along dimensions of the mesh; see `monarch.reduce`."""
        from monarch.tensor import collectives

        result: Tensor = collectives.reduce_one(self, dims, reduction, scatter, mesh, _inplace, out)
        return result

    def reduce_(self, dims: Any, reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> Tensor:
        """`reduce` in place."""
        return self.reduce(dims, reduction, scatter, mesh, _inplace=True)

    def to_mesh(self, mesh: Any, stream: Any = None) -> Tensor:
        """A copy on another mesh, dimensions matched by name; see `monarch.to_mesh`."""
        from monarch.tensor import collectives

        result: Tensor = collectives.move(self, self.mesh, mesh, stream)
        return result

    def slice_mesh(self, **dims: Any) -> Any:
        """The values of part of the mesh, to be moved on with `to_mesh`."""
        from monarch.tensor import collectives

        return collectives.MeshSliceTensor(self, self.mesh.slice(**dims))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"monarch.Tensor(mesh={self.mesh}, stream={self.stream}, fake={self._fake!r})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a distributed tensor cannot be deep-copied: use t.detach().clone()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        from monarch.tensor import carry

        return carry.reduce_tensor(self)


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
):  # fmt: skip
    for _form in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        if hasattr(torch.Tensor, _form):
            setattr(Tensor, _form, _operator(_form))
for _form in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Tensor, _form, _operator(_form))
setattr(Tensor, "__hash__", torch.Tensor.__hash__)

_new = torch.Tensor._make_wrapper_subclass


def make(meta: Meta, group: Group, requires_grad: bool = False) -> Tensor:
    """A new handle with a new value id."""
    t: Tensor = _new(
        Tensor, meta.shape, strides=meta.stride, storage_offset=meta.offset, dtype=meta.dtype, device=meta.device,
        requires_grad=requires_grad,
    )  # fmt: skip
    ident = next_id()
    t._meta, t._group, t._ref = meta, group, Ref(ident, group)
    group.members[ident] = weakref.ref(t)
    return t


def drop_tensor(t: Tensor) -> None:
    from monarch.tensor import sites

    group = t._group
    if group.flags & DROPPED:
        return
    recording = group.lane.engine.recording
    if recording is not None:
        recording.check_drop(group)
    group.drop(sites.here())


def issue(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    raise RuntimeError("monarch.tensor is not initialised")  # replaced by monarch.tensor.dispatch
