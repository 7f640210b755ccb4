"""Configuration: `configure(key=value)`, `with configured(key=value):`, `get_global_config()`.

Order of precedence: environment > configure() > inherited from the client > default. The environment is read at
import. Durations are text with units (`"90s"`). See `keys.py` for the table of keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from monarch.config import store
from monarch.config.keys import Encoding

__all__ = [
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]


def configure(**values: Any) -> None:
    """Sets keys for this process and what it starts from now on. All or none.

    Raises ValueError for an unknown key or a value out of range, TypeError for a value of the wrong type.
    """
    store.configure(values)


@contextlib.contextmanager
def configured(**values: Any) -> Iterator[dict[str, Any]]:
    """Sets keys for the duration of a block; yields the merged configuration."""
    before = store.runtime_layer()
    store.configure(values)
    try:
        yield store.show_all()
    finally:
        store.restore(before)


def get_global_config() -> dict[str, Any]:
    """All keys with the values in force."""
    return store.show_all()


def get_runtime_config() -> dict[str, Any]:
    """The keys set by `configure` in this process."""
    return store.show(store.runtime_layer())


def clear_runtime_config() -> None:
    """Forgets everything set by `configure` in this process."""
    store.restore({})


def parametrize_config(**options: set[Any]) -> Any:
    """A pytest decorator: runs the test under every combination of the options."""
    from monarch.config.testing import parametrize_config as decorate

    return decorate(**options)


def parametrize_config_pointwise(**options: list[Any]) -> Any:
    """A pytest decorator: runs the test under the first values of all options, then the second, ..."""
    from monarch.config.testing import parametrize_config_pointwise as decorate

    return decorate(**options)
