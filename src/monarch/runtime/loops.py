"""An asyncio loop that waits for its next event as the guest of the runtime's poller.

It is the standard selector loop; only its selector differs: when it would sleep, it sleeps in the poller, with its
own descriptors watched there too. A message for an async actor then wakes the actor's thread directly.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from monarch.runtime.future import Bridge
from monarch.wire.poller import EDGE, READ, Poller

_Base: Any = getattr(selectors, "EpollSelector", selectors.DefaultSelector)


class _GuestSelector(_Base):  # type: ignore[misc]
    def __init__(self, poller: Poller) -> None:
        super().__init__()
        self._poller = poller
        self._inner_ready = False
        self.bridge: Bridge | None = None
        poller.watch(self.fileno(), READ | EDGE, self._inner_event)

    def _inner_event(self, event: int) -> None:
        self._inner_ready = True
        self._poller.call_guest()

    def _done(self) -> bool:
        return self._inner_ready or (self.bridge is not None and self.bridge._scheduled)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            found: list[Any] = super().select(0)
            return found
        poller = self._poller
        if not poller.enter(idle=True):
            found = super().select(timeout)
            return found
        try:
            # What became ready before this point raised its edge before, too: look once, then wait for edges.
            self._inner_ready = False
            found = super().select(0)
            if found:
                return found
            poller.wait(self._done, timeout)
        finally:
            poller.leave()
        if (self.bridge is not None and self.bridge._scheduled) or self._inner_ready or timeout is not None:
            timeout = 0
        found = super().select(timeout)
        return found

    def close(self) -> None:
        self._poller.unwatch(self.fileno())
        super().close()


def new_guest_loop(poller: Poller) -> asyncio.AbstractEventLoop:
    """A new event loop for one actor."""
    if poller._epoll is None:
        return asyncio.new_event_loop()
    selector = _GuestSelector(poller)
    loop = asyncio.SelectorEventLoop(selector)
    selector.bridge = Bridge.of(loop)
    return loop
