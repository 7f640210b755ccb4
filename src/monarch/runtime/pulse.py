"""Hosts that fall silent: the last resort of detection.

A process that dies is reported by its zygote; a host whose connection closes is lost at once; a machine that
vanishes is noticed by TCP's own keepalive, which the kernel answers without anybody's interpreter. What remains is a
daemon that is frozen or hangs. So a client asks each host it attached, from time to time, for a sign of life. Daemons
run no user code, so nothing may keep one from answering; clients do, so nobody asks them.

Silence is counted in questions, not in seconds: a client that was itself held up (by native code that kept the
interpreter lock, say) asked only once meanwhile, and reads the answers before it asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from monarch.config import store

if TYPE_CHECKING:
    from monarch.runtime.node import Node
    from monarch.wire.connection import Connection
    from monarch.wire.poller import Timer

#: questions without an answer after which a host is lost; asked every `get_proc_state_max_idle / QUESTIONS`
QUESTIONS = 5


class _Watched(NamedTuple):
    conn: Connection
    heard: int
    unanswered: int


class Pulse:
    """The hosts that one client attached. All methods run on the runtime thread."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.watched: dict[int, _Watched] = {}
        self._next: Timer | None = None

    def watch(self, host: int, conn: Connection) -> None:
        self.watched[host] = _Watched(conn, -1, 0)
        if self._next is not None:  # the time between questions may have been configured anew
            self._next.cancel()
        self._tick()

    def _tick(self) -> None:
        limit = float(store.effective("get_proc_state_max_idle"))
        for host, (conn, heard, unanswered) in list(self.watched.items()):
            if conn.closed:
                del self.watched[host]
                continue
            unanswered = unanswered + 1 if conn.heard == heard else 0
            if unanswered >= QUESTIONS:
                del self.watched[host]
                conn.close(f"timeout waiting for a sign of life for {limit:g} s (get_proc_state_max_idle)")
                continue
            self.watched[host] = _Watched(conn, conn.heard, unanswered)
            self.node.tell(host, "pulse")
        self._next = None
        if self.watched and not self.node.closing:
            self._next = self.node.poller.call_later(max(limit, 0.05) / QUESTIONS, self._tick)
