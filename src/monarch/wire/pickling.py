"""Pickling: plain-pickle speed for what is importable, by value for what is not, big memory out of band.

Three tries, cheapest first. Plain containers of numbers and text go straight to the C pickler. Other objects
go through a C pickler whose hook looks only at functions, classes and tensors. When the hook meets code that
the receiver cannot import (from `__main__`, a closure, a lambda), everything is pickled again by cloudpickle.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from monarch.wire import big_bytes
from monarch.wire.big_bytes import BigBytes
from monarch.wire.frames import Bytes

_PROTOCOL = 5
#: Objects of at least this many bytes leave the pickle stream as buffers of their own.
_INLINE = 4096
_PLAIN = frozenset({int, str, float, bool, type(None), bytes})

#: Modules whose code always travels by value, by name. Tests and notebooks may add to it.
by_value_modules: set[str] = {"__main__", "__mp_main__"}

Reducer = Callable[["_Pickler", Any], Any]
#: type -> reducer, for types the hook handles itself (tensors register here when torch is in use)
reducers: dict[type, Reducer] = {}
#: called once for each type seen for the first time while torch is loaded
_lazy_reducers: list[Callable[[], None]] = []


class _NeedsCloudpickle(Exception):
    pass


class Payload:
    """A pickled object: the stream in `chunks`, followed by out-of-band `buffers` (raw, not copied)."""

    __slots__ = ("buffers", "chunks", "nbytes")

    passengers: Sequence[Any] = ()  #: objects whose reducers asked to be remembered (ports)

    def __init__(self, chunks: Sequence[Bytes], buffers: Sequence[memoryview] = ()) -> None:
        self.chunks = chunks
        self.buffers = buffers
        self.nbytes = sum(map(len, chunks)) + sum(b.nbytes for b in buffers)

    def stream(self) -> Bytes:
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)


class _WithPassengers(Payload):
    __slots__ = ("passengers",)

    def __init__(self, chunks: Sequence[Bytes], buffers: Sequence[memoryview], passengers: Sequence[Any]) -> None:
        super().__init__(chunks, buffers)
        self.passengers = passengers


class _Chunks:
    """A write-only file that keeps what it is given; large bytes objects are kept without a copy."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []
        self.write = self.parts.append

    def tidy(self) -> list[Bytes]:
        """Joins small neighbours, so that a message is a few parts."""
        if len(self.parts) == 1:
            return self.parts
        out: list[Bytes] = []
        small: list[Bytes] = []
        for p in self.parts:
            if len(p) < 1 << 16:
                small.append(p)
                continue
            if small:
                out.append(b"".join(small))
                small = []
            out.append(p)
        if small:
            out.append(b"".join(small))
        return out


def _travels_by_value(obj: Any) -> bool:
    """True when the receiver could not import `obj` (a function or class) by its name."""
    module = getattr(obj, "__module__", None)
    if module in by_value_modules:
        return True
    name = getattr(obj, "__qualname__", None)
    if module is None or name is None or "<locals>" in name or "<lambda>" in name:
        return module is not None
    found: Any = sys.modules.get(module)
    if found is None:
        return False  # the C pickler imports it or says why it cannot
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return True
    return found is not obj


class _Pickler(pickle.Pickler):
    """The C pickler with a hook for code and for registered types."""

    def __init__(self, file: Any, buffers: list[memoryview] | None) -> None:
        super().__init__(file, _PROTOCOL, buffer_callback=None if buffers is None else _keeper(buffers))
        self.spans: dict[Any, Any] = {}  # for reducers that keep sharing inside one message
        self.passengers: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType or issubclass(kind, type):
            if _travels_by_value(obj):
                raise _NeedsCloudpickle
            return NotImplemented
        if kind is types.ModuleType:
            raise _NeedsCloudpickle
        reducer = find_reducer(kind)
        return NotImplemented if reducer is None else reducer(self, obj)


def find_reducer(kind: type) -> Reducer | None:
    reducer = reducers.get(kind)
    if reducer is None and "torch" in sys.modules:
        from monarch.wire import tensors

        return tensors.reducer_for(kind)
    return reducer


