"""Refusals: the text of a TypeError that shows the call with the operands that do not fit."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.tensor import sites, streams
from monarch.tensor.handle import DROPPED, FROZEN, LENT, Tensor, explain

_HINTS = {
    "LOCAL_TENSOR": "use no_mesh.activate() to compute on local tensors, or torch.tensor(list) to send constants",
    "WRONG_MESH": "move it with .to_mesh(mesh)",
    "WRONG_STREAM": "lend it with stream.borrow(t), or activate its stream",
    "DROPPED": "keep the tensor, or recompute it",
    "BORROWED": "drop the borrow first",
    "MUTATING_BORROW": "drop the borrow first, or take it with .borrow(t, mutable=True)",
    "REQUIRES_GRAD": "use torch.no_grad() or t.detach()",
    "CROSS_DEVICE_REQUIRES_CUDA": "move it to the workers' GPU with .cuda()",
}


def reason(t: Any, lane: Any, mutated: bool, stream: bool = True) -> tuple[str, str] | None:
    """(keyword, explanation) when a leaf may not be used on `lane`; None when it may."""
    if not isinstance(t, torch.Tensor):
        return None
    if not isinstance(t, Tensor):
        return "LOCAL_TENSOR", "is a plain local tensor"
    group = t._group
    if group.flags & DROPPED:
        where = sites.text(group.drop_site) if isinstance(group.drop_site, int) else str(group.drop_site or "")
        return "DROPPED", f"was dropped at:\n{where}"
    if lane is not None and group.lane is not lane:
        if group.lane.mesh is not lane.mesh:
            return "WRONG_MESH", f"is on {group.lane.mesh}"
        if stream:
            return "WRONG_STREAM", f"is on {group.lane.stream}"
    if group.flags & LENT:
        return "BORROWED", "is borrowed mutably by another stream:\n" + _borrows(group)
    if mutated and group.flags & FROZEN:
        return "MUTATING_BORROW", "would be mutated while it is borrowed:\n" + _borrows(group)
    return None


def _borrows(group: Any) -> str:
    live = list(group.lent) or ([group.origin] if group.origin else [])
    return "".join(f"borrowed by {b.stream} at:\n{sites.text(b.site)}" for b in live)


def refusal(
    func: Any, args: Any, kwargs: Any, lane: Any, mutated: Any, extra: Any = None, stream: bool = True
) -> TypeError | None:
    """The error for a call, or None when every operand fits.

    `mutated`: ids of handles that the call writes. `extra(t)`: a further check, giving (keyword, explanation).
    """
    errors: list[tuple[str, str]] = []

    def show(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = reason(leaf, lane, id(leaf) in mutated, stream) or (extra(leaf) if extra else None)
        if found is None:
            return _Shown(".")
        errors.append(found)
        return _Shown(f"ERROR_{len(errors) - 1}")

    shown_args, shown_kwargs = pytree.tree_map(show, (tuple(args), dict(kwargs)))
    if not errors:
        return None
    parts = [repr(a) for a in shown_args] + [f"{k}={v!r}" for k, v in shown_kwargs.items()]
    if all(k == "LOCAL_TENSOR" for k, _ in errors) and lane is None:
        lines = ["Remote functions require an active device mesh."]
    else:
        lines = []
    name = getattr(func, "__qualname__", None) if not hasattr(func, "_schema") else str(func)
    from monarch.tensor.mesh import active

    lines += [
        f"Incorrect arguments to monarch operation: {name or func}({', '.join(parts)})",
        f"active_mesh = {active.mesh if lane is None else lane.mesh}",
        f"active_stream = {streams.active.stream}",
    ]
    if lines[0].startswith("Remote"):
        lines = [lines[1], lines[0], *lines[2:]]
    for i, (keyword, why) in enumerate(errors):
        lines.append(f"ERROR_{i}: {keyword}: the operand {why}")
    for keyword in dict.fromkeys(k for k, _ in errors):
        lines.append(f"hint ({keyword}): {_HINTS[keyword]}")
    error = TypeError("\n".join(lines))
    explain.error = error
    return error


class _Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text
