"""Where operations were issued: stacks captured as numbers, turned into text only when something failed."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import CodeType, FrameType
from typing import Any

import torch

_DEPTH = 40
_known: dict[tuple[Any, ...], int] = {}
_stacks: list[tuple[Any, ...]] = []
_TORCH = os.path.dirname(torch.__file__)
_SKIP = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    *(os.path.join(_TORCH, *part) for part in (("utils", "_python_dispatch.py"), ("_compile.py",), ("_dynamo", ""))),
)


def here() -> int:
    """The number of the current stack, the same for the same stack."""
    frame: FrameType | None = sys._getframe(1)
    key: list[Any] = []
    left = _DEPTH
    while frame is not None and left:
        key.append(frame.f_code)
        key.append(frame.f_lasti)
        frame = frame.f_back
        left -= 1
    stack = tuple(key)
    site = _known.get(stack)
    if site is None:
        site = _known[stack] = len(_stacks)
        _stacks.append(stack)
    return site


def frames(site: int) -> list[traceback.FrameSummary]:
    """The stack, outermost call first, without this package's own frames."""
    if not 0 <= site < len(_stacks):
        return []
    stack = _stacks[site]
    out = []
    for i in range(0, len(stack), 2):
        code: CodeType = stack[i]
        if code.co_filename.startswith(_SKIP):
            continue
        line = _line(code, stack[i + 1])
        linecache.checkcache(code.co_filename)
        out.append(traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=True))
    out.reverse()
    return out


def text(site: int) -> str:
    return "".join(traceback.format_list(frames(site)))


def _line(code: CodeType, at: int) -> int:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            return number
        if number is not None and start <= at:
            line = number
    return line