def _keeper(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: stays in the stream
            return True
        if raw.nbytes < _INLINE:
            return True
        buffers.append(raw)
        return False

    return keep


_cloud_class: Any = None


def _cloud_pickler() -> Any:
    """cloudpickle's pickler with our hook in front; made on first need, since most programs' calls never do."""
    global _cloud_class
    if _cloud_class is None:
        import cloudpickle

        class Cloud(cloudpickle.Pickler):  # type: ignore[misc]
            def __init__(self, file: Any, buffers: list[memoryview] | None) -> None:
                super().__init__(file, _PROTOCOL, buffer_callback=None if buffers is None else _keeper(buffers))
                self.spans: dict[Any, Any] = {}
                self.passengers: list[Any] = []

            def reducer_override(self, obj: Any) -> Any:
                if type(obj) is types.CodeType:
                    # cloudpickle forgets the file name; tracebacks need it
                    rebuild, args = self.dispatch_table[types.CodeType](obj)[:2]
                    return rebuild, tuple(obj.co_filename if a == "<dynamic-code>" else a for a in args)
                reducer = find_reducer(type(obj))
                if reducer is not None:
                    return reducer(self, obj)
                return super().reducer_override(obj)

        _cloud_class = Cloud
    return _cloud_class


def _lift(obj: Any) -> Any:
    """A call's (args, kwargs), or a result, with large bytes objects wrapped so that they travel as buffers."""
    kind = type(obj)
    if kind is bytes:
        return BigBytes(obj) if len(obj) >= big_bytes.WORTH_IT else obj
    if kind is tuple:
        lifted = tuple(map(_lift, obj))
        return lifted if any(map(operator.is_not, lifted, obj)) else obj
    if kind is dict and obj:
        changed = {k: _lift(v) for k, v in obj.items()}
        return changed if any(map(operator.is_not, changed.values(), obj.values())) else obj
    return obj


def dumps(obj: Any) -> Payload:
    """Pickles `obj`; raises what pickling raised, `TypeError` or `PicklingError` for what cannot be sent."""
    kind = type(obj)
    if (kind is tuple and _is_plain(obj)) or (kind in _PLAIN and (kind is not bytes or len(obj) <= 1 << 15)):
        return Payload((pickle.dumps(obj, _PROTOCOL),))
    obj = _lift(obj)
    buffers: list[memoryview] = []
    out = _Chunks()
    pickler = _Pickler(out, buffers)
    try:
        pickler.dump(obj)
    except _NeedsCloudpickle:
        buffers = []
        out = _Chunks()
        pickler = _cloud_pickler()(out, buffers)
        pickler.dump(obj)
    if pickler.passengers:
        return _WithPassengers(out.tidy(), buffers, pickler.passengers)
    return Payload(out.tidy(), buffers)


def _is_plain(obj: tuple[Any, ...]) -> bool:
    """A call's (args, kwargs) of small scalars only."""
    for x in obj:
        kind = type(x)
        if kind is tuple:
            if not _is_plain(x):
                return False
        elif kind is dict:
            if x and not _is_plain(tuple(x.values())):
                return False
        elif kind not in _PLAIN or (kind is bytes and len(x) > 1 << 15):
            return False
    return True


def dump_bytes(obj: Any) -> bytes:
    """`dumps` as one bytes object, with nothing out of band; for small control messages."""
    out = io.BytesIO()
    try:
        _Pickler(out, None).dump(obj)
    except _NeedsCloudpickle:
        out = io.BytesIO()
        _cloud_pickler()(out, None).dump(obj)
    return out.getvalue()


def loads(stream: Bytes, buffers: Sequence[Bytes] = ()) -> Any:
    """Unpickles. Runs code named in the stream: only for bytes from an authenticated peer."""
    return pickle.loads(stream, buffers=buffers) if buffers else pickle.loads(stream)


def _plain_state(kind: type) -> bool:
    """True when instances are pickled by their `__dict__`."""
    return getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)


def explain_failure(obj: Any, path: str, depth: int = 6) -> str:
    """Names the innermost part of `obj` that refuses pickling, as an attribute path such as `args[0].lock`."""
    if depth == 0:
        return path
    children: list[tuple[str, Any]] = []
    if isinstance(obj, dict):
        children = [(f"{path}[{k!r}]", v) for k, v in obj.items()]
    elif isinstance(obj, (list, tuple, set, frozenset)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(obj)]
    elif hasattr(obj, "__dict__") and not isinstance(obj, type) and _plain_state(type(obj)):
        children = [(f"{path}.{k}", v) for k, v in vars(obj).items()]
    for name, child in children:
        try:
            dumps(child)
        except Exception:
            return explain_failure(child, name, depth - 1)
    return path
