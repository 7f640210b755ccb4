"""Distributed tensors: torch operations of one script, carried out by every process of a mesh.

with procs.activate():
    x = torch.rand(4, 4) @ torch.rand(4, 4)
print(monarch.inspect(x))
"""

from __future__ import annotations

from monarch.tensor import dispatch as _dispatch
from monarch.tensor.borrows import Borrow
from monarch.tensor.collectives import MeshSliceTensor, reduce, reduce_, slice_mesh, to_mesh
from monarch.tensor.engine import RemoteException
from monarch.tensor.fetch import fetch_shard, inspect, show
from monarch.tensor.groups import RemoteProcessGroup
from monarch.tensor.handle import Tensor
from monarch.tensor.mesh import DeviceMesh, get_active_mesh, no_mesh
from monarch.tensor.remotes import call_on_shard_and_fetch, remote
from monarch.tensor.streams import Stream, get_active_stream

__all__ = [
    "Borrow",
    "DeviceMesh",
    "MeshSliceTensor",
    "RemoteException",
    "RemoteProcessGroup",
    "Stream",
    "Tensor",
    "call_on_shard_and_fetch",
    "fetch_shard",
    "get_active_mesh",
    "get_active_stream",
    "inspect",
    "no_mesh",
    "reduce",
    "reduce_",
    "remote",
    "show",
    "slice_mesh",
    "to_mesh",
]
_unused = _dispatch
