"""Alias of an import path that existing programs use; no logic."""

from monarch.runtime.client import UnhandledFault as UnhandledFaultHookException
