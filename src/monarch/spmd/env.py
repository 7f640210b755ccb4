"""The environment variables that `torchrun` would set, for every process of a mesh."""

from __future__ import annotations

import math
import os
import socket
from typing import Any, cast

from monarch.actor import Actor, ProcMesh, current_rank, endpoint
from monarch.mesh import Point


def rank_variables(point: Point, local_dims: int = 1) -> dict[str, str]:
    """RANK, LOCAL_RANK, GROUP_RANK, ... of one process; the last `local_dims` dims are within one host."""
    sizes = [point.size(label) for label in point]
    world = math.prod(sizes)
    local_size = math.prod(sizes[len(sizes) - local_dims :]) if sizes else 1
    rank = point.rank
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(world // local_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "rank",
    }


def free_port(host: str = "") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        port: int = s.getsockname()[1]
        return port


class _EnvSetter(Actor):
    """Sets launcher-style variables in its own process."""

    @endpoint
    async def choose_master(self, family_v6: bool = False) -> tuple[str, int]:
        host = socket.gethostname()
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            host = "127.0.0.1"
        return host, free_port()

    @endpoint
    async def apply(self, master_addr: str, master_port: int) -> None:
        os.environ.update(rank_variables(current_rank()))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master_addr, str(master_port)


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None
) -> None:
    """Sets the variables of `torchrun` in every process of the mesh; rank 0's host and a free port by default."""
    setter = cast(Any, proc_mesh.spawn("_env_setter", _EnvSetter))
    if master_addr is None or master_port is None:
        first = setter.flatten("rank").slice(rank=0)
        host, port = await first.choose_master.call_one()
        master_addr = host if master_addr is None else master_addr
        master_port = port if master_port is None else master_port
    await setter.apply.call(master_addr, master_port)


def setup_torch_elastic_env(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None
) -> None:
    """The blocking form of `setup_torch_elastic_env_async`."""
    setter = cast(Any, proc_mesh.spawn("_env_setter", _EnvSetter))
    if master_addr is None or master_port is None:
        host, port = setter.flatten("rank").slice(rank=0).choose_master.call_one().get()
        master_addr = host if master_addr is None else master_addr
        master_port = port if master_port is None else master_port
    setter.apply.call(master_addr, master_port).get()
