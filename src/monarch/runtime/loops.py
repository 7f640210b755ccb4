"""An asyncio loop that waits for its next event as the guest of the runtime's poller.

It is the standard selector loop; only its selector differs: when it would sleep, it sleeps in the poller, with its
own descriptors watched there too. A message for an async actor then wakes the actor's thread directly.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

from monarch.runtime.future import Bridge
from monarch.wire.poller import EDGE, READ, Poller

_Base: Any = getattr(selectors, "EpollSelector", selectors.DefaultSelector)


class _GuestSelector(_Base):  # type: ignore[misc]
    """`_inner_ready` is true unless the loop's own descriptors were found idle and no edge came since."""

    def __init__(self, poller: Poller) -> None:
        super().__init__()
        self._poller = poller
        self._inner_ready = True
        self.loop_ready: Any = ()  #: the loop's queue of callbacks
        self.bridge: Bridge | None = None
        poller.watch(self.fileno(), READ | EDGE, self._inner_event)

    def _inner_event(self, event: int) -> None:
        self._inner_ready = True
        self._poller.call_guest()

    def _done(self) -> bool:
        return self._inner_ready or bool(self.loop_ready) or (self.bridge is not None and self.bridge._scheduled)

    def _look(self) -> list[Any]:
        self._inner_ready = False
        found: list[Any] = super().select(0)
        if found:
            self._inner_ready = True  # more may be there, without another edge
        return found

    def select(self, timeout: float | None = None) -> list[Any]:
        if self._inner_ready:
            found = self._look()
            if found:
                ready: list[Any] = found
                return ready
        if timeout is not None and timeout <= 0:
            return []
        poller = self._poller
        end = None if timeout is None else time.monotonic() + timeout
        if poller.enter(idle=True):
            try:
                if poller.wait(self._done, timeout):
                    return self._look() if self._inner_ready else []
            finally:
                poller.leave()
            # Sent away for somebody busier: not to come back at once, this wait goes on the ordinary way.
        left = None if end is None else max(0.0, end - time.monotonic())
        self._inner_ready = True
        slept: list[Any] = super().select(left)
        return slept

    def close(self) -> None:
        self._poller.unwatch(self.fileno())
        super().close()


def new_guest_loop(poller: Poller) -> asyncio.AbstractEventLoop:
    """A new event loop for one actor."""
    if poller._epoll is None:
        return asyncio.new_event_loop()
    selector = _GuestSelector(poller)
    loop: Any = asyncio.SelectorEventLoop(selector)
    selector.bridge = Bridge.of(loop)
    selector.loop_ready = loop._ready
    out: asyncio.AbstractEventLoop = loop
    return out
