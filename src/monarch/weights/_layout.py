"""Where each parameter lies in a packed buffer: agreed between publisher and subscribers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from monarch.weights._errors import LayoutMismatch

#: what weights come from and go to
Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]


class Entry(NamedTuple):
    """One tensor: `nbytes` at `offset`, contiguous, `dtype` as torch prints it without the "torch."."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


class WeightLayout:
    """The entries of a packed buffer in a stable order, and its size in bytes.

    Tensors that share memory (tied parameters) have one place under several names. Layouts compare and hash by
    content, travel in messages, and fit onto any buffer of `nbytes` bytes by `views`.
    """

    __slots__ = ("_hash", "entries", "nbytes")

    def __init__(self, entries: Iterable[Entry], nbytes: int) -> None:
        self.entries = tuple(entries)
        self.nbytes = nbytes
        self._hash = 0

    @classmethod
    def from_module(
        cls, m: Weights, *, buffers: bool = True, align: int = 64, dtype: torch.dtype | None = None
    ) -> WeightLayout:
        """The layout of a module, or of a dict of tensors.

        buffers  also the module's buffers (running statistics, tables)
        align    every tensor begins at a multiple of so many bytes; a power of two
        dtype    what floating point tensors are published as; None: as they are

        Raises ValueError for a bad `align` and for a tensor without dense memory.
        """
        if align < 1 or align & (align - 1):
            raise ValueError(f"align must be a power of two, got {align}")
        entries: list[Entry] = []
        places: dict[tuple[Any, ...], tuple[int, int]] = {}
        at = 0
        for name, t in named_tensors(m, buffers=buffers).items():
            if t.layout is not torch.strided:
                raise ValueError(f"{name!r} has layout {t.layout}: only dense tensors can be published")
            kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
            n = t.numel() * torch.empty(0, dtype=kind).element_size()
            key = (str(t.device), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) if t.numel() else (name,)
            place = places.get(key)
            if place is None:
                at = -(-at // align) * align
                place = places[key] = (at, n)
                at += n
            entries.append(Entry(name, place[0], tuple(t.shape), str(kind).removeprefix("torch."), n))
        return cls(entries, max(at, 1))

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors over `buffer`, flat uint8 of at least `nbytes`, by name."""
        return {e.name: buffer[e.offset : e.offset + e.nbytes].view(e.torch_dtype).view(e.shape) for e in self.entries}

    def unique(self) -> list[Entry]:
        """One entry for each place in the buffer."""
        seen: dict[int, Entry] = {}
        for e in self.entries:
            if e.nbytes:
                seen.setdefault(e.offset, e)
        return list(seen.values())

    def check(self, other: WeightLayout, *, dtypes: bool = True) -> None:
        """Raises LayoutMismatch naming the first entry in which `other`, the target's, differs."""
        theirs = {e.name: e for e in other.entries}
        for e in self.entries:
            o = theirs.pop(e.name, None)
            if o is None:
                raise LayoutMismatch(f"{e.name!r} is published, and the target has no such tensor")
            if o.shape != e.shape:
                raise LayoutMismatch(f"{e.name!r} has shape {e.shape} where it is published, {o.shape} in the target")
            if dtypes and o.dtype != e.dtype:
                raise LayoutMismatch(f"{e.name!r} is published as {e.dtype}, the target has {o.dtype}")
        if theirs:
            raise LayoutMismatch(f"the target has {next(iter(theirs))!r}, which is not published")

    @property
    def fingerprint(self) -> int:
        """63 bits of the content, the same in every process."""
        if not self._hash:
            digest = hashlib.blake2b(repr((self.entries, self.nbytes)).encode(), digest_size=8).digest()
            self._hash = int.from_bytes(digest, "little") >> 1 | 1
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightLayout):
            return NotImplemented
        return self.entries == other.entries and self.nbytes == other.nbytes

    def __hash__(self) -> int:
        return self.fingerprint

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<WeightLayout of {len(self.entries)} tensors, {self.nbytes} bytes>"

    def __reduce__(self) -> Any:
        return WeightLayout, (self.entries, self.nbytes)


def named_tensors(source: Weights, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of a module (tied ones under each of their names) or of a dict. TypeError for anything else."""
    if isinstance(source, torch.nn.Module):
        found = dict(source.named_parameters(remove_duplicate=False))
        if buffers:
            found |= dict(source.named_buffers(remove_duplicate=False))
        return {k: v.data for k, v in found.items()}
    if isinstance(source, Mapping):
        for name, t in source.items():
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"weights[{name!r}] is {type(t).__name__}, expected a torch.Tensor")
        return {str(k): v.data for k, v in source.items()}
    raise TypeError(f"expected a torch.nn.Module or a dict of tensors, got {type(source).__name__}")
