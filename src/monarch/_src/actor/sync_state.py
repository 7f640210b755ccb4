"""Alias of an import path that existing programs use; no logic."""

from monarch.actor._sync_state import fake_sync_state
