"""The errors of weight synchronisation.

Exception
|-- ValueError
|   |-- LayoutMismatch   the two sides do not have the same parameters
|-- RDMAError
    |-- WeightsLapped    every attempt to read was overtaken by newer versions
"""

from __future__ import annotations

from monarch.rdma import RDMAError


class LayoutMismatch(ValueError):
    """The target's parameters are not those that are published; the text names the first that differs."""


class WeightsLapped(RDMAError):
    """While each of `retries` reads ran, the publisher reused the slot that was being read.

    Attributes: `versions` (the versions that were begun, in order). Use more slots, or `on_lap="lease"`.
    """

    versions: tuple[int, ...] = ()
