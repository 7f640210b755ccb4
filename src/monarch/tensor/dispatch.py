"""From a torch operator to a command: metadata from a cache or a fake run, checks, new handles."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from monarch.tensor import checks, handle, sites, streams
from monarch.tensor.codes import CONSTANT
from monarch.tensor.handle import UNUSED, Group, Tensor, make
from monarch.tensor.meta import Fakes, Meta, faking, locally, meta_of, storage_key
from monarch.wire import pickling

_aten = torch.ops.aten
_default_dtype = torch.get_default_dtype
_SCALARS = (int, float, bool, complex)


class Op:
    """Facts of an operator that the cache key needs."""

    __slots__ = ("generic", "name", "special", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = f"{schema.name}.{func._overloadname}"
        #: scalars do not decide the result's metadata: one entry serves all their values
        self.generic = torch.Tag.pointwise in func.tags
        self.writes = tuple(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self.special = _special.get(func) or (_here_special if schema.name.startswith("profiler::") else None)


class Out:
    """One result: `kind` "new" (storage number `at` among the new ones), "alias" or "same" (of input `at`), "const"."""

    __slots__ = ("at", "kind", "meta", "value")

    def __init__(self, kind: str, at: int, meta: Meta | None, value: Any = None) -> None:
        self.kind, self.at, self.meta, self.value = kind, at, meta, value


class Entry:
    """What a call with given operator and metadata does."""

    __slots__ = ("mutated", "outs", "scalar", "simple", "storages", "template", "tid", "wrap")

    def __init__(self, tid: int, template: Any, outs: list[Out], wrap: Any, mutated: tuple[int, ...]) -> None:
        self.tid, self.template, self.outs, self.wrap, self.mutated = tid, template, outs, wrap, mutated
        self.storages = 1 + max((o.at for o in outs if o.kind == "new"), default=-1)
        one = len(outs) == 1 and wrap is None
        self.simple = outs[0].meta if one and outs[0].kind == "new" else None
        self.scalar = False  #: deterministic, of scalars only: the client may know the values


_ops: dict[Any, Op] = {}
_entries: dict[tuple[Any, ...], Entry] = {}
_all_entries: list[Entry] = []
_lock = threading.Lock()


class _Reader:
    """Splits a call into inputs, scalars and a cache key."""

    __slots__ = ("generic", "ins", "key", "scalars")

    def __init__(self, key: list[Any], generic: bool) -> None:
        self.key, self.generic = key, generic
        self.ins: list[Tensor] = []
        self.scalars: list[Any] = []

    def read(self, a: Any) -> None:
        kind = type(a)
        key = self.key
        if kind is Tensor:
            self.ins.append(a)
            key.append(a._meta)
        elif kind in _SCALARS:
            key.append(kind)
            if self.generic:
                self.scalars.append(a)
            else:
                key.append(a)
        elif kind is list or kind is tuple or kind is torch.Size:
            key.append(("[", len(a)))
            for x in a:
                self.read(x)
        elif isinstance(a, torch.Tensor):
            if not isinstance(a, Tensor):
                raise _Local
            self.ins.append(a)
            key.append(a._meta)
        else:
            key.append(a)


class _Local(Exception):
    """An operand is a plain tensor."""


def issue(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    """Runs an operator on the workers of its operands' mesh; without operands, of `mesh`. Returns handles at once."""
    op = _ops.get(func)
    if op is None:
        op = _ops[func] = Op(func)
    if op.special is not None:
        result = op.special(func, args, kwargs or {}, mesh)
        if result is not NotImplemented:
            return result
    reader = _Reader([func, _default_dtype()], op.generic)
    try:
        for a in args:
            reader.read(a)
        if kwargs:
            for name, a in kwargs.items():
                reader.key.append(name)
                reader.read(a)
    except _Local:
        local = True
    else:
        local = False
    if local:
        return _refuse_or_run_here(func, args, kwargs or {}, mesh)
    ins = reader.ins
    stream = streams.active.stream
    if ins:
        lane = ins[0]._group.lane
        if lane.stream is not stream:
            raise _refusal(func, args, kwargs, lane.engine.lane(lane.mesh, stream), ())
        flags = 0
        for t in ins:
            group = t._group
            if group.lane is not lane:
                raise _refusal(func, args, kwargs, lane, ())
            flags |= group.flags
    elif mesh is not None:
        lane = mesh._engine.lane(mesh, stream)
        flags = 0
    else:
        return run_here(func, args, kwargs)
    key = tuple(reader.key)
    entry = _entries.get(key)
    if entry is None:
        if flags and (error := checks.refusal(func, args, kwargs or {}, lane, ())):
            raise error
        entry = _discover(op, key, func, args, kwargs or {}, ins, reader.scalars)
    if flags:
        _look_closer(func, args, kwargs, ins, lane, entry.mutated)
    engine = lane.engine
    if entry.tid not in engine.known:
        engine.known.add(entry.tid)
        engine.define(("op", entry.tid, entry.template))
    meta = entry.simple
    made: Any
    outs: tuple[int, ...]
    if meta is not None:
        made = make(meta, Group(lane))
        outs = (made._ref.ident,)
    else:
        made, outs = _results(entry, ins, lane)
    dead = lane.take_dead() if lane.dead else ()
    command = (entry.tid, sites.here(), tuple([t._ref.ident for t in ins]), outs, dead)
    engine.emit(lane, command + (tuple(reader.scalars),) if reader.scalars else command)
    if entry.scalar:
        _follow_scalars(func, args, kwargs or {}, ins, entry, made)
    elif entry.mutated:
        for i in entry.mutated:
            ins[i]._group.const = None
    return made


