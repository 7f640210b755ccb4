"""Arguments that hold distributed tensors, as bytes: each tensor becomes a hole that the receiver fills.

While `pack` pickles, a tensor's `__reduce_ex__` leaves a hole with its number; while `unpack` unpickles, holes become
what the receiver holds. Outside of both, a distributed tensor refuses to be pickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch.wire import pickling


class TensorReference(TypeError):
    """A distributed tensor met a pickler that has no use for its reference."""

    carries_tensors = True


class _Packing(threading.local):
    tensors: dict[int, Any] | None = None  #: id -> (number, handle)


class _Filling(threading.local):
    fill: Callable[[str, Any], Any] | None = None


_packing = _Packing()
_filling = _Filling()


def reduce_tensor(t: Any) -> Any:
    found = _packing.tensors
    if found is None:
        raise TensorReference(
            "Tensor engine references are not allowed in the current pickling context: fetch the tensor first "
            "(fetch_shard, inspect), or pass it to an actor of the same processes"
        )
    number, _ = found.setdefault(id(t), (len(found), t))
    return _hole, ("tensor", number)


def reduce_named(kind: str, what: str, data: Any) -> Any:
    """For other client objects that have a counterpart on workers (meshes, process groups, opaque references)."""
    if _packing.tensors is None:
        raise TensorReference(
            f"Tensor engine references are not allowed in the current pickling context: {what} can only be an "
            "argument of a remote function, or of an actor of the same processes"
        )
    return _hole, (kind, data)


def _hole(kind: str, data: Any) -> Any:
    if _filling.fill is None:
        raise TensorReference("Tensor engine references are not allowed in the current pickling context")
    return _filling.fill(kind, data)


class packing:
    """Context in which tensors may be pickled; `.tensors` are those that were."""

    def __enter__(self) -> packing:
        self._before = _packing.tensors
        self._found: dict[int, Any] = {}
        _packing.tensors = self._found
        return self

    def __exit__(self, *exc: Any) -> None:
        _packing.tensors = self._before

    @property
    def tensors(self) -> list[Any]:
        return [t for _, t in sorted(self._found.values(), key=lambda pair: pair[0])]


def pack(obj: Any) -> tuple[bytes, list[Any]]:
    """(bytes, the distributed tensors in the order of their holes)."""
    from monarch.tensor.meta import locally

    with packing() as found, locally():
        data = pickling.dump_bytes(obj)
    return data, found.tensors


def unpack(data: Any, fill: Callable[[str, Any], Any], buffers: Sequence[Any] = ()) -> Any:
    """The object; `fill(kind, data)` gives what takes the place of a hole."""
    before, _filling.fill = _filling.fill, fill
    try:
        return pickling.loads(data, buffers)
    finally:
        _filling.fill = before
