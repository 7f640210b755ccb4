"""Alias of an import path that existing programs use; no logic."""

from monarch.actor import HostMesh, this_host, this_proc
