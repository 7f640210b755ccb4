"""GPU memory: copies in and out of it, staged where the other side is not a GPU of this process.

Imported only when a CUDA tensor is seen. A region of GPU memory keeps a flat uint8 tensor over its bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

from monarch.rdma._handle import Handle
from monarch.rdma._memory import Region
from monarch.rdma._paths import Local, Op, Path
from monarch.rdma._peer import Cancelled, Dropped, Gone, Peer
from monarch.rdma._table import Table


@functools.lru_cache(maxsize=1)
def check_allocator() -> None:
    """Warns, once, unless the CUDA allocator uses expandable segments, which a NIC can register behind one key."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    if "expandable_segments:true" not in settings.replace(" ", "").lower():
        warnings.warn(
            "CUDA memory is allocated without expandable segments, which RDMA needs for full performance: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment before torch is imported",
            UserWarning,
            stacklevel=5,
        )


def read(region: Region, offset: int, view: memoryview) -> None:
    """GPU bytes from `offset` on -> host memory. The copy is complete when this returns."""
    import torch

    torch.frombuffer(view, dtype=torch.uint8).copy_(region.keep[offset : offset + len(view)])


def write(region: Region, offset: int, view: memoryview) -> None:
    """Host memory -> GPU bytes from `offset` on. The copy is complete when this returns."""
    import torch

    region.keep[offset : offset + len(view)].copy_(torch.frombuffer(view, dtype=torch.uint8))
    torch.cuda.current_stream(region.keep.device).synchronize()


#: bytes of each of the two pinned buffers that a staged transfer goes through
_STAGE = 16 << 20
_stages: dict[str, Any] = {}
_staging = threading.Lock()


class _Stage:
    """Two pinned buffers and a stream of their own, for one device: the copy to or from the GPU overlaps the other."""

    def __init__(self, device: str) -> None:
        import torch

        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device=device)
        self.buffers = [torch.empty(_STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.events = [torch.cuda.Event() for _ in range(2)]


def _stage(device: str) -> _Stage:
    with _staging:
        if device not in _stages:
            _stages[device] = _Stage(device)
        return cast(_Stage, _stages[device])


def run(table: Table, path: Path, op: Op, cancelled: Callable[[], bool]) -> None:
    """A transfer with GPU memory at one end or both."""
    import torch

    if isinstance(path, Local):
        region = table.get(op.handle.slot.id)
        if region is None:
            raise Dropped("it was dropped, or its memory released or moved")
        there, here = flat(region)[op.offset : op.offset + op.nbytes], flat(op.local)[: op.nbytes]
        (there if op.write else here).copy_(here if op.write else there)
        for t in (there, here):
            if t.is_cuda:
                torch.cuda.current_stream(t.device).synchronize()
        return
    if isinstance(path, Ipc):
        path.copy(op)
        return
    gpu, stage = flat(op.local), _stage(op.local.device)
    with stage.lock, torch.cuda.stream(stage.stream):
        starts = list(range(0, op.nbytes, _STAGE))
        if op.write:
            _fetch(stage, gpu, 0, op.nbytes)
        for i, start in enumerate(starts):
            n = min(_STAGE, op.nbytes - start)
            buffer, event = stage.buffers[i % 2], stage.events[i % 2]
            if op.write and i + 1 < len(starts):
                _fetch(stage, gpu, i + 1, op.nbytes)
            event.synchronize()
            host = Region(buffer.data_ptr(), n, False, buffer)
            path.run(op._replace(offset=op.offset + start, local=host, nbytes=n), cancelled)
            if not op.write:
                gpu[start : start + n].copy_(buffer[:n], non_blocking=True)
                event.record()
            if cancelled() and i + 1 < len(starts):
                raise Cancelled
        stage.stream.synchronize()


def _fetch(stage: _Stage, gpu: Any, i: int, nbytes: int) -> None:
    """Starts the copy of chunk `i` into its pinned buffer."""
    start = i * _STAGE
    n = min(_STAGE, nbytes - start)
    stage.buffers[i % 2][:n].copy_(gpu[start : start + n], non_blocking=True)
    stage.events[i % 2].record()


def flat(region: Region) -> Any:
    """A uint8 tensor over the region."""
    import torch

    if region.device != "cpu":
        return region.keep
    return torch.frombuffer((ctypes.c_char * region.nbytes).from_address(region.address), dtype=torch.uint8)


class Ipc(Path):
    """GPU memory of another process of this host, mapped by CUDA IPC; one mapping for each buffer, kept."""

    name = "cuda_ipc"

    def __init__(self, peer: Peer, ask: Callable[[Handle], Any]) -> None:
        self.peer, self._ask = peer, ask
        self._mapped: dict[int, Any] = {}

    def copy(self, op: Op) -> None:
        import torch

        ident = op.handle.slot.id
        try:
            there = self._mapped.get(ident)
            if there is None:
                there = self._mapped[ident] = _open(*self._ask(op.handle))
            there = there[op.offset : op.offset + op.nbytes]
            here = flat(op.local)[: op.nbytes]
            (there if op.write else here).copy_(here if op.write else there)
            torch.cuda.current_stream(there.device).synchronize()
            self.peer.check(op.handle.slot)
        except (Dropped, Gone):
            self._mapped.pop(ident, None)
            raise

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        self.copy(op)

    def close(self) -> None:
        self._mapped.clear()
        self.peer.close()


def share(region: Region) -> tuple[Any, int, int]:
    """What another process needs to map the region: (storage handle, byte offset, bytes)."""
    t = region.keep
    return t.untyped_storage()._share_cuda_(), t.storage_offset(), region.nbytes


def _open(shared: Any, offset: int, nbytes: int) -> Any:
    import torch

    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (nbytes,))