handle.issue = issue


def _results(entry: Entry, ins: list[Tensor], lane: Any) -> tuple[Any, tuple[int, ...]]:
    groups = [Group(lane) for _ in range(entry.storages)]
    flat: list[Any] = []
    ids: list[int] = []
    for o in entry.outs:
        if o.kind == "new":
            t: Any = make(o.meta, groups[o.at])  # type: ignore[arg-type]
            ids.append(t._ref.ident)
        elif o.kind == "alias":
            t = make(o.meta, ins[o.at]._group)  # type: ignore[arg-type]
            ids.append(t._ref.ident)
        elif o.kind == "same":
            t = ins[o.at]
            ids.append(0)
        else:
            t = o.value
            ids.append(0)
        flat.append(t)
    if entry.wrap is None:
        return flat[0], tuple(ids) if ids[0] else ()
    return entry.wrap(flat), tuple(ids)


def _look_closer(func: Any, args: Any, kwargs: Any, ins: list[Tensor], lane: Any, mutated: tuple[int, ...]) -> None:
    """Some operand is dropped or takes part in a borrow."""
    error = checks.refusal(func, args, kwargs or {}, lane, {id(ins[i]) for i in mutated})
    if error is not None:
        raise error
    for t in ins:
        if t._group.flags & UNUSED:
            t._group.origin.first_use()


def _refusal(func: Any, args: Any, kwargs: Any, lane: Any, mutated: Any) -> TypeError:
    error = checks.refusal(func, args, kwargs or {}, lane, mutated)
    assert error is not None
    return error


