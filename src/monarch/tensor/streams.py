"""Streams of the client: names for concurrent queues of every worker, and which one is active on this thread."""

from __future__ import annotations

import threading
from typing import Any


class Stream:
    """Operations on one stream of a worker run in order; different streams run concurrently.

    `name` is for people: two streams of one name are two streams.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Stream(name): name must be a string, not {type(name).__name__}")
        self.name = name

    def activate(self) -> Any:
        """Makes it the active stream at once; as a context manager, until the block ends."""
        return _Activation(self)

    def borrow(self, t: Any, mutable: bool = False) -> tuple[Any, Any]:
        """`t` for use on this stream: (tensor on this stream, `Borrow` to drop when done).

        Immutable: both streams may read, none may write, any number at once. Mutable: only this stream may use it.
        Raises TypeError for tensors that are dropped or not distributed, RuntimeError for borrows that conflict.
        """
        from monarch.tensor import borrows

        found: tuple[Any, Any] = borrows.borrow(self, t, mutable)
        return found

    def __repr__(self) -> str:
        return f"<Stream({self.name!r}) at {id(self):#x}>"

    def __str__(self) -> str:
        return f"stream {self.name!r}"


main = Stream("main")


class _Active(threading.local):
    stream: Stream = main


active = _Active()


def get_active_stream() -> Stream:
    """The stream that new operations of this thread go to; `main` unless another was activated."""
    return active.stream


class _Activation:
    def __init__(self, stream: Stream) -> None:
        self._before = active.stream
        active.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        active.stream = self._before
