"""Reading a block of a row-major array out of a buffer: contiguous runs are found and merged, the rest is gathered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from monarch.rdma import RDMAAction, RDMABuffer
from monarch.rdma._runs import Runs

#: bytes between runs up to which everything between them is read too: moving it costs less than another range
_GAP = 1024


def block_runs(
    shape: tuple[int, ...], offset: tuple[int, ...], block: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int]]:
    """(start, count, length, stride) in elements: the runs of a block of an array of `shape`, in the block's order.

    Dimensions that the block takes whole are merged with the one before. One item covers the two innermost dimensions
    that are left.
    """
    merged: list[list[int]] = []  # size, offset, length
    for size, start, n in zip(shape, offset, block, strict=True):
        if merged and (start, n) == (0, size):
            merged[-1] = [x * size for x in merged[-1]]
        else:
            merged.append([size, start, n])
    if not merged:
        yield 0, 1, 1, 1
        return
    strides = [math.prod(m[0] for m in merged[i + 1 :]) for i in range(len(merged))]
    base = sum(m[1] * s for m, s in zip(merged, strides, strict=True))
    length = merged[-1][2]
    if len(merged) == 1:
        yield base, 1, length, length
        return
    outer = [range(m[2]) for m in merged[:-2]]
    for at in itertools.product(*outer):
        start = base + sum(i * s for i, s in zip(at, strides, strict=False))
        yield start, merged[-2][2], length, strides[-2]


def queue(
    action: RDMAAction,
    source: RDMABuffer,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    block: tuple[int, ...],
    target: torch.Tensor,
    at: tuple[int, ...],
) -> list[Callable[[], object]]:
    """Queues the reads of a block of the array `source` into a block of `target`; what to call when they are done."""
    place = target
    for d, (start, n) in enumerate(zip(at, block, strict=True)):
        place = place.narrow(d, start, n)
    size = target.element_size()
    finish: list[Callable[[], object]] = []
    packed = place
    if not (place.is_contiguous() and place.device.type == "cpu"):
        packed = torch.empty(block, dtype=target.dtype)
        finish.append(lambda: place.copy_(packed))
    flat = packed.view(-1).view(torch.uint8) if packed.ndim else packed.view(1).view(torch.uint8)
    done = 0
    for start, count, length, stride in block_runs(shape, offset, block):
        n = count * length * size
        out = flat[done : done + n]
        done += n
        if count > 1 and (stride - length) * size > 0 and stride * size <= _GAP:
            span = torch.empty(((count - 1) * stride + length) * size, dtype=torch.uint8)
            action._gather(span, source, start * size, 1, Runs(span.numel(), span.numel()))
            rows = span.as_strided((count, length * size), (stride * size, 1))
            finish.insert(0, lambda out=out, rows=rows: out.view(rows.shape).copy_(rows))  # type: ignore[misc]
        else:
            action._gather(out, source, start * size, count, Runs(length * size, stride * size))
    return finish
