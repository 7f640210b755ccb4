"""Durations as people write them: `"90s"`, `"1h 30m"`, `"500ms"`, `"1.5s"`, `"2w"`."""

from __future__ import annotations

import re

_UNITS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "m": 60.0, "min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0, "w": 604800.0, "week": 604800.0, "weeks": 604800.0,
}  # fmt: skip
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")
_NANOS = (("d", 86400 * 10**9), ("h", 3600 * 10**9), ("m", 60 * 10**9), ("s", 10**9), ("ms", 10**6),
          ("us", 10**3), ("ns", 1))  # fmt: skip


def parse(text: object) -> float:
    """Seconds. TypeError for anything that is not a sequence of number and unit."""
    if not isinstance(text, str):
        raise TypeError(f'Invalid duration format {text!r}: expected a string such as "90s" or "1h 30m"')
    total, at = 0.0, 0
    stripped = text.strip()
    while at < len(stripped):
        match = _PART.match(stripped, at)
        if match is None or match[2] not in _UNITS:
            break
        total += float(match[1]) * _UNITS[match[2]]
        at = match.end()
    if not stripped or at < len(stripped):
        raise TypeError(f'Invalid duration format {text!r}: expected numbers with units, such as "90s" or "1h 30m"')
    return total


def render(seconds: float) -> str:
    """The normal form: 300.0 -> `5m`, 90.0 -> `1m 30s`, 0.0 -> `0s`."""
    left = round(seconds * 10**9)
    parts = []
    for unit, nanos in _NANOS:
        count, left = divmod(left, nanos)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
