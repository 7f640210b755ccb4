"""From the answers of a `call` to a ValueMesh."""

from __future__ import annotations

from typing import Any

from monarch.mesh import Shape, ValueMesh, merge_runs
from monarch.runtime.node import Port as Sink
from monarch.wire import pickling
from monarch.wire.frames import Frame

__all__ = ["Sink", "collect"]


def collect(shape: Shape, frames: list[Frame]) -> ValueMesh[Any]:
    """The values of all ranks, in rank order; equal neighbours are kept once, values are decoded when looked at."""
    runs = []
    for rank, frame in enumerate(frames):
        parts = frame.parts
        runs.append((rank, rank + 1, parts[1] if len(parts) == 2 and type(parts[1]) is bytes else frame))
    return ValueMesh._from_encoded(shape, merge_runs(runs), _decode)


def _decode(payload: Any) -> Any:
    if isinstance(payload, bytes):
        return pickling.loads(payload)
    return pickling.loads(payload.parts[1], payload.parts[2:])
