"""Tensor engines of process meshes, and the error of their operations."""

from monarch.tensor.engine import RemoteException
from monarch.tensor.procs import spawn_tensor_engine

__all__ = ["RemoteException", "spawn_tensor_engine"]
