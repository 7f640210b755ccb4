"""Channels: a port to send to, and a receiver to take from."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from monarch.runtime.client import current_host, current_node
from monarch.runtime.ports import Port, PortReceiver, RankedPortReceiver, Receiver

R = TypeVar("R")


class Channel(Generic[R]):
    """`port, receiver = Channel[int].open()`: the port may travel anywhere, the receiver stays here."""

    @classmethod
    def open(cls, once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """A new port and its receiver. `once`: it takes exactly one value."""
        port, receiver = _open(once, False)
        return port, PortReceiver(receiver)

    @classmethod
    def open_ranked(cls, once: bool = False) -> tuple[Port[R], RankedPortReceiver[R]]:
        """As `open`; the receiver gives `(rank, value)` for replies routed with `send(..., port)`."""
        port, receiver = _open(once, True)
        return port, RankedPortReceiver(receiver)


def _open(once: bool, ranked: bool) -> tuple[Port[Any], Receiver[Any]]:
    node = current_node()
    receiver: Receiver[Any] = Receiver(node, once, ranked)
    receiver.ident = node.open_port(receiver)
    return Port._make(node.id, current_host(), receiver.ident, once), receiver
