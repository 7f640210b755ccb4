"""`RemoteProcessGroup`: a process group of `torch.distributed`, named on the client and made on the workers."""

from __future__ import annotations

import itertools
from typing import Any

from monarch.tensor import carry
from monarch.tensor.mesh import DeviceMesh

_numbers = itertools.count(1)


class RemoteProcessGroup:
    """Workers that differ only along `dims` of `device_mesh`; each sees it as its own process group.

    An argument of remote functions: there it is a `torch.distributed` process group, made when first used. Collectives
    on it must be called by all its members in the same order.
    """

    _monarch_group_mesh = True

    def __init__(self, dims: tuple[str, ...], device_mesh: DeviceMesh) -> None:
        for name in dims:
            if name not in device_mesh.names:
                raise KeyError(f"mesh does not have dimension {name!r}; it has {list(device_mesh.names)}")
        self.dims, self.device_mesh = tuple(dims), device_mesh
        self.dropped = False
        self._ident = next(_numbers)

    def size(self) -> int:
        """Number of members of each group."""
        return self.device_mesh.size(self.dims)

    def drop(self) -> None:
        """The group is not used any more; idempotent."""
        self.dropped = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.dropped:
            raise TypeError("DROPPED: the process group was dropped; make another with mesh.process_group(dims)")
        self.device_mesh._engine.need_store()
        data = (self._ident, self.device_mesh._layout, self.dims)
        return carry.reduce_named("group", "a process group", data)

    def __repr__(self) -> str:
        return f"RemoteProcessGroup({self.dims}, {self.device_mesh})"
