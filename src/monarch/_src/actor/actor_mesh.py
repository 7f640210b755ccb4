"""Alias of an import path that existing programs use; no logic."""

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Context,
    CreatorInstance,
    Instance,
    Point,
    Port,
    PortReceiver,
    RankedPortReceiver,
    ValueMesh,
    as_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    send,
)
