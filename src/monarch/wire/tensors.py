"""Pickling of torch tensors: the viewed bytes, out of band; sharing inside one message is kept.

Imported only when torch already is. Every tensor arrives on CPU, except `meta` tensors, which stay meta.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch

from monarch.wire.pickling import Reducer

#: within it, tensors of messages are ordinary ones, whatever torch mode the calling thread is in
_plainly = torch._C._DisableTorchDispatch


class _Span:
    """The bytes [start, stop) of one storage, pickled once a message however many tensors view them."""

    def __init__(self, storage: Any, start: int, stop: int) -> None:
        self.storage, self.start, self.stop = storage, start, stop

    def __reduce_ex__(self, protocol: Any) -> Any:
        size = self.stop - self.start
        if size == 0:
            return _empty, ()
        array = (ctypes.c_ubyte * size).from_address(self.storage.data_ptr() + self.start)
        array._keep = self.storage  # type: ignore[attr-defined]
        return _rebuild_span, (pickle.PickleBuffer(array),)


def _empty() -> Any:
    with _plainly():
        return torch.empty(0, dtype=torch.uint8)


def _rebuild_span(buffer: Any) -> Any:
    view = memoryview(buffer)
    if view.readonly:
        view = memoryview(bytearray(view))
    with _plainly():
        return torch.frombuffer(view, dtype=torch.uint8)


def _rebuild(
    span: Any, offset: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    with _plainly():
        out = torch.empty(0, dtype=dtype)
        out.set_(span.untyped_storage(), (span.storage_offset() + offset) // dtype.itemsize, size, stride)
        return out.requires_grad_(requires_grad) if requires_grad else out


def _rebuild_parameter(data: torch.Tensor, requires_grad: bool) -> Any:
    with _plainly():
        return torch.nn.Parameter(data, requires_grad)


def _reduce_tensor(pickler: Any, t: torch.Tensor) -> Any:
    with _plainly():
        return _reduce_plainly(pickler, t)


def _reduce_plainly(pickler: Any, t: torch.Tensor) -> Any:
    if t.layout is not torch.strided or t.device.type == "meta" or t.is_quantized or t.is_conj() or t.is_neg():
        return NotImplemented
    source = t.detach()
    if source.device.type != "cpu":
        source = source.cpu()
    item = source.element_size()
    storage = source.untyped_storage()
    first = source.storage_offset() * item
    extent = sum((n - 1) * s for n, s in zip(source.size(), source.stride(), strict=True)) + 1 if source.numel() else 0
    last = first + extent * item
    if extent * item > 2 * source.numel() * item:  # a sparse view: its bytes alone are less than its span
        source = source.contiguous()
        storage, first, last = source.untyped_storage(), 0, source.numel() * item
    key = storage.data_ptr()
    span = pickler.spans.get(key)
    if span is None or first < span.start or last > span.stop:
        span = pickler.spans[key] = _Span(storage, first, last)
    return _rebuild, (
        span,
        first - span.start,
        source.dtype,
        tuple(source.size()),
        tuple(source.stride()),
        t.requires_grad,
    )


def _reduce_parameter(pickler: Any, p: Any) -> Any:
    if p.device.type == "meta":
        return NotImplemented
    with _plainly():
        return _rebuild_parameter, (p.detach(), p.requires_grad)


def reducer_for(kind: type) -> Reducer | None:
    if kind is torch.Tensor:
        return _reduce_tensor
    if kind is torch.nn.Parameter:
        return _reduce_parameter
    return None
