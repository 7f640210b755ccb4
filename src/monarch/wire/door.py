"""Where strangers wait: accepts connections, and keeps few of those that have not proved yet who they are."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import socket
from collections.abc import Callable

from monarch.wire import addresses
from monarch.wire.connection import Connection
from monarch.wire.poller import READ, Poller

log = logging.getLogger("monarch.wire")

#: connections whose handshake is not done; one more and the oldest of them goes
MOST_STRANGERS = 256
#: accepted at one look: a flood does not keep the thread from those who are in
_AT_ONCE = 8
#: seconds without accepting when there are no descriptors left
_PAUSE = 0.1


class Door:
    """Accepts from `listening`; `arrived` makes the connection. On the runtime thread."""

    def __init__(
        self, poller: Poller, listening: socket.socket, arrived: Callable[[socket.socket], Connection]
    ) -> None:
        self.poller = poller
        self.listening = listening
        self.arrived = arrived
        self.strangers: collections.deque[Connection] = collections.deque()

    def on_event(self, event: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self.listening.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._rest(e)
                return
            if not addresses.same_user(sock):
                sock.close()
                continue
            try:
                conn = self.arrived(sock)
            except OSError:  # it left already
                sock.close()
                continue
            self._make_room()
            self.strangers.append(conn)

    def _make_room(self) -> None:
        waiting = self.strangers
        while waiting and (waiting[0].closed or not waiting[0].is_stranger):
            waiting.popleft()
        if len(waiting) >= MOST_STRANGERS:
            still = [c for c in waiting if c.is_stranger and not c.closed]
            waiting.clear()
            waiting.extend(still)
            if len(waiting) >= MOST_STRANGERS:
                waiting.popleft().close("too many connections wait for their handshake")

    def _rest(self, e: OSError) -> None:
        """No descriptors: the strangers go, and nobody is let in for a moment."""
        log.warning("cannot accept a connection: %s", e.strerror)
        for conn in list(self.strangers):
            if conn.is_stranger:
                conn.close("no descriptors are left")
        self.strangers.clear()
        fd = self.listening.fileno()
        self.poller.unwatch(fd)

        def again() -> None:
            with contextlib.suppress(OSError, ValueError):
                if self.listening.fileno() == fd:
                    self.poller.watch(fd, READ, self.on_event)

        self.poller.call_later(_PAUSE, again)
