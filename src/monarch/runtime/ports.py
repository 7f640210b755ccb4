"""Ports and receivers: where values may be sent, and where they are taken out, in order."""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from monarch.runtime import cell
from monarch.runtime.cell import SURELY_FITS, check_size, here
from monarch.runtime.errors import LinkError, SupervisionError
from monarch.runtime.failure import Exit
from monarch.runtime.future import Future
from monarch.runtime.node import Host, Node, NodeDown
from monarch.runtime.node import Port as Sink
from monarch.wire import pickling
from monarch.wire.frames import DEAD, ERROR, RANKED, REPLY, URGENT, Frame

R = TypeVar("R")
log = logging.getLogger("monarch.actor")
_keys = itertools.count(1)


def decode(frame: Frame, endpoint: str | None = None) -> Any:
    """The value of a reply; raises what it carries."""
    flags, parts = frame.flags, frame.parts
    if flags & DEAD:
        raise SupervisionError(bytes(parts[1]).decode(), endpoint)
    value = pickling.loads(parts[1], parts[2:])
    if flags & ERROR:
        if not isinstance(value, BaseException):
            raise TypeError(f"exceptions must derive from BaseException, got {value!r} through Port.exception")
        raise value
    return value


class Port(Generic[R]):
    """Where values of type R may be sent, from any thread of any process it travels to.

    `send` pickles at once (and raises what pickling raises), never waits, and keeps the sender's order. Sending to a
    receiver that is gone is silent. `return_undeliverable`: False drops undeliverable messages without a trace.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("ports are made by Channel.open()")

    _node: int
    _host: Host
    _id: int
    _once: bool
    _used: bool
    _rank: int | None
    _bounces = True
    return_undeliverable: bool

    @classmethod
    def _make(cls, node: int, host: Host, ident: int, once: bool = False, rank: int | None = None) -> Any:
        self = cls.__new__(cls)
        self._node, self._host, self._id, self._once, self._rank = node, host, ident, once, rank
        self._used = False
        self.return_undeliverable = True
        return self

    def send(self, obj: R) -> None:
        """Sends one value. RuntimeError when a once-port was already used."""
        self._put(obj, 0)

    def exception(self, exc: BaseException) -> None:
        """Makes the matching `recv` (or the caller, for a response port) raise `exc` itself."""
        if not isinstance(exc, BaseException):
            raise TypeError(f"exceptions must derive from BaseException, not {type(exc).__name__}")
        self._put(exc, ERROR)

    def _put(self, obj: Any, flags: int) -> None:
        if self._once:
            if self._used:
                raise RuntimeError("this port takes one value and was already used")
            self._used = True
        payload = pickling.dumps(obj)
        from monarch.runtime.client import current_here, current_node

        node = current_node()
        if payload.nbytes > SURELY_FITS:
            check_size(payload, current_here().cell, None)
        if payload.passengers:
            link_ports(payload.passengers, [(self._node, 0)], lambda n: self._host)
        if self._rank is not None:
            flags |= RANKED
        now = here.get()
        frame = Frame(
            REPLY, self._node, node.id, self._id, (b"", payload.stream(), *payload.buffers),
            flags=flags, rank=self._rank or 0, sender=0 if now is None else now.cell.id,
        )  # fmt: skip
        if self.return_undeliverable and self._bounces:
            frame.flags |= URGENT
        try:
            node.send(frame, self._host)
        except NodeDown as e:
            node.bounce(frame, e.exit)

    def __reduce__(self) -> Any:
        return _rebuild_port, (
            type(self), self._node, tuple(self._host), self._id, self._once, self._rank, self.return_undeliverable,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Port {self._id}>"


def _rebuild_port(
    cls: type[Port[Any]], node: int, host: tuple[Any, ...], ident: int, once: bool, rank: int | None, bounce: bool
) -> Port[Any]:
    port: Port[Any] = cls._make(node, Host(*host), ident, once, rank)
    port.return_undeliverable = bounce
    return port


class ResponsePort(Port[R]):
    """The response port of one call: takes the first answer for its rank, drops further ones with a warning."""

    _bounces = False  # a caller that died needs no answer
    _kept: dict[int, Frame] | None = None  #: the actor's unanswered calls, while the port is with that actor
    _key = 0

    @classmethod
    def _for_call(cls, kept: dict[int, Frame], frame: Frame) -> Any:
        """The port for `frame`, noted in `kept` until it is used: those callers are told when the actor ends."""
        from monarch.runtime.cell import view_of

        host = Host(*view_of(frame.parts[0]).caller)
        port: ResponsePort[Any] = cls._make(frame.origin, host, frame.reply, False, frame.rank)
        if frame.reply:
            port._kept, port._key = kept, next(_keys)
            kept[port._key] = Frame(frame.kind, frame.dest, frame.origin, reply=frame.reply, rank=frame.rank)
        return port

    def _put(self, obj: Any, flags: int) -> None:
        if not self._id:  # a broadcast: nobody waits
            if flags & ERROR:
                raise obj
            return
        if self._used:
            log.warning("a response port was used twice; the second answer is dropped")
            return
        super()._put(obj, flags)
        self._used = True
        if self._kept is not None:
            self._kept.pop(self._key, None)

    def __reduce__(self) -> Any:
        if self._kept is not None:  # somebody else may answer: not noted any longer than this port lives here
            weakref.finalize(self, self._kept.pop, self._key, None).atexit = False
        return super().__reduce__()


class Receiver(Sink, Generic[R]):
    """The queue behind a port. A receive claims the next message when it is first observed."""

    def __init__(self, node: Node, once: bool, ranked: bool = False) -> None:
        #: (node, actor) that the port was sent to -> why it is gone, or ""
        self._links: dict[tuple[int, int], str] = {}
        self._node_ref = node
        node.control.setdefault("link_port", lambda frame, *args: _link(node, *args))  # it was passed on elsewhere
        self._once = once
        self._ranked = ranked
        self._lock = threading.Lock()
        self._frames: collections.deque[Frame] = collections.deque()
        self._claims: collections.deque[Any] = collections.deque()
        self._taken = False
        self.ident = 0

    def deliver(self, frame: Frame) -> None:
        while True:
            with self._lock:
                if not self._claims:
                    self._frames.append(frame)
                    return
                claim = self._claims.popleft()
            future = claim() if isinstance(claim, weakref.ref) else claim
            if future is not None and self._give(future, frame):
                return

    def _give(self, future: Future[R], frame: Frame) -> bool:
        ranked = self._ranked
        return future._settle_lazily(lambda: _with_rank(frame) if ranked else decode(frame))

    def recv(self) -> Future[R]:
        """A future of the next message. ValueError on the second receive from a once-channel."""
        if self._once:
            if self._taken:
                raise ValueError("this receiver takes one message and was already used")
            self._taken = True
        future: Future[R]

        def claim() -> None:
            with self._lock:
                frame = self._frames.popleft() if self._frames else None
                gone = "" if frame is not None else self._why_nobody_sends()
                if frame is None and not gone:
                    self._claims.append(future)
                    return
            if frame is not None:
                self._give(future, frame)
            else:
                future._settle(error=LinkError(gone))

        future = Future._make(claim)
        future._on_timeout = self._downgrade
        return future

    def _downgrade(self, future: Future[R]) -> None:
        """Nobody waits for this claim any more: it holds only as long as somebody keeps its future."""
        with self._lock:
            if future in self._claims:
                self._claims[self._claims.index(future)] = weakref.ref(future)

    # -- liveness: the actors that the port was sent to

    def link(self, node: int, actor: int) -> bool:
        """The port travels to an actor (0: to some code of that process). True when it is a new one."""
        with self._lock:
            known = (node, actor) in self._links
            self._links[node, actor] = ""
        return not known

    def actor_gone(self, node: int, actor: int, report: str) -> None:
        if (node, actor) in self._links:
            self._unlink({(node, actor): report})

    def node_down(self, node: int, exit: Exit) -> None:
        self._unlink({link: exit.describe() for link in list(self._links) if link[0] == node})

    def node_down_all(self, reason: str) -> None:
        with self._lock:
            claims, self._claims = self._claims, collections.deque()
        _fail(claims, f"nothing will arrive at this receiver: {reason}")

    def _unlink(self, why: dict[tuple[int, int], str]) -> None:
        with self._lock:
            for link, report in why.items():
                self._links[link] = self._links[link] or report or "it ended"
            gone = self._why_nobody_sends() if why else ""
            if not gone:
                return
            claims, self._claims = self._claims, collections.deque()
        _fail(claims, gone)

    def _why_nobody_sends(self) -> str:
        """Why nothing can arrive any more; "" as long as something can. Under the lock."""
        if not self._links or not all(self._links.values()):
            return ""
        reasons = list(dict.fromkeys(self._links.values()))
        text = f"nothing will arrive at this receiver: all {len(self._links)} actors that its port was sent to are gone"
        return "\n".join([text, *reasons[:3]])

    def close(self) -> None:
        self._node_ref.close_port(self.ident)


def _fail(claims: collections.deque[Any], why: str) -> None:
    for claim in claims:
        future = claim() if isinstance(claim, weakref.ref) else claim
        if future is not None:
            future._settle(error=LinkError(why))


def link_ports(ports: Sequence[Any], actors: Sequence[tuple[int, int]], host_of: Callable[[int], Host] | None) -> None:
    """Ports are about to travel to `actors` [(node, actor id)]: their receivers fail when all of those are gone."""
    from monarch.runtime.client import current_host, current_node

    node = current_node()
    for port in ports:
        for target, actor in actors:
            host = tuple(host_of(target)) if host_of is not None else ()
            if port._node == node.id:
                _link(node, port._id, target, actor, host)
            else:
                where = host or tuple(current_host())
                node.tell(port._node, "link_port", port._id, target, actor, where, host=port._host)


def _link(node: Node, ident: int, target: int, actor: int, host: tuple[Any, ...]) -> None:
    receiver = node.ports.get(ident)
    if not isinstance(receiver, Receiver) or not receiver.link(target, actor):
        return
    where = Host(*host) if host else None
    exit = node.exit_of(target, where)
    if exit is not None:
        receiver.node_down(target, exit)
        return
    if actor:
        node.tell(target, "watch_actor", actor, host=where)
    watched = node.agent is not None and target in node.agent.processes
    if target != node.id and not watched:
        node.tell(node.agent_id, "watch", target, host or (node.agent_id, ""))


def _reduce_port(pickler: Any, port: Port[Any]) -> Any:
    pickler.passengers.append(port)
    return port.__reduce__()


pickling.reducers[Port] = _reduce_port
cell.link_ports = link_ports


def _with_rank(frame: Frame) -> Any:
    value = decode(frame)
    if not frame.flags & RANKED:
        raise ValueError("a message without a rank arrived at a ranked receiver")
    return frame.rank, value


class PortReceiver(Generic[R]):
    """Where a channel's values come out. Belongs to the process that opened it; cannot be sent."""

    def __init__(self, receiver: Receiver[R]) -> None:
        self._receiver = receiver
        weakref.finalize(self, receiver.close).atexit = False

    def recv(self) -> Future[R]:
        """The next message: `get()` or `await` it. See `Receiver` for when a message is claimed."""
        return self._receiver.recv()

    def ranked(self) -> RankedPortReceiver[R]:
        """The same receiver, giving `(rank, value)`."""
        self._receiver._ranked = True
        return RankedPortReceiver(self._receiver)

    def __reduce__(self) -> Any:
        raise TypeError(f"cannot pickle a {type(self).__name__}: send its Port instead")


class RankedPortReceiver(PortReceiver[R]):
    """A receiver whose `recv` gives `(rank, value)`; for replies routed with `send(..., port)`."""
