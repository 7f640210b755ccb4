"""Alias of an import path that existing programs use; no logic."""

from monarch.runtime.failure import UndeliverableMessageEnvelope
