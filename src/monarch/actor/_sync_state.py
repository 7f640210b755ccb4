"""Hiding a running event loop from enclosed code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def fake_sync_state() -> Iterator[None]:
    """Inside the block, code sees no running event loop, although one runs on this thread."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
