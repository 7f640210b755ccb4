"""Where values come from. Order: environment > configure() > inherited from the client > default."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

from monarch.config.keys import KEYS, check, from_text, shown

_lock = threading.RLock()
_runtime: dict[str, Any] = {}
_inherited: dict[str, Any] = {}
_environment: dict[str, Any] = {}
_merged: dict[str, Any] = {}


def _merge() -> None:
    global _merged
    _merged = {name: key.default for name, key in KEYS.items()} | _inherited | _runtime | _environment


def read_environment() -> None:
    """Reads the environment; done once, at import. A malformed variable is reported and ignored."""
    for name, key in KEYS.items():
        text = os.environ.get(key.env)
        if text is not None:
            try:
                _environment[name] = from_text(key, text)
            except (TypeError, ValueError) as e:
                warnings.warn(f"ignoring {key.env}={text!r}: {e}", stacklevel=2)
    _merge()


def effective(name: str) -> Any:
    """The value in force: durations as seconds (float), everything else as it is."""
    return _merged[name]


def configure(values: dict[str, Any]) -> None:
    """Sets all of `values`, or none: every value is checked before the first is set."""
    checked = {}
    for name, value in values.items():
        key = KEYS.get(name)
        if key is None:
            import difflib

            near = difflib.get_close_matches(name, KEYS, 1)
            raise ValueError(f"invalid configuration key: `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))
        checked[name] = check(key, value)
    with _lock:
        for name, value in checked.items():
            if name in _environment and _environment[name] != value:
                warnings.warn(
                    f"configure({name}=...) has no effect: the environment variable {KEYS[name].env} wins", stacklevel=3
                )
        _runtime.update(checked)
        _merge()


def runtime_layer() -> dict[str, Any]:
    with _lock:
        return dict(_runtime)


def restore(layer: dict[str, Any]) -> None:
    """Puts back a runtime layer taken earlier."""
    with _lock:
        _runtime.clear()
        _runtime.update(layer)
        _merge()


def show(values: dict[str, Any]) -> dict[str, Any]:
    return {name: shown(KEYS[name], value) for name, value in values.items()}


def show_all() -> dict[str, Any]:
    return show(_merged)


def snapshot_for_children() -> dict[str, Any]:
    """What a new process or an attached host inherits."""
    return {n: v for n, v in _merged.items() if not KEYS[n].local and v != KEYS[n].default}


def install_inherited(values: dict[str, Any]) -> None:
    """In a new process: the client's values, below everything set here."""
    with _lock:
        _runtime.clear()
        _inherited.clear()
        _inherited.update({n: v for n, v in values.items() if n in KEYS})
        _merge()


read_environment()
