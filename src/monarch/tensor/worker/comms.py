"""Communicators of a worker: torch.distributed groups, made when first needed by a stream, through one store.

Each communicator belongs to one stream and one tuple of ranks. Streams carry out commands in the order the client
issued them, so all members meet at a new communicator, or a collective, in the same order.
"""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from monarch.tensor.worker.actor import Worker

#: how long a member waits for the others, who may be busy with what was issued before
PATIENCE = datetime.timedelta(minutes=30)


def open_store(worker: Worker, host: str) -> tuple[str, int]:
    """Starts the store in this process. `host`: the name others reach it by; "" for this machine's own name."""
    name = host or socket.gethostname()
    worker.store = dist.TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    return name, worker.store.port


def members_of(layout: tuple[Any, ...], dims: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` only along `dims` of a mesh, in row-major order."""
    from monarch.mesh import Slice

    labels, offset, sizes, strides = layout
    where = Slice(offset=offset, sizes=list(sizes), strides=list(strides)).coordinates(rank)
    start, part_sizes, part_strides = offset, [], []
    for label, n, stride, at in zip(labels, sizes, strides, where):
        if label in dims:
            part_sizes.append(n)
            part_strides.append(stride)
        else:
            start += at * stride
    return tuple(Slice(offset=start, sizes=part_sizes, strides=part_strides))


def backend(worker: Worker, key: Any, members: tuple[int, ...], kind: str) -> Any:
    """The communicator of `members` for `key` (the same on all of them); `kind` is "cpu" or "cuda"."""
    full = (key, members, kind)
    found = worker.groups.get(full)
    if found is None:
        store = store_for(worker, full)
        found = worker.groups[full] = make_backend(worker, store, members, kind)
    return found


def store_for(worker: Worker, key: Any) -> Any:
    assert worker.store_address is not None
    host, port = worker.store_address
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    return dist.PrefixStore(repr(key), client)


def make_backend(worker: Worker, store: Any, members: tuple[int, ...], kind: str) -> Any:
    rank = members.index(worker.rank)
    if kind == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(store, rank, len(members), options)
    options = dist.ProcessGroupGloo._Options()
    assert worker.store_address is not None
    local = worker.store_address[0] == "127.0.0.1"
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")] if local else [
        dist.ProcessGroupGloo.create_default_device()
    ]  # fmt: skip
    options._timeout = PATIENCE
    return dist.ProcessGroupGloo(store, rank, len(members), options)


def kind_of(t: Any) -> str:
    return "cuda" if isinstance(t, torch.Tensor) and t.is_cuda else "cpu"
