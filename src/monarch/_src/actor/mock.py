"""Alias of an import path that existing programs use; no logic."""

from monarch.actor._mock import (
    get_actor_class,
    get_actor_mock_registry_state,
    get_tensor_engine_factory,
    get_tensor_engine_mock_registry_state,
    patch_actor,
    patch_tensor_engine,
    set_actor_mock_registry_state,
    set_tensor_engine_mock_registry_state,
)
