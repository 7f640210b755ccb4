"""Process groups and other client objects, as arguments of remote functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch.tensor.worker import comms

if TYPE_CHECKING:
    from monarch.tensor.worker.actor import Worker
    from monarch.tensor.worker.streams import WorkerStream


def fill(worker: Worker, stream: WorkerStream, kind: str, data: Any, inert: bool) -> Any:
    """What a client object is on this worker: a process group, or an object that lives here."""
    if kind == "group":
        return _group(worker, stream, data, inert)
    if kind == "object":
        return _object(worker, data)
    raise ValueError(f"unknown kind of argument {kind!r}")


def _object(worker: Worker, ident: int) -> Any:
    return worker.objects[ident]


def _group(worker: Worker, stream: WorkerStream, data: Any, inert: bool) -> Any:
    ident, layout, dims = data
    members = comms.members_of(layout, dims, worker.rank)
    if inert:
        from torch._C._distributed_c10d import FakeProcessGroup

        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        return make(members.index(worker.rank), len(members))
    key = ("user", ident, members)
    found = worker.groups.get(key)
    if found is None:
        found = worker.groups[key] = _new_group(worker, key, members)
    return found


def _new_group(worker: Worker, key: Any, members: tuple[int, ...]) -> Any:
    """A process group that `torch.distributed` functions take as `group=`."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store = comms.store_for(worker, key)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    name = f"monarch-{worker.ident}-{key[1]}-{members}"
    group = dist.ProcessGroup(store, members.index(worker.rank), len(members))
    cpu = comms.make_backend(worker, dist.PrefixStore("cpu", store), members, "cpu")
    cpu._set_sequence_number_for_group()
    backends = {"cpu": (cpu, dist.ProcessGroup.BackendType.GLOO)}
    if kind == "cuda":
        gpu = comms.make_backend(worker, dist.PrefixStore("cuda", store), members, "cuda")
        backends["cuda"] = (gpu, dist.ProcessGroup.BackendType.NCCL)
    for device, (backend, which) in backends.items():
        group._set_default_backend(which)
        group._register_backend(torch.device(device), which, backend)
    group._set_group_name(name)
    world = c10d._world
    world.pg_map[group] = ("nccl" if kind == "cuda" else "gloo", store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {m: i for i, m in enumerate(members)}
    world.pg_backend_config[group] = "cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo"
    c10d._register_process_group(name, group)
    return group
