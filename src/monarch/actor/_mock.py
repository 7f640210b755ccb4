"""Replacing actor classes in tests: inside `patch_actor(Original, Mock)`, spawning Original spawns Mock.

Proc meshes created while patched carry the patch into their processes, and on to processes those spawn.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_actors: dict[type, type] = {}
_engines: dict[type, Any] = {}


def get_actor_class(cls: Any) -> Any:
    """What spawning `cls` really spawns now."""
    return _actors.get(cls, cls) if isinstance(cls, type) else cls


def get_actor_mock_registry_state() -> dict[type, type]:
    return dict(_actors)


def set_actor_mock_registry_state(state: dict[type, type]) -> None:
    _actors.clear()
    _actors.update(state)


def get_tensor_engine_factory(cls: type) -> Callable[[Any], Any] | None:
    return _engines.get(cls)


def get_tensor_engine_mock_registry_state() -> dict[type, Any]:
    return dict(_engines)


def set_tensor_engine_mock_registry_state(state: dict[type, Any]) -> None:
    _engines.clear()
    _engines.update(state)


class _Patch:
    """A context manager (sync and async) and a decorator over one entry of a registry."""

    def __init__(self, registry: dict[type, Any], key: type, value: Any) -> None:
        self._registry, self._key, self._value = registry, key, value
        self._before: list[Any] = []

    def __enter__(self) -> Any:
        self._before.append(self._registry.get(self._key))
        self._registry[self._key] = self._value
        return self._value

    def __exit__(self, *exc: Any) -> None:
        before = self._before.pop()
        if before is None:
            self._registry.pop(self._key, None)
        else:
            self._registry[self._key] = before

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *exc: Any) -> None:
        self.__exit__()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await fn(*args, **kwargs)

            return run_async

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return run


def patch_actor(Original: type, Mock: type) -> _Patch:
    """Inside the block (or the decorated function), spawning `Original` spawns `Mock`. Nests; entering gives `Mock`."""
    for what in (Original, Mock):
        if not isinstance(what, type):
            raise TypeError(f"patch_actor takes two classes, not {what!r}")
    return _Patch(_actors, Original, Mock)


def patch_tensor_engine(ActorClass: type, factory: Callable[[Any], Any] | None = None) -> _Patch:
    """Inside the block, actors of `ActorClass` use `factory(proc_mesh)` for `ProcMesh.activate()`."""
    return _Patch(_engines, ActorClass, factory or (lambda mesh: mesh))


def with_patches(setup: Callable[[], Any] | None, state: dict[type, type]) -> Callable[[], Any]:
    """A bootstrap callable that installs the patches in a new process, then runs the user's own."""

    def install() -> Any:
        from monarch.actor import _mock

        _mock.set_actor_mock_registry_state(state)
        return setup() if setup is not None else None

    return install
