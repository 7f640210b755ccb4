"""Alias of an import path that existing programs use; no logic."""

from monarch.config import Encoding
