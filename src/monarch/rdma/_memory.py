"""What may be transferred: one-dimensional contiguous memory, as an address and a length.

Torch is looked at only when the program imported it. A `Region` keeps its memory alive for as long as somebody holds
the region; a `Guard` is a word of this process's memory that tells whether the region is still where it was.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

_LAYOUT = "RDMABuffer only supports 1d contiguous torch.Tensor or 1d c-contiguous memoryview. Got: {}"


class Guard(NamedTuple):
    """The region is intact while `word at address & mask == value`. Address 0: nothing to look at."""

    address: int
    mask: int
    value: int


NO_GUARD = Guard(0, 0, 0)


class Region(NamedTuple):
    """Bytes of this process: `nbytes` at `address`, alive while `keep` is. `device` is "cpu" or as torch names it."""

    address: int
    nbytes: int
    readonly: bool
    keep: Any
    device: str = "cpu"
    guard: Guard = NO_GUARD


def region(data: Any, *, pin: bool = False) -> Region:
    """The bytes of a tensor, memoryview, bytearray, mmap or numpy array.

    `pin`: for memory that others will reach later; the region then holds what the caller may still release (its
    memoryview, its storage), with a guard that tells. Raises ValueError for anything else, naming what is wrong.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, getattr(torch, "Tensor", ())):
        return _of_tensor(data, pin)
    if isinstance(data, memoryview):
        return _of_view(data, pin)
    if data is None or isinstance(data, (str, int, float)):
        raise ValueError(_LAYOUT.format(f"{type(data).__name__}"))
    try:
        view = memoryview(data)
    except TypeError:
        raise ValueError(_LAYOUT.format(f"{type(data).__name__}")) from None
    found = _of_view(view, False)
    return found._replace(keep=view)


def _of_view(view: memoryview, pin: bool) -> Region:
    if view.ndim != 1 or not view.c_contiguous:
        raise ValueError(
            _LAYOUT.format(f"memoryview of shape {view.shape}, strides {view.strides}: pass a contiguous copy")
        )
    n, readonly = view.nbytes, view.readonly
    keep = view if pin else memoryview(view)  # an export of our own: released only by us
    if n == 0:
        return Region(0, 0, readonly, keep)
    if readonly:
        address = _address_of_readonly(view)
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view if view.format == "B" else view.cast("B")))
    guard = NO_GUARD
    if pin:
        if _FLAGS_AT:
            guard = Guard(id(view) + _FLAGS_AT, _RELEASED, 0)
        else:
            keep = memoryview(view)
    return Region(address, n, readonly, keep, "cpu", guard)


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def _address_of_readonly(view: memoryview) -> int:
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


#: bit of a memoryview object's flags word that says that it was released
_RELEASED = 1


def _find_flags() -> int:
    """Where a memoryview object keeps its flags, in bytes; 0 when this interpreter keeps them elsewhere."""
    at = 40
    probe = memoryview(bytearray(8))
    if sys.implementation.name != "cpython" or type(probe).__basicsize__ < at + 8:
        return 0
    where = id(probe) + at
    before = ctypes.c_int.from_address(where).value
    probe.release()
    after = ctypes.c_int.from_address(where).value
    return at if after == before | _RELEASED and not before & _RELEASED else 0


_FLAGS_AT = _find_flags()
_data_at: int | None = None  #: where a torch storage keeps its data pointer; 0: not found; None: not looked yet


def _find_data_pointer(torch: Any) -> int:
    storage = torch.empty(64, dtype=torch.uint8).untyped_storage()
    for at in (16, 24, 32, 8):
        if ctypes.c_uint64.from_address(storage._cdata + at).value == storage.data_ptr():
            storage.resize_(1 << 20)
            if ctypes.c_uint64.from_address(storage._cdata + at).value == storage.data_ptr():
                return at
    return 0


def _of_tensor(t: Any, pin: bool) -> Region:
    import torch

    if t.layout is not torch.strided or t.dim() != 1 or not t.is_contiguous():
        what = f"a tensor of shape {tuple(t.shape)}"
        if t.layout is not torch.strided:
            what += f", layout {t.layout}"
        elif t.dim() == 1:
            what += f", stride {t.stride()}: pass t.contiguous(), which is a copy"
        else:
            what += ": pass t.view(-1) of a contiguous tensor"
        raise ValueError(_LAYOUT.format(what))
    device = t.device.type
    if device == "meta":
        raise ValueError("a tensor on the meta device has no memory to transfer: materialise it first (to_empty)")
    if t.is_conj() or t.is_neg():
        raise ValueError(
            "the tensor is a lazy conjugate or negation, its memory holds other values: "
            "pass t.resolve_conj().resolve_neg()"
        )
    nbytes = t.numel() * t.element_size()
    if nbytes == 0:
        return Region(0, 0, False, t)
    try:
        storage = t.untyped_storage()
        address = t.data_ptr()
    except (RuntimeError, NotImplementedError) as e:
        raise ValueError(f"a {type(t).__name__} has no memory of its own to transfer: {e}") from None
    if address == 0:
        raise ValueError(f"a {type(t).__name__} without memory cannot be transferred")
    name = "cpu" if device == "cpu" else str(t.device)
    guard = NO_GUARD
    if pin and device == "cpu":
        global _data_at
        if _data_at is None:
            _data_at = _find_data_pointer(torch)
        if _data_at:
            guard = Guard(storage._cdata + _data_at, 0xFFFF_FFFF_FFFF_FFFF, storage.data_ptr())
    keep = storage if device == "cpu" else t.detach().view(torch.uint8)
    return Region(address, nbytes, False, keep, name, guard)
