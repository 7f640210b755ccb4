"""Collectives of a worker. On CPU, each message carries one element more: whether the sender's value is an error.

So a worker whose input failed takes part all the same, its peers do not hang, and everybody's result is an error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from monarch.tensor import codes
from monarch.tensor.codes import Failure
from monarch.tensor.worker import comms
from monarch.tensor.worker.streams import Poison, handlers

if TYPE_CHECKING:
    from monarch.tensor.worker.actor import Lane
    from monarch.tensor.worker.streams import WorkerStream

_Op = dist.ReduceOp
#: reduction -> (gloo's, element of a good value, element of an error, how to tell)
_DIRECT: dict[str, tuple[Any, int, int]] = {
    "sum": (_Op.SUM, 0, 1),
    "avg": (_Op.SUM, 0, 1),
    "product": (_Op.PRODUCT, 1, 0),
    "min": (_Op.MIN, 1, 0),
    "max": (_Op.MAX, 0, 1),
}
_NATIVE = {torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64}
_LOCAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype) if x.dtype is not torch.bool else x.any(0),
    "avg": lambda x: x.mean(0),
    "product": lambda x: x.prod(0, dtype=x.dtype) if x.dtype is not torch.bool else x.all(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
    "band": lambda x: functools.reduce(operator.and_, x.unbind(0)),
    "bor": lambda x: functools.reduce(operator.or_, x.unbind(0)),
    "bxor": lambda x: functools.reduce(operator.xor, x.unbind(0)),
}


def _reduce(stream: WorkerStream, lane: Lane, c: Any, table: dict[int, Any]) -> None:
    site, ins, outs = c[1], c[2], c[3]
    dims, reduction, scatter, where, shape, dtype, device = c[5:12]
    value = table[ins[0]]
    poison = value if isinstance(value, Poison) else None
    if poison is not None:
        value = torch.zeros(_input_shape(shape, dims, reduction, scatter, lane), dtype=dtype, device=device)
    target = table[ins[1]] if where == "out" else value
    if where == "out" and isinstance(target, Poison):
        target = torch.empty(shape, dtype=dtype, device=device)  # the result replaces what was an error
    worker = stream.worker
    members = comms.members_of(lane.layout, dims, worker.rank)
    if len(members) == 1:
        result, bad = _alone(value, reduction, scatter), poison is not None
    elif value.is_cuda:
        result, bad = _on_gpu(comms.backend(worker, stream.ident, members, "cuda"), value, reduction, scatter, members)
        bad = bad or poison is not None
    else:
        group = comms.backend(worker, stream.ident, members, "cpu")
        result, bad = _on_cpu(group, value, reduction, scatter, len(members), poison is not None)
    if bad:
        poison = poison or Poison(Failure(0, site, worker.rank, ""))
        table[outs[0]] = poison
        if where != "new":
            stream.poison_aliases(ins[-1], poison, table)
        return
    if where == "new":
        table[outs[0]] = result
    else:
        target.copy_(result)
        table[outs[0]] = target


def _input_shape(shape: Any, dims: Any, reduction: str, scatter: bool, lane: Lane) -> tuple[int, ...]:
    labels, _, sizes, _ = lane.layout
    if scatter and reduction != "stack":
        return (sizes[labels.index(dims[0])], *shape)
    return tuple(shape[1:]) if reduction == "stack" and not scatter else tuple(shape)


def _alone(value: torch.Tensor, reduction: str, scatter: bool) -> torch.Tensor:
    if reduction == "stack" and not scatter:
        return value.unsqueeze(0).clone()
    return value[0].clone() if scatter and reduction != "stack" else value.clone()


def _on_cpu(
    group: Any, value: torch.Tensor, reduction: str, scatter: bool, n: int, failed: bool
) -> tuple[torch.Tensor, bool]:
    if scatter:
        rows, bad = _exchange(group, value.contiguous(), n, failed)
        return (rows if reduction == "stack" else _LOCAL[reduction](rows)), bad
    if reduction == "stack":
        return _gather(group, value, n, failed)
    if reduction not in _DIRECT or value.dtype not in _NATIVE:
        rows, bad = _gather(group, value, n, failed)
        return _LOCAL[reduction](rows), bad
    op, good, error = _DIRECT[reduction]
    count = value.numel()
    both = torch.empty(count + 1, dtype=value.dtype)
    out = both[:count].view(value.shape)
    out.copy_(value)
    both[count] = error if failed else good
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([both], options).wait()
    bad = both[count].item() != good
    if reduction == "avg":
        out /= n
    return out, bad


def _with_mark(rows: torch.Tensor, failed: bool) -> torch.Tensor:
    """Bytes of each row, and one that says whether they mean anything."""
    n = rows.shape[0]
    raw = rows.reshape(n, -1).contiguous().view(torch.uint8) if rows.numel() else rows.new_empty(n, 0).view(torch.uint8)
    both = torch.empty(n, raw.shape[1] + 1, dtype=torch.uint8)
    both[:, :-1] = raw
    both[:, -1] = int(failed)
    return both


def _without_mark(both: torch.Tensor, dtype: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
    bad = bool(both[:, -1].any())
    return both[:, :-1].contiguous().view(dtype).reshape(shape), bad


def _gather(group: Any, value: torch.Tensor, n: int, failed: bool) -> tuple[torch.Tensor, bool]:
    mine = _with_mark(value.reshape(1, -1), failed)[0]
    everybody = torch.empty(n, mine.numel(), dtype=torch.uint8)
    group.allgather([list(everybody.unbind(0))], [mine]).wait()
    return _without_mark(everybody, value.dtype, (n, *value.shape))


def _exchange(group: Any, value: torch.Tensor, n: int, failed: bool) -> tuple[torch.Tensor, bool]:
    mine = _with_mark(value, failed)
    theirs = torch.empty_like(mine)
    group.alltoall_base(theirs, mine, [], [], dist.AllToAllOptions()).wait()
    return _without_mark(theirs, value.dtype, tuple(value.shape))


def _on_gpu(group: Any, value: torch.Tensor, reduction: str, scatter: bool, members: Any) -> tuple[torch.Tensor, bool]:
    """NCCL. An error is known to its own worker only; a fetch asks all of them."""
    n = len(members)
    native = {"sum": _Op.SUM, "avg": _Op.AVG, "product": _Op.PRODUCT, "min": _Op.MIN, "max": _Op.MAX}
    value = value.contiguous()
    if reduction not in native or value.dtype is torch.bool:
        raw = value.view(torch.uint8) if value.dtype is torch.bool else value
        rows = raw.new_empty((n, *raw.shape)) if not scatter else torch.empty_like(raw)
        if scatter:
            group.alltoall_base(rows, raw, [], [], dist.AllToAllOptions()).wait()
        else:
            group._allgather_base(rows, raw, dist.AllgatherOptions()).wait()
        rows = rows.view(value.dtype)
        return (rows if reduction == "stack" else _LOCAL[reduction](rows)), False
    if scatter:
        out = torch.empty_like(value[0])
        options = dist.ReduceScatterOptions()
        options.reduceOp = native[reduction]
        group._reduce_scatter_base(out, value, options).wait()
        return out, False
    out = value.clone()
    all_options = dist.AllreduceOptions()
    all_options.reduceOp = native[reduction]
    group.allreduce([out], all_options).wait()
    return out, False


handlers[codes.REDUCE] = _reduce
