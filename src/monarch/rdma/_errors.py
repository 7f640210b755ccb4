"""The errors of one-sided transfers.

Exception
|-- RDMAError                   a transfer failed; the tree below says why
    |-- RDMATimeoutError        it did not finish in time (a TimeoutError too); both memories may be half written
    |-- RDMABufferDroppedError  the buffer was dropped, or its memory was released or moved
    |-- RDMAOwnerDiedError      the process that owns the buffer is gone
    |-- RDMAInitError           no backend could be started, or none reaches the buffer
ValueError                      what the caller passed cannot be transferred: raised at the call, nothing was started
"""

from __future__ import annotations

from typing import Any


class RDMAError(Exception):
    """A transfer failed.

    Attributes: `owner` (text naming the buffer's owner, or None), `buffer_id`, `op_index` (position in the action, 0
    for a single transfer), `backend` (the rung that was used), `failures` (op index -> error; of an action that failed
    in several places).
    """

    def __init__(
        self,
        message: str,
        *,
        owner: str | None = None,
        buffer_id: int | None = None,
        op_index: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(message)
        self.owner = owner
        self.buffer_id = buffer_id
        self.op_index = op_index
        self.backend = backend
        self.failures: dict[int, RDMAError] = {}

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.args[0], dict(self.__dict__))


def _rebuild(cls: type[RDMAError], message: str, attributes: dict[str, Any]) -> RDMAError:
    error = cls(message)
    error.__dict__.update(attributes)
    return error


class RDMATimeoutError(RDMAError, TimeoutError):
    """The transfer did not finish within its `timeout`. What it had not yet written is undefined."""


class RDMABufferDroppedError(RDMAError):
    """The buffer was dropped, its memoryview released, or its tensor's storage moved (`resize_`)."""


class RDMAOwnerDiedError(RDMAError):
    """The process that owns the buffer ended, or its host was lost."""


class RDMAInitError(RDMAError):
    """No backend could be started in this process, or none of them reaches the buffer."""


def together(failures: dict[int, RDMAError], total: int) -> RDMAError:
    """One error for all the failed operations of an action: of their common class, naming each by its index."""
    kinds = {type(e) for e in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else RDMAError
    lines = [f"op {i}: ({e.backend or 'none'}) {e.args[0]}" for i, e in sorted(failures.items())]
    head = f"RDMAAction.submit failed: {len(failures)} of {total} operations failed:"
    first_index, first = min(failures.items())
    error = kind("\n  ".join([head, *lines]))
    error.owner, error.buffer_id, error.backend = first.owner, first.buffer_id, first.backend
    error.op_index, error.failures = first_index, dict(failures)
    return error
