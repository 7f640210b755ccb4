"""How a worker finds a function of the client: by import path where it can, else pickled by value.

`resolvers` is a list that users may extend: each entry maps a target to a resolvable, an object with
`resolve() -> callable` that can be pickled, or to None when the target is not its business.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from monarch.wire import pickling


class ResolvableFunction:
    """What workers turn back into a function."""

    def resolve(self) -> Callable[..., Any]:
        raise NotImplementedError


class ResolvableFunctionFromPath(ResolvableFunction):
    """An attribute of an importable module, `package.module.name`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def resolve(self) -> Callable[..., Any]:
        parts = self.path.split(".")
        found: Any = None
        for n in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:n])
            try:
                found = importlib.import_module(name)
            except ModuleNotFoundError as e:
                if e.name is None or not (name == e.name or name.startswith(e.name + ".")):
                    raise
                continue
            for part in parts[n:]:
                found = getattr(found, part)
            break
        else:
            raise ModuleNotFoundError(f"the worker cannot import {self.path!r}")
        function: Callable[..., Any] = getattr(found, "_function", found) if _is_remote(found) else found
        return function

    def __str__(self) -> str:
        return self.path


class ResolvableFromCloudpickle(ResolvableFunction):
    """A function pickled by value."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name

    def resolve(self) -> Callable[..., Any]:
        function: Callable[..., Any] = pickling.loads(self.data)
        return function

    def __str__(self) -> str:
        return self.name


def _is_remote(found: Any) -> bool:
    return getattr(type(found), "_is_monarch_remote", False)


def _operator(target: Any) -> ResolvableFunction | None:
    kind = type(target).__name__
    if kind == "OpOverload":
        return ResolvableFunctionFromPath(f"torch.ops.{target}")
    if kind == "OpOverloadPacket":
        return ResolvableFunctionFromPath(f"torch.ops.{target._qualified_op_name.replace('::', '.')}")
    return None


def _path(target: Any) -> ResolvableFunction | None:
    return ResolvableFunctionFromPath(target) if isinstance(target, str) and "." in target else None


def _importable(target: Any) -> ResolvableFunction | None:
    if not isinstance(target, (types.FunctionType, types.BuiltinFunctionType)):
        return None
    name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", None)
    if not module or module in pickling.by_value_modules or "<" in name:
        return None
    home: Any = sys.modules.get(module)
    loader = getattr(getattr(home, "__spec__", None), "loader", None)
    if home is None or type(loader).__module__.startswith("_pytest"):
        return None
    found = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is target or (_is_remote(found) and found._function is target):
        return ResolvableFunctionFromPath(f"{module}.{name}")
    return None


def _by_value(target: Any) -> ResolvableFunction | None:
    if not callable(target):
        return None
    try:
        data = pickling.dump_bytes(target)
    except Exception as e:
        raise ValueError(f"remote: {target!r} cannot be sent to the workers: {e}") from e
    return ResolvableFromCloudpickle(data, getattr(target, "__qualname__", repr(target)))


resolvers: list[Callable[[Any], Any]] = [_operator, _path, _importable, _by_value]


def resolvable_function(target: Any) -> Any:
    """The resolvable of a function, an operator or an import path. ValueError when no resolver knows it."""
    for resolver in resolvers:
        found = resolver(target)
        if found is not None:
            return found
    raise ValueError(f"remote: unsupported target {target!r}; give a function, or an import path with a dot")
