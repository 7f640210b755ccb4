"""`remote`: a function that runs on every worker of a mesh, with distributed tensors as arguments and results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.mesh import Shape, Slice, ValueMesh
from monarch.runtime.future import Future
from monarch.tensor import carry, checks, sites, streams
from monarch.tensor.codes import CALL
from monarch.tensor.fetch import first_error, shard_rank, use
from monarch.tensor.functions import resolvable_function
from monarch.tensor.handle import UNUSED, Tensor
from monarch.tensor.mesh import DeviceMesh, active, mesh_of
from monarch.tensor.propagate import Result, by_function, key_of, nothing

_numbers = itertools.count(1)
_hit = _miss = 0  #: of cached propagation


class Remote:
    """See `remote`."""

    _is_monarch_remote = True

    def __init__(self, function: Any, propagate: Any) -> None:
        if propagate not in (None, "cached", "inspect", "mocked") and not callable(propagate):
            raise ValueError(f"propagate={propagate!r}: expected None, 'cached', 'inspect', 'mocked' or a function")
        self._function, self._propagate = function, propagate
        self._resolvable: Any = None
        self._number = next(_numbers)
        self._cache: dict[Any, Result] = {}
        self.__qualname__ = str(function if isinstance(function, str) else getattr(function, "__name__", "?"))
        if callable(function):
            functools.update_wrapper(self, function, updated=())

    # -- adverbs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rref(*args, **kwargs)

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on all workers of the mesh of the tensors among the arguments (else the active one).

        Returns at once: the result's structure, with distributed tensors inside.
        """
        lane, tensors = self._lane(args, kwargs, None)
        engine = lane.engine
        if self._propagate in (None, "cached"):
            result = self._cached(lane, args, kwargs)
        else:
            result = self._propagated(args, kwargs, tensors)
        data, ins = carry.pack((args, kwargs))
        mutated = self._ordered(result.mutated, tensors, ins)
        _check(self, args, kwargs, lane, {id(ins[i]) for i in mutated})
        fid = self._define(engine)
        made, outs = result.build(tensors, lane)
        for i in mutated:
            ins[i]._group.const = None
        command = (
            CALL, sites.here(), tuple(t._ref.ident for t in ins), outs, lane.take_dead(), fid, data, mutated,
            len(result.leaves), result.which,
        )  # fmt: skip
        engine.emit(lane, command)
        return made

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Runs on all workers of the active mesh; the future has their values, by rank."""
        mesh, question = self._question(args, kwargs)
        shape = Shape(list(mesh.names), Slice.new_row_major(list(mesh.processes.sizes)))
        engine = mesh._engine

        def decode(answers: list[Any]) -> Any:
            return ValueMesh(shape, [v[0] for v in first_error(engine, answers)])

        values: Future[ValueMesh[Any]] = engine.ask(mesh, question, decode)
        return values

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs on the only worker of the active mesh. ValueError when it has another size than 1."""
        mesh = _active_mesh()
        if len(mesh.processes) != 1:
            raise ValueError(f"call_one requires exactly 1 actor, but mesh has {len(mesh.processes)}")
        return self._on_one(mesh, args, kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs on one worker of the active mesh, picked at random."""
        import random

        mesh = _active_mesh()
        rank = random.choice(list(mesh.processes))
        return self._on_one(mesh_of(mesh._engine, (), Slice(offset=rank, sizes=[], strides=[])), args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
        """Runs on all workers of the active mesh; futures complete in the order of the answers."""
        mesh, question = self._question(args, kwargs)
        engine = mesh._engine
        values: Iterator[Future[Any]] = engine.ask_each(mesh, question, lambda a: first_error(engine, [a])[0][0])
        return values

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Runs on all workers of the active mesh; nobody waits. An error is reported by `exit()` of the mesh."""
        mesh = _active_mesh()
        lane, tensors = self._lane(args, kwargs, mesh)
        data, ins = carry.pack((args, kwargs))
        result = self._propagated(args, kwargs, tensors) if self._propagate is not None else nothing()
        mutated = self._ordered(result.mutated, tensors, ins)
        _check(self, args, kwargs, _lane_of(tensors) or lane, {id(ins[i]) for i in mutated})
        fid = self._define(lane.engine)
        ids = tuple(t._ref.ident for t in ins)
        lane.engine.emit(lane, (CALL, sites.here(), ids, (), lane.take_dead(), fid, data, mutated, -1, ()))

    def _send(self, args: Any, kwargs: Any, port: Any, selection: str) -> None:
        """For `monarch.actor.send`."""
        if port is None:
            return self.broadcast(*args, **kwargs)
        mesh, question = self._question(args, kwargs)
        if selection == "choose":
            import random

            rank = random.choice(list(mesh.processes))
            mesh = mesh_of(mesh._engine, (), Slice(offset=rank, sizes=[], strides=[]))
        mesh._engine.ask_port(mesh, (*question, sites.frames(question[-1])), port)

    # -- how

    def _on_one(self, mesh: DeviceMesh, args: Any, kwargs: Any) -> Future[Any]:
        mesh, question = self._question(args, kwargs, mesh)
        engine = mesh._engine
        value: Future[Any] = engine.ask(mesh, question, lambda answers: first_error(engine, answers)[0][0])
        return value

    def _question(self, args: Any, kwargs: Any, mesh: Any = None) -> tuple[DeviceMesh, tuple[Any, ...]]:
        mesh = mesh or _active_mesh()
        lane, tensors = self._lane(args, kwargs, mesh)
        data, ins = carry.pack((args, kwargs))
        result = nothing() if self._propagate in (None, "cached") else self._propagated(args, kwargs, tensors)
        mutated = self._ordered(result.mutated, tensors, ins)
        _check(self, args, kwargs, _lane_of(tensors) or lane, {id(ins[i]) for i in mutated})
        fid = self._define(lane.engine)
        for i in mutated:
            ins[i]._group.const = None
        return mesh, ("call", lane.ident, fid, data, [t._ref.ident for t in ins], mutated, sites.here())

    def _lane(self, args: Any, kwargs: Any, mesh: Any) -> tuple[Any, list[Tensor]]:
        """Where to run: on `mesh`, or where the tensors are. And the tensors, in the order of the arguments."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())
        groups = [x for x in leaves if hasattr(type(x), "_monarch_group_mesh")]
        stream = streams.active.stream
        if tensors:
            home = tensors[0]._group.lane
            where = home.mesh if mesh is None else mesh
            lane = home.engine.lane(home.mesh, stream)
            if where is not home.mesh:
                if where._engine is not home.engine or not set(where.processes) <= set(home.mesh.processes):
                    raise ValueError(f"the active mesh {where} is not a subset of the tensors' mesh {home.mesh}")
                _check(self, args, kwargs, lane, ())
                return home.engine.lane(where, stream), tensors
            _check(self, args, kwargs, lane, ())
            return lane, tensors
        if mesh is None:
            mesh = active.mesh or (groups[0].device_mesh if groups else None)
        lane = None if mesh is None else mesh._engine.lane(mesh, stream)
        if lane is None or any(isinstance(x, torch.Tensor) for x in leaves):
            error = checks.refusal(self, args, kwargs, lane, ())
            raise error or TypeError(
                f"Remote functions require an active device mesh: {self!r} has no distributed tensor among its "
                "arguments; use `with mesh.activate():`"
            )
        return lane, tensors

    def _ordered(self, mutated: tuple[int, ...], tensors: list[Tensor], ins: list[Tensor]) -> tuple[int, ...]:
        """Numbers among `tensors` (the arguments, in order) as numbers among `ins` (in the order of pickling)."""
        at = {id(t): i for i, t in enumerate(ins)}
        return tuple(at[id(tensors[i])] for i in mutated)

    def _propagated(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> Result:
        if self._propagate == "inspect":
            return nothing()
        if self._propagate == "mocked":
            raise NotImplementedError("propagate='mocked' is not supported: give a function, 'cached' or 'inspect'")
        if not callable(self._propagate):
            return nothing()
        return by_function(self._propagate, args, kwargs, tensors)

    def _cached(self, lane: Any, args: Any, kwargs: Any) -> Result:
        global _hit, _miss
        key = key_of(args, kwargs)
        found = self._cache.get(key)
        if found is not None:
            _hit += 1
            return found
        _miss += 1
        engine = lane.engine
        data, ins = carry.pack((args, kwargs))
        rank = next(iter(lane.mesh.processes))
        one = mesh_of(engine, (), Slice(offset=rank, sizes=[], strides=[]))
        tensors = list({id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}.values())
        order = [next(i for i, t in enumerate(ins) if t is x) for x in tensors]
        fid = self._define(engine)
        question = ("propagate", engine.lane(one, lane.stream).ident, fid, data, [t._ref.ident for t in ins], order,
                    sites.here())  # fmt: skip
        answer = engine.ask(one, question, lambda answers: first_error(engine, answers)[0]).get()
        leaves, spec, mutated = answer
        found = self._cache[key] = Result(leaves, spec, tuple(mutated))
        return found

    def _define(self, engine: Any) -> int:
        """The function's number, known to the workers of `engine` from now on."""
        if ("f", self._number) not in engine.known:
            if self._resolvable is None:
                self._resolvable = resolvable_function(self._function)
            engine.known.add(("f", self._number))
            engine.define(("function", self._number, self._resolvable))
        return self._number

    def __reduce__(self) -> Any:
        return Remote, (self._function, self._propagate)

    def __repr__(self) -> str:
        name = self._function if isinstance(self._function, str) else getattr(self._function, "__qualname__", "?")
        return f"<remote function {name}>"


def _lane_of(tensors: list[Tensor]) -> Any:
    if not tensors:
        return None
    home = tensors[0]._group.lane
    return home.engine.lane(home.mesh, streams.active.stream)


def _check(func: Any, args: Any, kwargs: Any, lane: Any, mutated: Any) -> None:
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    wrong = False
    for t in leaves:
        group = getattr(t, "_group", None)
        wrong = wrong or group is None or group.lane is not lane or bool(group.flags & ~UNUSED)
    if wrong:
        error = checks.refusal(func, args, kwargs, lane, mutated)
        if error is not None:
            raise error
    for t in leaves:
        use(t)


def _active_mesh() -> DeviceMesh:
    if active.mesh is None:
        raise ValueError("call requires an active proc_mesh: use `with mesh.activate():`")
    return active.mesh


def remote(function: Any = None, *, propagate: Any = None) -> Any:
    """Makes a function run on workers: `@remote`, `@remote(propagate=...)`, `remote("package.module.name")`.

    Calling it (or `.rref(...)`) runs it on all workers of the mesh and returns distributed tensors at once; `.call`,
    `.call_one`, `.choose`, `.stream` and `.broadcast` are the adverbs of endpoints and collect Python values.
    Distributed tensors among the arguments arrive as the worker's own tensors, meshes as `.dims[name].rank/.size`.

    `propagate` says how the client learns the result's structure: a function, run on fake tensors; "cached" (also
    None): the function runs once more on the first worker for each new combination of arguments; "inspect": None is
    returned and nothing is written.
    Raises ValueError for functions that cannot be sent.
    """
    if function is None:
        return lambda f: Remote(f, propagate)
    if isinstance(function, str) and "." not in function:
        raise ValueError(f"remote: unsupported target {function!r}; give a function, or an import path with a dot")
    return Remote(function, propagate)


def call_on_shard_and_fetch(
    remote_function: Any, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """Runs a remote function on one worker; the future has its value. What it writes changes on that worker only.

    `shard`: the worker's coordinates, the first one when None. Raises as `fetch_shard` does.
    """
    if not isinstance(remote_function, Remote):
        remote_function = Remote(remote_function, None)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    mesh = tensors[0].mesh if tensors else active.mesh
    if mesh is None:
        raise ValueError("call_on_shard_and_fetch: no device mesh is active, and no argument is a distributed tensor")
    rank = shard_rank(mesh, shard, {})
    engine = mesh._engine
    if not tensors:
        one = mesh_of(engine, (), Slice(offset=rank, sizes=[], strides=[]))
        value: Future[Any] = remote_function._on_one(one, args, kwargs)
        return value
    mesh, question = remote_function._question(args, kwargs, mesh)

    def decode(answers: list[Any]) -> Any:
        found = first_error(engine, answers)
        return next(v for v in found if v is not None)[0]

    fetched: Future[Any] = engine.ask(mesh, (*question, rank), decode)
    return fetched
