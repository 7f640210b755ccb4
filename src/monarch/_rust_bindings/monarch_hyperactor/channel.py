"""Alias of an import path that existing programs use; no logic."""

from monarch.config.transport import BindSpec, ChannelTransport
