"""The client's beginning and end: which transport it uses, and its orderly shutdown."""

from __future__ import annotations

import math
from typing import Any

from monarch.config import store
from monarch.config.transport import BindSpec, ChannelTransport
from monarch.runtime import client
from monarch.runtime.future import Future

_chosen: BindSpec | None = None


def enable_transport(transport: ChannelTransport | str) -> None:
    """Chooses how processes talk: a ChannelTransport, a short name ("ipc", "tcp", "tls") or an address to bind.

    Must come before any other framework call. ValueError for an unknown name; RuntimeError when another transport is
    in use already; the same one again is a no-op.
    """
    global _chosen
    spec = BindSpec(transport)
    current = _chosen or (store.effective("default_transport") if client.exists() else None)
    if current is not None and current != spec:
        raise RuntimeError(f"cannot enable transport {spec}: {current} is already in use; choose before the first use")
    store.configure({"default_transport": spec})
    _chosen = spec


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """Ends the client and every process it started; starts at once, even when the future is dropped. Idempotent.

    `host_timeout`: seconds for the polite part (default: `cleanup_timeout`). ValueError when it is negative, NaN or
    infinite. Without a client, and inside workers, nothing happens.
    """
    if host_timeout is not None:
        valid = isinstance(host_timeout, (int, float)) and math.isfinite(host_timeout)
        if not valid or not 0 <= host_timeout < 2**64:
            raise ValueError(f"invalid timeout {host_timeout!r}: expected a finite number of seconds >= 0, or None")
    budget = float(store.effective("cleanup_timeout")) if host_timeout is None else float(host_timeout)
    return client.shutdown(budget)


_unused: Any = None
