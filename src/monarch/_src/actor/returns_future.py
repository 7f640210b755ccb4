"""Alias of an import path that existing programs use; no logic."""

from monarch.actor._returns_future import returns_future
