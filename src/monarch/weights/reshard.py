"""Moving sharded weights to another sharding: each receiver pulls the bytes that it needs, from whoever has them.

    senders = compute_shard_metadata((4096, 4096), 4, shard_dim=0)      # row shards on 4 trainers
    receivers = compute_shard_metadata((4096, 4096), 2, shard_dim=1)    # column shards on 2 generators
    plan = ReshardPlan.build({"w": senders}, {"w": receivers}, dtype=torch.bfloat16)
    plan.execute(handles, {"w": my_shard}, rank=my_rank)                # in each generator

Offsets of chunks are in the coordinates of the shards, not of the whole tensor. A rank that holds nothing of a tensor
has a shard with a zero in its shape. Sizes follow `torch.chunk`, as DTensor has it: all shards but the last ones are
equally large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monarch.rdma import RDMAAction, RDMABuffer
from monarch.weights._boxes import Box
from monarch.weights._pulls import queue

__all__ = [
    "ReshardPlan",
    "ShardMetadata",
    "TransferChunk",
    "compute_overlap",
    "compute_shard_metadata",
    "compute_transfer_plan",
    "from_placements",
]

#: what a receiver pays for bytes from a sender; lower is taken first
Cost = Callable[[int, int], float]


@dataclass(frozen=True)
class ShardMetadata:
    """What `rank` holds of a tensor: the block of `local_shape` elements that begins at `offset`.

    Raises ValueError when the block is not inside `global_shape`.
    """

    rank: int
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("global_shape", "offset", "local_shape"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not len(self.global_shape) == len(self.offset) == len(self.local_shape):
            raise ValueError(f"global_shape, offset and local_shape must have as many dimensions each: {self}")
        for size, start, n in zip(self.global_shape, self.offset, self.local_shape, strict=True):
            if not (start >= 0 and n >= 0 and start + n <= size):
                raise ValueError(f"the shard is not inside the tensor: {self}")

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def box(self) -> Box:
        return Box(self.offset, self.local_shape)


@dataclass(frozen=True)
class TransferChunk:
    """A block of `shape` elements that goes from one shard to another; offsets are inside the shards."""

    sender_rank: int
    receiver_rank: int
    sender_offset: tuple[int, ...]
    receiver_offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def compute_shard_metadata(global_shape: Sequence[int], num_ranks: int, shard_dim: int) -> list[ShardMetadata]:
    """The shards of `num_ranks` ranks that divide dimension `shard_dim` (may be negative) by the `torch.chunk` rule.

    Ranks for which nothing is left have empty shards. Raises ValueError for bad arguments.
    """
    shape = tuple(global_shape)
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if not -len(shape) <= shard_dim < len(shape):
        raise ValueError(f"shard_dim {shard_dim} is not a dimension of a tensor of shape {shape}")
    return from_placements(shape, (num_ranks,), (shard_dim,))


def from_placements(
    global_shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]
) -> list[ShardMetadata]:
    """The shards on a mesh of ranks (row-major), as DTensor places them.

    placements  for each dimension of the mesh: `torch.distributed.tensor.Shard(d)` or the number d, and `Replicate()`
                or None. Dimensions of the mesh that divide the same dimension divide it one after the other

    Raises ValueError for bad arguments, TypeError for other placements.
    """
    shape, mesh = tuple(global_shape), tuple(mesh_shape)
    if len(placements) != len(mesh):
        raise ValueError(f"{len(placements)} placements for a mesh of {len(mesh)} dimensions")
    if any(n < 0 for n in shape) or any(n < 1 for n in mesh):
        raise ValueError(f"sizes must not be negative, and those of the mesh at least 1: {shape}, {mesh}")
    dims = [_sharded_dim(p, shape) for p in placements]
    out = []
    for rank in range(math.prod(mesh)):
        offset, local = [0] * len(shape), list(shape)
        at, left = [], rank
        for size in reversed(mesh):
            left, here = divmod(left, size)
            at.append(here)
        for dim, size, here in zip(dims, mesh, reversed(at), strict=True):
            if dim is not None:
                step = -(-local[dim] // size)
                start = min(here * step, local[dim])
                offset[dim] += start
                local[dim] = min(step, local[dim] - start)
        out.append(ShardMetadata(rank, shape, tuple(offset), tuple(local)))
    return out


def _sharded_dim(placement: Any, shape: tuple[int, ...]) -> int | None:
    if placement is None or type(placement).__name__ == "Replicate":
        return None
    dim = placement if isinstance(placement, int) else getattr(placement, "dim", None)
    if not isinstance(dim, int) or type(placement).__name__ not in ("Shard", "int"):
        raise TypeError(f"placements must be Shard(dim), Replicate(), a dimension or None; got {placement!r}")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dimension {dim} does not exist in a tensor of shape {shape}")
    return dim % len(shape)


def compute_overlap(sender: ShardMetadata, receiver: ShardMetadata) -> TransferChunk | None:
    """What both hold; None when that is nothing. Raises ValueError when they are shards of different tensors."""
    _same_tensor([sender, receiver])
    both = sender.box.intersect(receiver.box)
    return None if both is None else _chunk(sender, receiver, both)


def compute_transfer_plan(
    senders: Sequence[ShardMetadata], receivers: Sequence[ShardMetadata], *, cost: Cost | None = None
) -> list[TransferChunk]:
    """Chunks that fill each receiver's shard, every element once.

    Where several senders hold the same elements, the receiver takes those of the lowest `cost(sender_rank,
    receiver_rank)`, and among equals those of the one that sends least so far. Raises ValueError when no sender holds
    an element that a receiver needs.
    """
    return _plan(senders, receivers, cost, {})


def _plan(
    senders: Sequence[ShardMetadata], receivers: Sequence[ShardMetadata], cost: Cost | None, load: dict[int, int]
) -> list[TransferChunk]:
    _same_tensor([*senders, *receivers])
    out: list[TransferChunk] = []
    for receiver in receivers:
        missing = [receiver.box] if receiver.numel else []

        def key(s: ShardMetadata, to: int = receiver.rank) -> tuple[float, int]:
            return (cost(s.rank, to) if cost else 0.0, load.get(s.rank, 0))

        for sender in sorted((s for s in senders if s.box.intersect(receiver.box)), key=key):
            still: list[Box] = []
            for box in missing:
                both = box.intersect(sender.box)
                if both is None:
                    still.append(box)
                    continue
                out.append(_chunk(sender, receiver, both))
                load[sender.rank] = load.get(sender.rank, 0) + both.numel
                still.extend(box.subtract(both))
            missing = still
        if missing:
            raise ValueError(
                f"rank {receiver.rank} needs the {missing[0].shape} elements at {missing[0].offset}: no sender has them"
            )
    return out


def _chunk(sender: ShardMetadata, receiver: ShardMetadata, both: Box) -> TransferChunk:
    return TransferChunk(
        sender.rank, receiver.rank, both.relative_to(sender.offset), both.relative_to(receiver.offset), both.shape
    )


def _same_tensor(shards: Iterable[ShardMetadata]) -> None:
    shapes = {s.global_shape for s in shards}
    if len(shapes) > 1:
        raise ValueError(f"these are shards of tensors of different shapes: {sorted(shapes)}")


#: the shards of each tensor by its name
Layout = Mapping[str, Sequence[ShardMetadata]]


class ReshardPlan:
    """Who gets what from whom, for a set of tensors. Make it with `build`, once; execute it for each version.

    chunks  by name of the tensor, as `compute_transfer_plan` gives them
    """

    def __init__(self, src: Layout, dst: Layout, dtypes: Mapping[str, torch.dtype], cost: Cost | None = None) -> None:
        self.src = {name: {s.rank: s for s in shards} for name, shards in src.items()}
        self.dst = {name: {s.rank: s for s in shards} for name, shards in dst.items()}
        self.dtypes = dict(dtypes)
        load: dict[int, int] = {}
        self.chunks = {name: _plan(src[name], dst[name], cost, load) for name in dst}

    @classmethod
    def build(
        cls,
        src_layout: Layout | Sequence[ShardMetadata],
        dst_layout: Layout | Sequence[ShardMetadata],
        *,
        dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
        cost: Cost | None = None,
    ) -> ReshardPlan:
        """The plan from one sharding to another.

        src_layout, dst_layout  the shards of each tensor by its name; of a single tensor, just its shards
        dtype                   of the elements; the same on both sides
        cost                    see `compute_transfer_plan`

        Raises ValueError when a tensor of `dst_layout` is not in `src_layout`, has another shape there, or is not all
        there.
        """
        src = src_layout if isinstance(src_layout, Mapping) else {"": src_layout}
        dst = dst_layout if isinstance(dst_layout, Mapping) else {"": dst_layout}
        for name in dst:
            if name not in src:
                raise ValueError(f"{name!r} is in dst_layout, and not in src_layout")
        dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(dst, dtype)
        return cls(src, dst, {name: dtypes[name] for name in dst}, cost)

    @property
    def bytes(self) -> int:
        """Bytes that move, in all."""
        return sum(self.per_link().values())

    @property
    def gather_bytes(self) -> int:
        """Bytes that would move if every receiver fetched whole tensors and cut its shards out of them."""
        return sum(
            math.prod(s.global_shape) * self.dtypes[name].itemsize
            for name, shards in self.dst.items()
            for s in shards.values()
            if s.numel
        )

    def per_link(self) -> dict[tuple[int, int], int]:
        """Bytes by (sender rank, receiver rank)."""
        out: dict[tuple[int, int], int] = {}
        for name, chunks in self.chunks.items():
            for c in chunks:
                link = c.sender_rank, c.receiver_rank
                out[link] = out.get(link, 0) + c.numel * self.dtypes[name].itemsize
        return out

    def senders(self, rank: int) -> list[int]:
        """The sender ranks that receiver `rank` needs handles of."""
        return sorted({c.sender_rank for chunks in self.chunks.values() for c in chunks if c.receiver_rank == rank})

    def execute(
        self,
        handles: Mapping[int, RDMABuffer | Mapping[str, RDMABuffer]],
        target: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        rank: int | None = None,
        timeout: float = 60,
    ) -> int:
        """Fills this receiver's shards; returns the bytes fetched.

        handles  by sender rank: the buffers of its shards by name (a contiguous, flattened shard each), or one buffer
        target   this receiver's shards by name, or one tensor; any strides, CPU or GPU
        rank     of this receiver; default: that of the calling actor in its mesh
        timeout  seconds for all of it

        Raises ValueError when handles or targets are missing or have other sizes, and as `RDMAAction.submit`. It does
        not look at versions: take handles of something that is not written meanwhile, such as a published slot.
        """
        if rank is None:
            from monarch.actor import current_rank

            rank = current_rank().rank
        action, finish, total = RDMAAction(), [], 0
        for name, chunks in self.chunks.items():
            mine = [c for c in chunks if c.receiver_rank == rank]
            if not mine:
                continue
            t = _pick(target, name, "target")
            want = self.dst[name][rank].local_shape
            if tuple(t.shape) != want or t.dtype != self.dtypes[name]:
                raise ValueError(
                    f"the target of {name!r} is {t.dtype} of shape {tuple(t.shape)}; rank {rank} has a shard of "
                    f"{self.dtypes[name]}, {want}"
                )
            for c in mine:
                if c.sender_rank not in handles:
                    raise ValueError(f"handles has no sender {c.sender_rank}, of which rank {rank} needs {name!r}")
                buffer = _pick(handles[c.sender_rank], name, f"handles[{c.sender_rank}]")
                shape = self.src[name][c.sender_rank].local_shape
                size = math.prod(shape) * t.element_size()
                if buffer.size() < size:
                    raise ValueError(
                        f"the buffer of {name!r} at sender {c.sender_rank} has {buffer.size()} bytes of {size}"
                    )
                finish += queue(action, buffer, shape, c.sender_offset, c.shape, t.detach(), c.receiver_offset)
                total += c.numel * t.element_size()
        action.submit(timeout=timeout).get()
        for done in finish:
            done()
        return total


def _pick(found: Any, name: str, what: str) -> Any:
    if not isinstance(found, Mapping):
        return found
    if name not in found:
        raise ValueError(f"{what} has no {name!r}")
    return found[name]
