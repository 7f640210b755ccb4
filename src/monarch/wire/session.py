"""What outlives a socket: the frames that the other end has not confirmed, and how many came from there.

Frames between two hosts are counted at both ends. What was sent is kept until the other end says how many it got;
when the socket is lost, the end that dialled dials again, both say how many frames they got, and the rest is sent
again: nothing is lost, repeated or reordered. After `give_up` seconds the other end counts as lost; sooner when
somebody answers at its address that nobody is there (`refused`).
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from monarch.wire import addresses
from monarch.wire.frames import Bytes

if TYPE_CHECKING:
    from monarch.wire.connection import Connection

#: received bytes after which the sender is told, so that it can let go of them
_TELL_BYTES = 1 << 20
_ATTEMPT = 3.0  #: seconds for one attempt to connect again
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 0.5


class Terms(NamedTuple):
    """From the configuration: when to confirm, how much to keep, how long to try."""

    every: int  #: frames
    after: float  #: seconds
    limit: int  #: bytes kept before senders wait
    give_up: float  #: seconds
    refused: float  #: seconds


class Session:
    """One end's state. Senders use it under their connection's lock; the rest runs on the runtime thread."""

    def __init__(self, terms: Terms, ident: bytes = b"", dial: Callable[[Revival], Connection] | None = None) -> None:
        self.terms = terms
        self.ident = ident or os.urandom(16)
        self.dial = dial  #: makes a connection to the same place; None at the end that was dialled
        self.peer_address = ""  #: where the other end listens, if it does
        self.kept: collections.deque[tuple[Bytes, ...]] = collections.deque()
        self.kept_bytes = 0
        self.confirmed = 0  #: frames that the other end said it got
        self.received = 0
        self.told = 0
        self.untold_bytes = 0
        self.telling = False  #: a timer will confirm
        self.lost_at = 0.0
        self.resumed = 0  #: how often

    def keep(self, head: bytes, parts: Sequence[Bytes]) -> tuple[Bytes, ...]:
        """Keeps a frame; its parts as memory that does not change."""
        fixed = tuple(p if type(p) is bytes else bytes(p) for p in parts)
        self.kept.append((head, *fixed))
        self.kept_bytes += len(head) + sum(map(len, fixed))
        return fixed

    def confirm(self, count: int) -> bool:
        """The other end got `count` frames. False when that cannot be."""
        if not self.confirmed <= count <= self.confirmed + len(self.kept):
            return False
        for _ in range(count - self.confirmed):
            self.kept_bytes -= sum(map(len, self.kept.popleft()))
        self.confirmed = count
        return True

    def got(self, nbytes: int) -> bool:
        """One more frame came; True when the sender should be told now."""
        self.received += 1
        self.untold_bytes += nbytes
        return self.untold_bytes >= _TELL_BYTES or self.received - self.told >= self.terms.every

    def tell(self) -> int:
        self.told, self.untold_bytes = self.received, 0
        return self.received

    @property
    def is_full(self) -> bool:
        return self.kept_bytes > self.terms.limit


class Revival:
    """The attempts of one end to get a lost connection back, until it is, or is given up."""

    def __init__(self, conn: Connection, session: Session, reason: str) -> None:
        self.conn, self.session, self.reason = conn, session, reason
        self.turn = session.resumed
        self.began = session.lost_at = time.monotonic()
        self.refused_since = 0.0
        self.pause = _FIRST_PAUSE
        conn._poller.call_later(session.terms.give_up, self._give_up)
        if session.dial is not None:
            self._attempt()
        elif session.peer_address:
            threading.Thread(target=self._probe, name="monarch-probe", daemon=True).start()

    def _over(self) -> bool:
        return self.conn.closed or self.session.resumed != self.turn

    def _give_up(self) -> None:
        if not self._over():
            limit = self.session.terms.give_up
            self.conn.close(f"{self.reason}; not reached again for {limit:g} s (channel_reconnect_timeout)")

    # -- the end that dialled

    def _attempt(self) -> None:
        if self._over():
            return
        assert self.session.dial is not None
        try:
            made = self.session.dial(self)
        except OSError as e:
            self._failed(f"{e.strerror}", False)
            return
        self.conn._poller.call_later(_ATTEMPT, lambda: made.close("no answer") if made.is_attempt else None)

    def ended(self, attempt: Connection, reason: str) -> None:
        """An attempt's socket closed before the connection was taken up again."""
        self._failed(reason, attempt.was_refused)

    def _failed(self, reason: str, refused: bool) -> None:
        if not self._over() and not self._refused(refused, reason):
            self.conn._poller.call_later(self.pause, self._attempt)
            self.pause = min(_LAST_PAUSE, self.pause * 2)

    def _refused(self, refused: bool, reason: str) -> bool:
        now = time.monotonic()
        if not refused:
            self.refused_since = 0.0
        elif not self.refused_since:
            self.refused_since = now
        elif now - self.refused_since > self.session.terms.refused:
            self.conn.close(f"{self.reason}; {reason}")
            return True
        return False

    # -- the end that was dialled

    def _probe(self) -> None:
        """Asks the kernel over there whether anybody still listens; in a thread of its own."""
        where = addresses.parse(self.session.peer_address)
        while not self._over():
            refused = False
            try:
                addresses.dial(where, 1.0).close()
            except ConnectionRefusedError:
                refused = True
            except OSError:
                pass
            if not self._over() and self._refused(refused, "nobody listens at its address any more"):
                return
            time.sleep(0.25)
