"""Old import path; use `monarch.actor`."""

import warnings

from monarch.actor import (  # noqa: F401
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Port,
    PortReceiver,
    ValueMesh,
    as_endpoint,
    context,
    current_rank,
    endpoint,
    send,
)

warnings.warn("monarch.actor_mesh is deprecated; import from monarch.actor", DeprecationWarning, stacklevel=2)