def run_here(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes on local tensors, whatever is active; on distributed ones, dispatches to their mesh."""
    with locally():
        return func(*args, **(kwargs or {}))


def _refuse_or_run_here(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    distributed = [a for a in _leaves((args, kwargs)) if isinstance(a, Tensor)]
    if mesh is None and not distributed:
        return run_here(func, args, kwargs)
    lane = distributed[0]._group.lane if distributed else mesh._engine.lane(mesh, streams.active.stream)
    raise _refusal(func, args, kwargs, lane, ())


def _leaves(tree: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    return list(pytree.tree_leaves(tree))


# -- a call seen for the first time


def _discover(op: Op, key: Any, func: Any, args: Any, kwargs: Any, ins: list[Tensor], scalars: list[Any]) -> Entry:
    fakes = Fakes()
    numbers: dict[int, int] = {}
    with faking():
        swap = lambda a: fakes.of(a) if isinstance(a, Tensor) else a
        fake_args, fake_kwargs = _map((tuple(args), dict(kwargs)), swap)
        fake_ins = [fakes.of(t) for t in ins]
        before = [meta_of(f) for f in fake_ins]
        raw = func(*fake_args, **fake_kwargs)
        after = [meta_of(f) for f in fake_ins]
        if before != after:
            raise TypeError(
                f"{op.name} would change the shape or strides of a distributed tensor in place, which is not "
                "supported: use the form that returns a new tensor (t.unsqueeze(0), t.reshape(...))"
            )
        keys: dict[int, int] = {}
        for i, f in enumerate(fake_ins):
            keys.setdefault(storage_key(f), i)
        outs: list[Out] = []

        def describe(x: Any) -> None:
            if not isinstance(x, torch.Tensor):
                outs.append(Out("const", 0, None, x))
                return
            for i, f in enumerate(fake_ins):
                if x is f:
                    outs.append(Out("same", i, None))
                    return
            where = storage_key(x)
            if where in keys:
                outs.append(Out("alias", keys[where], meta_of(x)))
            else:
                outs.append(Out("new", numbers.setdefault(where, len(numbers)), meta_of(x)))

        wrap: Any = None
        if isinstance(raw, (tuple, list)):
            kinds = [type(x) for x in raw]
            if list in kinds or tuple in kinds:
                sizes = [len(x) if isinstance(x, (list, tuple)) else None for x in raw]
                for x in raw:
                    for y in x if isinstance(x, (list, tuple)) else [x]:
                        describe(y)
                wrap = _nested(type(raw), sizes)
            else:
                for x in raw:
                    describe(x)
                wrap = tuple if isinstance(raw, tuple) else list
        else:
            describe(raw)
    mutated = []
    flat_args = list(args) + [None] * (len(op.writes) - len(args))
    for i, a in enumerate(flat_args[: len(op.writes)]):
        name = func._schema.arguments[i].name
        value = kwargs.get(name) if i >= len(args) else a
        if op.writes[i]:
            ids = {id(t) for t in _leaves(value) if isinstance(t, Tensor)}
            mutated += [j for j, t in enumerate(ins) if id(t) in ids]
    written = tuple(sorted(set(mutated)))
    dtype = None if _default_dtype() is torch.float32 else _default_dtype()
    parts = _template(op, func, args, kwargs, [o for o in outs if o.kind == "new"])
    template = pickling.dump_bytes((*parts, dtype, written))
    with _lock:
        entry = _entries.get(key)
        if entry is None:
            entry = Entry(len(_all_entries), template, outs, wrap, written)
            entry.scalar = (
                all(t._meta.single for t in ins)
                and torch.Tag.nondeterministic_seeded not in func.tags
                and not op.name.startswith("aten::empty")
                and bool(outs)
                and all(o.kind == "same" or (o.meta is not None and o.meta.single) for o in outs)
            )
            _all_entries.append(entry)
            _entries[key] = entry
    return entry


def _nested(kind: Any, sizes: list[Any]) -> Any:
    def wrap(flat: list[Any]) -> Any:
        out: list[Any] = []
        at = 0
        for n in sizes:
            if n is None:
                out.append(flat[at])
                at += 1
            else:
                out.append(list(flat[at : at + n]))
                at += n
        return tuple(out) if kind is tuple else out

    return wrap


def _map(tree: Any, swap: Any) -> Any:
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, (list, tuple)):
        return type(tree)([_map(x, swap) for x in tree])
    if isinstance(tree, dict):
        return {k: _map(v, swap) for k, v in tree.items()}
    return swap(tree)


def _template(op: Op, func: Any, args: Any, kwargs: Any, new: list[Out]) -> tuple[Any, ...]:
    """(operator, arguments with holes, keyword arguments): what a worker needs to build the call."""
    counts = [0, 0]

    def hole(a: Any) -> Any:
        if isinstance(a, Tensor):
            counts[0] += 1
            return ("t", counts[0] - 1)
        if op.generic and type(a) in _SCALARS:
            counts[1] += 1
            return ("s", counts[1] - 1)
        return ("c", a)

    def shape(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return ("l", [shape(x) for x in a])
        return hole(a)

    positional = [shape(a) for a in args]
    named = {k: shape(v) for k, v in kwargs.items()}
    dtype = new[0].meta.dtype if len(new) == 1 and new[0].meta is not None else None
    unsaid = not counts[0] and named.get("dtype", ("c", None))[1] is None
    if unsaid and dtype is not None and any(a.name == "dtype" for a in func._schema.arguments):
        named["dtype"] = ("c", dtype)
    return (op.name, positional, named)


# -- scalars that the client can follow


def _follow_scalars(func: Any, args: Any, kwargs: Any, ins: list[Tensor], entry: Entry, result: Any) -> None:
    if any(t._group.const is None for t in ins):
        for i in entry.mutated:
            ins[i]._group.const = None
        return
    swap = lambda a: a._group.const if isinstance(a, Tensor) else a
    try:
        with locally(), torch.no_grad():
            local_args, local_kwargs = _map((tuple(args), dict(kwargs)), swap)
            if "device" in local_kwargs:
                local_kwargs["device"] = "cpu"
            if "pin_memory" in local_kwargs:
                local_kwargs["pin_memory"] = False
            value = func(*local_args, **local_kwargs)
    except Exception:
        for i in entry.mutated:
            ins[i]._group.const = None
        return
    if isinstance(result, Tensor) and entry.outs[0].kind == "new" and isinstance(value, torch.Tensor):
        result._group.const = value


def _optimizer_asks() -> bool:
    """The value is wanted by an optimiser of torch, for its step counter."""
    frame: Any = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch.optim"):
            return True
        frame = frame.f_back
    return False


# -- operators with rules of their own


def _item(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    t = args[0]
    if not isinstance(t, Tensor):
        return run_here(func, args, kwargs)
    if t._group.const is not None and _optimizer_asks():
        return t._group.const.item()
    return NotImplemented


def _lift(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    t = args[0]
    if isinstance(t, Tensor) or mesh is None:
        return NotImplemented if isinstance(t, Tensor) else run_here(func, args, kwargs)
    return constant(t, mesh)


def constant(t: Any, mesh: Any) -> Tensor:
    """Sends a local tensor's value to all workers of a mesh."""
    lane = mesh._engine.lane(mesh, streams.active.stream)
    with locally(), torch.no_grad():
        value = t.detach().cpu().clone(memory_format=torch.contiguous_format)
        meta = meta_of(value)
    out = make(meta, Group(lane))
    if meta.single:
        out._group.const = value.clone() if meta.single else None
    mesh._engine.emit(lane, (CONSTANT, sites.here(), (), (out._ref.ident,), lane.take_dead(), value))
    return out


def _here_special(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    """Marks of the client's own profiler."""
    return run_here(func, args, kwargs)


def _same_size(func: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
    return args[0].shape == args[1].shape


_special: dict[Any, Any] = {
    _aten._local_scalar_dense.default: _item,
    _aten.lift_fresh.default: _lift,
    _aten.lift_fresh_copy.default: _lift,
    _aten.lift.default: _lift,
    _aten.is_same_size.default: _same_size,
}
