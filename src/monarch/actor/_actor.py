"""The base class of actors.

hook                              when                                     may be async
__init__                          at spawn, on the actor's thread          no
__supervise__(failure) -> bool    a mesh this actor owns failed            async actors only
__cleanup__(exc)                  once, when it ends; exc None on a stop   must match the endpoints
_handle_undeliverable_message     a message it sent bounced                async actors only
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC
from functools import cached_property
from typing import TYPE_CHECKING, Any

from monarch.actor._endpoint import EndpointProperty, has_endpoints
from monarch.mesh import MeshTrait

if TYPE_CHECKING:
    from monarch.runtime.failure import MeshFailure

RESERVED = ("slice", "split", "flatten", "rename", "size", "sizes", "extent", "stop", "initialized")


class _LocalOnly:
    """A mesh attribute on a local object: reading it is an error, assigning it is the user's business."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise NotImplementedError(f"{type(instance).__name__} is a local object here, not a spawned mesh")


class Actor(MeshTrait, ABC):
    """Subclass it, mark methods with `@endpoint`, and spawn it: `procs.spawn("name", MyActor, *args)`.

    `spawn` gives a mesh of actors, typed as the class so that checkers know its endpoints. An instance made locally
    is an ordinary object: helpers work, mesh operations raise NotImplementedError.
    """

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger named after the class, level DEBUG."""
        logger = logging.getLogger(type(self).__name__)
        logger.setLevel(logging.DEBUG)
        return logger

    @property
    def _ndslice(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} is a local object here, not a spawned mesh")

    @property
    def _labels(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} is a local object here, not a spawned mesh")

    def _new_with_shape(self, shape: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} is a local object here, not a spawned mesh")

    def __supervise__(self, failure: MeshFailure) -> bool:
        """A mesh this actor owns failed: return True when that is dealt with; False lets this actor fail too."""
        return False

    def __cleanup__(self, exc: Exception | None) -> None:
        """Runs once when the actor ends; `exc` is None on a normal stop. Owned meshes are gone by then."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """A message this actor sent could not be delivered: return True to swallow it."""
        return False

    def stop(self, reason: str = "stopped by client") -> Any:
        raise NotImplementedError(f"{type(self).__name__} is a local object here, not a spawned mesh")

    initialized: Any = _LocalOnly()


for _hook in ("__supervise__", "__cleanup__", "_handle_undeliverable_message"):
    getattr(Actor, _hook)._is_stub = True


def validate(cls: Any) -> bool:
    """Checks that `cls` can be spawned; True when it is an async actor. TypeError or ValueError otherwise."""
    if not isinstance(cls, type):
        raise TypeError(f"spawn needs a class, not an instance of {type(cls).__name__}; pass the class itself")
    if not issubclass(cls, Actor):
        raise ValueError(f"{cls.__name__} must subclass monarch.actor.Actor to spawn it")
    if inspect.isabstract(cls) and cls is not Actor:
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise TypeError(f"cannot spawn the abstract class {cls.__name__}: it lacks {missing}")
    if inspect.iscoroutinefunction(cls.__init__):
        raise TypeError(f"{cls.__name__}.__init__ is async; make it a plain def (do async work in an endpoint)")
    for name in RESERVED:
        if isinstance(inspect.getattr_static(cls, name, None), EndpointProperty):
            raise ValueError(
                f"{cls.__name__}.{name}: the mesh attribute {name!r} collides with an endpoint name; rename it"
            )
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for name, prop in has_endpoints(cls).items():
        kinds[inspect.iscoroutinefunction(prop._method)].append(name)
    if kinds[True] and kinds[False]:
        raise ValueError(
            f"{cls.__name__} mixes both async and sync endpoints (async: {', '.join(kinds[True])}; sync: "
            f"{', '.join(kinds[False])}); make all of them async def, or none"
        )
    is_async = not kinds[False]
    for hook, must_match in (("__cleanup__", True), ("__supervise__", False), ("_handle_undeliverable_message", False)):
        method = getattr(cls, hook)
        if getattr(method, "_is_stub", False):
            continue
        hook_async = inspect.iscoroutinefunction(method)
        if hook_async and not is_async:
            raise ValueError(f"{cls.__name__}.{hook} is async def but its endpoints are not; make it a plain def")
        if must_match and kinds[True] and not hook_async:
            raise ValueError(f"{cls.__name__}.{hook} must be async def, like its endpoints")
    return is_async
