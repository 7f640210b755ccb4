"""What users import: actors, endpoints, meshes, futures, ports, contexts.

from monarch.actor import Actor, endpoint, this_host
"""

from __future__ import annotations

import sys
from typing import Any

from monarch.actor import _controllers, _logs, _sources
from monarch.actor import _endpoint as _endpoint_module
from monarch.actor._actor import Actor
from monarch.actor._channel import Channel
from monarch.actor._context import (
    Context,
    CreatorInstance,
    Instance,
    context,
    current_actor_name,
    current_rank,
    current_size,
)
from monarch.actor._controllers import get_or_spawn_controller
from monarch.actor._endpoint import (
    Accumulator,
    Endpoint,
    EndpointProperty,
    NotAnEndpoint,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    send,
)
from monarch.actor._hosts import (
    BootstrapCommand,
    HostMesh,
    attach,
    attach_to_workers,
    default_bootstrap_cmd,
    hosts_from_config,
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    start_worker_loop_forever,
    this_host,
    this_proc,
)
from monarch.actor._lifetime import enable_transport, shutdown_context
from monarch.actor._logs import config
from monarch.actor._mesh import ActorMesh
from monarch.actor._names import ActorAddr, ProcId, Uid
from monarch.actor._procs import ProcMesh
from monarch.actor._returns_future import returns_future
from monarch.config.transport import ChannelTransport
from monarch.mesh import Extent, Point, ValueMesh
from monarch.observe.helpers import get_meter, span, traced, traced_if_watched
from monarch.runtime import cell as _cell
from monarch.runtime import client as _client
from monarch.runtime.errors import ActorError, LinkError, SupervisionError
from monarch.runtime.failure import MeshFailure
from monarch.runtime.future import Future
from monarch.runtime.ports import Port, PortReceiver, RankedPortReceiver

concurrent = concurrent_endpoint

__all__ = [
    "Accumulator",
    "Actor",
    "ActorAddr",
    "ActorError",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "CreatorInstance",
    "Endpoint",
    "EndpointProperty",
    "Extent",
    "Future",
    "HostMesh",
    "Instance",
    "LinkError",
    "MeshFailure",
    "NotAnEndpoint",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "RankedPortReceiver",
    "SupervisionError",
    "Uid",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "hosts_from_config",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Called for each failure that nobody handled. Replace it by assignment; returning normally drops the failure.

    The default ends the program with status 1.
    """
    sys.exit(1)


def _current_hook(failure: MeshFailure) -> None:
    sys.modules[__name__].unhandled_fault_hook(failure)


def _started(node: Any) -> None:
    _logs.install()
    _sources.install(node)
    if not _client.is_worker():
        _controllers.install(node)


_client.fault_hook = _current_hook
_cell.instrument = traced_if_watched
_client.on_start.append(_started)
_unused = _endpoint_module
