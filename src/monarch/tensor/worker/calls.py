"""Functions of the user on a worker's streams: called for their values, or for tensors of the table."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.runtime import cell
from monarch.tensor import carry, codes
from monarch.tensor.codes import Failure
from monarch.tensor.worker.streams import Poison, handlers, user_part

if TYPE_CHECKING:
    from monarch.tensor.worker.actor import Lane, Worker
    from monarch.tensor.worker.streams import WorkerStream


class Poisoned(Exception):
    """An argument is an error: the function is not run."""

    def __init__(self, poison: Poison) -> None:
        self.poison = poison


class MeshDim:
    """One dimension of a mesh as a worker sees it: the ranks along it, through this worker."""

    def __init__(self, name: str, members: list[int], rank: int) -> None:
        self.name, self.members, self.rank, self.size = name, members, rank, len(members)

    def __repr__(self) -> str:
        return f"MeshDim({self.name!r}, rank={self.rank}, size={self.size}, members={self.members})"


class WorkerMesh:
    """A device mesh as the argument of a remote function. `dims`: by name; `all_ranks`: of its workers."""

    def __init__(self, layout: tuple[Any, ...], rank: int) -> None:
        from monarch.mesh import Slice
        from monarch.tensor.worker.comms import members_of

        labels, offset, sizes, strides = layout
        whole = Slice(offset=offset, sizes=list(sizes), strides=list(strides))
        self.all_ranks = list(whole)
        self.dims: dict[str, MeshDim] = {}
        if rank in whole:
            for label, at in zip(labels, whole.coordinates(rank)):
                self.dims[label] = MeshDim(label, list(members_of(layout, (label,), rank)), at)


def filler(worker: Worker, values: list[Any], stream: WorkerStream, inert: bool = False) -> Callable[[str, Any], Any]:
    """What takes the place of holes in packed arguments."""

    def fill(kind: str, data: Any) -> Any:
        if kind == "tensor":
            return values[data]
        if kind == "mesh":
            return WorkerMesh(data, worker.rank)
        from monarch.tensor.worker import groups

        return groups.fill(worker, stream, kind, data, inert)

    return fill


def resolve(worker: Worker, fid: int) -> Callable[..., Any]:
    found = worker.functions[fid]
    if not isinstance(found, tuple):
        found = worker.functions[fid] = (found.resolve(),)
    function: Callable[..., Any] = found[0]
    return function


def run(stream: WorkerStream, fid: int, data: bytes, ids: Any, table: Any, inert: bool = False) -> tuple[Any, Any]:
    """(the function's value, its input tensors). Raises Poisoned, or what the function raises."""
    values = [table[i] for i in ids]
    for v in values:
        if isinstance(v, Poison):
            raise Poisoned(v)
    args, kwargs = carry.unpack(data, filler(stream.worker, values, stream, inert))
    function = resolve(stream.worker, fid)
    with torch.enable_grad():
        return function(*args, **kwargs), values


def failure_of(worker: Worker, e: BaseException, order: int, site: int) -> Failure:
    user_part(e)
    if cell.fetch_sources is not None:
        cell.fetch_sources(e)
    failure = Failure(order, site, worker.rank, "".join(traceback.format_exception(e)))
    worker.failures.append(failure)
    return failure


def store(leaves: list[Any], which: Any, outs: Any, table: Any) -> None:
    """Puts the tensors among the leaves of a result where the client expects them."""
    for at, ident in zip(which, outs):
        value = leaves[at]
        table[ident] = value.detach() if isinstance(value, torch.Tensor) else value


def leaves_of(value: Any, count: int) -> list[Any]:
    leaves = pytree.tree_leaves(value)
    if count >= 0 and len(leaves) != count:
        raise RuntimeError(f"unexpected number of returns from op, expected {count}, got {len(leaves)}")
    return list(leaves)


def _call(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    fid, data, mutated, count, which = c[5:10]
    try:
        value, _ = run(stream, fid, data, c[2], table)
        # a result of None may stand for a propagated None only
        leaves = leaves_of(value, -1 if not which else count)
    except Poisoned as e:
        stream.poison(c, mutated, e.poison, table)
        return
    store(leaves, which, c[3], table)


def ask_call(
    worker: Worker, reply: Callable[[Any], None], stream: WorkerStream, fid: int, data: bytes, ids: Any, mutated: Any,
    site: int, order: int, only: Any,
) -> None:  # fmt: skip
    """Runs a function for its value, on the stream; `only`: the one rank that runs it, None for all."""

    def answer() -> None:
        table = worker.table
        if only is not None and only != worker.rank:
            bad = next((v for i in ids if isinstance(v := table.get(i), Poison)), None)
            return reply(bad.failure if bad else None)
        try:
            value, _ = run(stream, fid, data, ids, table)
            value = pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, value)
        except Poisoned as e:
            failure = e.poison.failure
        except BaseException as e:
            failure = failure_of(worker, e, order, site)
        else:
            try:
                return reply((value,))
            except Exception as e:  # the value cannot be sent
                failure = failure_of(worker, e, order, site)
        for m in mutated:
            stream.poison_aliases(ids[m], Poison(failure), table)
        reply(failure)

    stream.put(answer)


def for_port(port: Any, frames: list[Any]) -> Callable[[Any], None]:
    """A reply that sends values, and exceptions for failures, to a port of the user."""
    from monarch.tensor.engine import RemoteException

    def reply(answer: Any) -> None:
        if isinstance(answer, Failure):
            port.exception(RemoteException(answer.text, frames, answer.rank))
        else:
            port.send(answer[0])

    return reply


def ask_propagate(
    worker: Worker, reply: Callable[[Any], None], stream: WorkerStream, fid: int, data: bytes, ids: Any, order: Any,
    site: int, number: int,
) -> None:  # fmt: skip
    """Runs a function for real, and answers what its result looks like: (leaves, spec, mutated)."""
    from monarch.tensor.propagate import describe

    def answer() -> None:
        table = worker.table
        before = {i: v._version for i in ids if isinstance(v := table.get(i), torch.Tensor)}
        try:
            value, values = run(stream, fid, data, ids, table, inert=True)
            inputs = [values[i] for i in order]
            found = describe(value, inputs, [before[ids[i]] for i in order])
            reply((found.leaves, found.spec, found.mutated))
        except Poisoned as e:
            reply(e.poison.failure)
        except BaseException as e:
            reply(failure_of(worker, e, number, site))

    stream.put(answer)


handlers[codes.CALL] = _call
