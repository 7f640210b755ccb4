"""Python logging inside actors: every record knows its actor, and its message says so."""

from __future__ import annotations

import logging
import types
from typing import Any

from monarch.actor._actor import Actor
from monarch.actor._endpoint import endpoint
from monarch.runtime.cell import here
from monarch.runtime.client import Root, is_worker, peek

#: `config.prefix_python_logs_with_actor = False` leaves messages as they are
config = types.SimpleNamespace(prefix_python_logs_with_actor=True)

_previous: Any = None


def _record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record: logging.LogRecord = _previous(*args, **kwargs)
    now = here.get()
    cell = now.cell if now is not None else None
    node = peek()
    if cell is None and node is not None and not is_worker():
        cell = node.cells.get(1)
    if cell is None:
        return record
    record.actor = cell.spec.name
    record.mesh = cell.spec.full_name
    record.rank = None if isinstance(cell, Root) else cell.rank
    if config.prefix_python_logs_with_actor and isinstance(record.msg, str) and record.msg:
        prefix = f"[actor={cell.display}] "
        record.actor_prefix = prefix
        record.msg = (prefix.replace("%", "%%") if record.args else prefix) + record.msg
    return record


def install() -> None:
    """Covers all handlers, also those added later. Idempotent."""
    global _previous
    if _previous is None:
        _previous = logging.getLogRecordFactory()
        logging.setLogRecordFactory(_record)


class LevelSetter(Actor):
    """Sets the root logger's level in its process."""

    @endpoint
    async def set_level(self, level: int) -> None:
        logging.getLogger().setLevel(level)
