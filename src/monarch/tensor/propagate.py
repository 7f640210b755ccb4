"""Results of functions that run on workers: what the client can know of them before they have run.

A `Shape` of a result is its tree with the tensors described: new ones by storage, others as aliases of arguments.
It comes from a run of the user's propagation function on fake tensors, or from the first worker's real run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.tensor.handle import Group, Tensor, make
from monarch.tensor.meta import Fakes, Meta, faking, meta_of, storage_key


class Leaf:
    """A tensor of a result. `kind`: "new" (storage number `at`), "alias" or "same" (of argument tensor `at`)."""

    __slots__ = ("at", "kind", "meta")

    def __init__(self, kind: str, at: int, meta: Meta | None) -> None:
        self.kind, self.at, self.meta = kind, at, meta

    def __reduce__(self) -> Any:
        return Leaf, (self.kind, self.at, self.meta)


class Result:
    """The tree of a result, `Leaf`s for tensors, and the numbers of the argument tensors that are written."""

    def __init__(self, leaves: list[Any], spec: Any, mutated: tuple[int, ...]) -> None:
        self.leaves, self.spec, self.mutated = leaves, spec, mutated

    @property
    def which(self) -> tuple[int, ...]:
        """Positions of the tensors among the leaves."""
        return tuple(i for i, x in enumerate(self.leaves) if isinstance(x, Leaf))

    def build(self, ins: list[Tensor], lane: Any) -> tuple[Any, tuple[int, ...]]:
        """(the tree with new handles, their value ids; 0 for arguments that are returned themselves)."""
        groups: dict[int, Group] = {}
        ids: list[int] = []
        flat: list[Any] = []
        for x in self.leaves:
            if not isinstance(x, Leaf):
                flat.append(x)
                continue
            if x.kind == "new":
                group = groups.get(x.at)
                if group is None:
                    group = groups[x.at] = Group(lane)
                t = make(x.meta, group)  # type: ignore[arg-type]
            else:
                source = ins[x.at]
                t = make(x.meta if x.kind == "alias" else source._meta, source._group)  # type: ignore[arg-type]
            ids.append(t._ref.ident)
            flat.append(t)
        return pytree.tree_unflatten(flat, self.spec), tuple(ids)


def nothing() -> Result:
    """The result None, with nothing written."""
    leaves, spec = pytree.tree_flatten(None)
    return Result(leaves, spec, ())


def describe(value: Any, inputs: list[Any], before: list[int], device: Any = None) -> Result:
    """What `value` (plain or fake tensors) is, given the function's input tensors and their versions before the run."""
    mutated = tuple(i for i, (t, v) in enumerate(zip(inputs, before)) if t._version != v)
    storages: dict[int, int] = {}
    for i, t in enumerate(inputs):
        storages.setdefault(storage_key(t), i)
    new: dict[int, int] = {}
    leaves, spec = pytree.tree_flatten(value)
    out: list[Any] = []
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            out.append(x)
            continue
        same = next((i for i, t in enumerate(inputs) if t is x), None)
        if same is not None:
            out.append(Leaf("same", same, None))
        elif storage_key(x) in storages:
            out.append(Leaf("alias", storages[storage_key(x)], meta_of(x)))
        else:
            out.append(Leaf("new", new.setdefault(storage_key(x), len(new)), meta_of(x)))
    return Result(out, spec, mutated)


def by_function(propagate: Any, args: Any, kwargs: Any, ins: list[Tensor]) -> Result:
    """Runs the user's propagation function on fakes of the distributed tensors."""
    fakes = Fakes()
    with faking():
        swap = lambda a: fakes.of(a) if isinstance(a, Tensor) else a
        fake_args, fake_kwargs = pytree.tree_map(swap, (tuple(args), dict(kwargs)))
        fake_ins = [fakes.of(t) for t in ins]
        before = [f._version for f in fake_ins]
        value = propagate(*fake_args, **fake_kwargs)
        for x in pytree.tree_leaves(value):
            if isinstance(x, Tensor):
                raise TypeError("a propagation function computes with the tensors it is given, not with captured ones")
        return describe(value, fake_ins, before)


def key_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What decides the result of a function: values, metadata of tensors, and which of them alias.

    TypeError for values that cannot be hashed.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    groups: dict[Any, int] = {}
    seen: dict[int, int] = {}
    key: list[Any] = [str(spec)]
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            key.append((x._meta, groups.setdefault(x._group, i), seen.setdefault(id(x), i), x.requires_grad))
        else:
            try:
                hash(x)
            except TypeError:
                raise TypeError(
                    f"remote: argument {x!r} of type {type(x).__name__} cannot be hashed, which cached propagation "
                    "needs; give propagate=, a function or 'inspect'"
                ) from None
            key.append((type(x), x))
    return tuple(key)
