"""Operators of the workers: from a template to a Python function that makes the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Template:
    """One operator with its constant arguments.

    `call(table, inputs, scalars)` makes the call. `single`: its result is one tensor with an id of its own.
    """

    __slots__ = ("call", "flat", "mutated", "name")

    def __init__(self, name: str, positional: list[Any], named: dict[str, Any], dtype: Any, mutated: Any) -> None:
        self.name = name
        self.mutated: tuple[int, ...] = tuple(mutated)
        self.call: Callable[[Any, Any, Any], Any] = _compile(name, positional, named)
        if dtype is not None:
            self.call = _with_default_dtype(self.call, dtype)


def operator(name: str) -> Any:
    """`aten::add.Tensor` -> the operator. AttributeError when this process does not have it."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def _compile(name: str, positional: list[Any], named: dict[str, Any]) -> Callable[[Any, Any, Any], Any]:
    try:
        func = operator(name)
    except AttributeError as e:
        return _missing(name, str(e))
    space: dict[str, Any] = {"f": getattr(func, "_op", func)}

    def expression(a: Any) -> str:
        kind, value = a
        if kind == "t":
            return f"t[i[{value}]]"
        if kind == "s":
            return f"s[{value}]"
        if kind == "l":
            return "[" + ", ".join(map(expression, value)) + "]"
        key = f"c{len(space)}"
        space[key] = value
        return key

    parts = [expression(a) for a in positional] + [f"{k}={expression(v)}" for k, v in named.items()]
    made: Callable[[Any, Any, Any], Any] = eval(f"lambda t, i, s: f({', '.join(parts)})", space)
    return made


def _missing(name: str, why: str) -> Callable[[Any, Any, Any], Any]:
    def call(table: Any, ins: Any, scalars: Any) -> Any:
        raise RuntimeError(f"the worker does not have the operator {name}: {why}")

    return call


_dtype_lock = threading.Lock()


def _with_default_dtype(call: Callable[[Any, Any, Any], Any], dtype: Any) -> Callable[[Any, Any, Any], Any]:
    def run(table: Any, ins: Any, scalars: Any) -> Any:
        with _dtype_lock:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return call(table, ins, scalars)
            finally:
                torch.set_default_dtype(before)

    return run
