"""Metadata of distributed tensors: interned descriptions, and runs of operators on storage-less (fake) tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


class Meta:
    """What the client knows of a tensor's value. Interned: equal descriptions are one object, so `is` compares them.

    `shape` and `stride` in elements, `offset` in elements from the start of the storage, `nbytes` of the storage.
    """

    __slots__ = ("device", "dtype", "nbytes", "offset", "shape", "single", "stride")

    def __init__(self, shape: Any, stride: Any, offset: int, dtype: Any, device: Any, nbytes: int) -> None:
        self.shape, self.stride, self.offset = shape, stride, offset
        self.dtype, self.device, self.nbytes = dtype, device, nbytes
        self.single = len(shape) == 0

    def as_tuple(self) -> tuple[Any, ...]:
        return (tuple(self.shape), tuple(self.stride), self.offset, self.dtype, self.device, self.nbytes)

    def __reduce__(self) -> Any:
        return intern, self.as_tuple()

    def __repr__(self) -> str:
        return f"Meta{self.as_tuple()}"


_all: dict[tuple[Any, ...], Meta] = {}


def intern(shape: Any, stride: Any, offset: int, dtype: Any, device: Any, nbytes: int) -> Meta:
    key = (tuple(shape), tuple(stride), offset, dtype, device, nbytes)
    found = _all.get(key)
    if found is None:
        found = _all.setdefault(key, Meta(torch.Size(shape), tuple(stride), offset, dtype, device, nbytes))
    return found


def meta_of(t: Any) -> Meta:
    """The metadata of a plain or fake tensor. TypeError for layouts other than strided."""
    if t.layout is not torch.strided:
        raise TypeError(f"distributed tensors are strided; a result of layout {t.layout} is not supported")
    return intern(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes())


def fresh(shape: Sequence[int], dtype: Any, device: Any) -> Meta:
    """The metadata of a new contiguous tensor."""
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    numel = 1
    for n in shape:
        numel *= n
    return intern(tuple(shape), tuple(reversed(stride)), 0, dtype, device, numel * dtype.itemsize)


_torch_log = logging.getLogger("torch._subclasses.fake_tensor")
fake_mode: Any = FakeTensorMode(allow_non_fake_inputs=False)


class Fakes:
    """Fake tensors for a set of handles; handles that alias give fakes that alias. Use inside `faking()`."""

    def __init__(self) -> None:
        self._storages: dict[Any, Any] = {}
        self._fakes: dict[int, Any] = {}
        self._keep: list[Any] = []

    def of(self, t: Any) -> Any:
        """The fake of a distributed tensor: the same object for the same handle."""
        found = self._fakes.get(id(t))
        if found is None:
            self._keep.append(t)
            found = self._fakes[id(t)] = self.make(t._meta, t._group)
        return found

    def make(self, meta: Meta, group: Any) -> Any:
        base = self._storages.get(group)
        if base is None:
            base = torch.empty(meta.nbytes, dtype=torch.uint8, device=meta.device)
            self._storages[group] = base
        out = torch.empty(0, dtype=meta.dtype, device=meta.device)
        out.set_(base.untyped_storage(), meta.offset, meta.shape, meta.stride)
        return out

    def group_of(self, fake: Any) -> Any:
        """The group whose storage `fake` lies in; None when it is a new one."""
        key = storage_key(fake)
        for group, base in self._storages.items():
            if storage_key(base) == key:
                return group
        return None


def storage_key(fake: Any) -> int:
    return int(fake.untyped_storage()._cdata)


class faking:
    """Context in which tensors are fake: no active mesh, no other mode, no autograd."""

    def __enter__(self) -> None:
        self._modes = _disable_current_modes()
        self._modes.__enter__()
        self._grad = torch.no_grad()
        self._grad.__enter__()
        self._quiet = _torch_log.disabled
        _torch_log.disabled = True  # a wrong shape is the caller's to report, by the exception
        fake_mode.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            fake_mode.__exit__(*exc)
        finally:
            _torch_log.disabled = self._quiet
            self._grad.__exit__(*exc)
            self._modes.__exit__(*exc)


class locally:
    """Context in which torch computes in this process, whatever mesh is active."""

    def __enter__(self) -> None:
        self._modes = _disable_current_modes()
        self._modes.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._modes.__exit__(*exc)
