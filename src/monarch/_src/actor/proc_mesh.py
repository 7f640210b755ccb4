"""Alias of an import path that existing programs use; no logic."""

from monarch.actor import ProcMesh, get_or_spawn_controller
from monarch.actor._procs import (
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)
