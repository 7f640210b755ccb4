"""The errors of the framework.

Exception
|-- ActorError                  an endpoint raised; the actor is alive
|-- RuntimeError
    |-- SupervisionError        the addressee is dead or stopped; it will never answer
    |   |-- LinkError           nobody is left who could send to this receiver (a TimeoutError too)
    |-- WouldBlockRuntime       waiting here would block the runtime itself
MeshFailure                     not an exception: what an owner is told about a failure (failure.py)
"""

from __future__ import annotations

import traceback
from typing import Any


class ActorError(Exception):
    """An endpoint raised an exception. The actor is alive and answers the next call.

    Attributes: `exception` (what was raised), `message`, `exception_formatted` (the remote traceback as text,
    taken when the error was made, so it reads the same after travelling).
    """

    HEAD = "Traceback of where the remote call failed"

    def __init__(self, exception: BaseException, message: str = "A remote actor call has failed.") -> None:
        super().__init__(exception, message)
        self.exception = exception
        self.message = message
        self.exception_formatted = "".join(traceback.format_exception(exception)).replace(
            "Traceback (most recent call last)", f"{self.HEAD} (most recent call last)"
        )

    def __str__(self) -> str:
        return f"{self.message}\n{self.exception_formatted}"

    def __reduce__(self) -> Any:
        return _rebuild_actor_error, (type(self), self.exception, self.message, self.exception_formatted)


def _rebuild_actor_error(cls: type[ActorError], exception: BaseException, message: str, formatted: str) -> ActorError:
    error = cls.__new__(cls)
    Exception.__init__(error, exception, message)
    error.exception, error.message, error.exception_formatted = exception, message, formatted
    return error


class RemoteException(Exception):
    """Stands in for a remote exception that cannot be pickled or unpickled. `type_name` names its type."""

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(type_name, text)
        self.type_name = type_name

    def __str__(self) -> str:
        return f"{self.type_name}: {self.args[1]}"


class SupervisionError(RuntimeError):
    """The actor or process that was called is dead or stopped.

    `message` is the report; `endpoint` is `mesh.method()` when the call is known.
    """

    def __init__(self, message: str, endpoint: str | None = None) -> None:
        super().__init__(message, endpoint)
        self.message = message
        self.endpoint = endpoint

    def __str__(self) -> str:
        if self.endpoint:
            return f"Endpoint call {self.endpoint} failed, {self.message}"
        return self.message


class LinkError(TimeoutError, SupervisionError):
    """A receive can never succeed: all actors that the port was sent to are gone, and nothing is left in the queue.

    A TimeoutError too: for a receive with a timeout, the wait is merely over early.
    """

    def __init__(self, message: str) -> None:
        SupervisionError.__init__(self, message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class WouldBlockRuntime(RuntimeError):
    """Waiting on this thread would block the framework itself (for example its runtime thread)."""
