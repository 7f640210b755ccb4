"""A cell: one actor in one process. A mailbox, the thread that runs it, and its place in the ownership tree.

    states      starting -> running -> stopping -> stopped
                                  \\-> failed
    a message   deliver() on the runtime thread -> queue -> the actor's thread: unpickle, run, reply
    a failure   fail(): reply to everyone waiting, stop what it owns, __cleanup__(exc), tell the owner

Sync actors own one thread for life; async actors own one thread with one asyncio loop. Both take one message at a
time. Supervision events go before queued messages.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from monarch.config import store
from monarch.runtime.errors import ActorError, RemoteException, SupervisionError
from monarch.runtime.failure import MeshFailure, UndeliverableMessageEnvelope, death_report
from monarch.runtime.future import Future
from monarch.runtime.ownership import Ask, Mesh, Owner, Stop
from monarch.wire import pickling
from monarch.wire.frames import ERROR, Frame

if TYPE_CHECKING:
    from monarch.runtime.node import Host, Node

log = logging.getLogger("monarch.runtime")


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

#: set by the actor layer: wraps an endpoint in a trace span named after it
instrument: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
#: set by the actor layer: gets source lines from the client, for tracebacks through code that is not on this machine
fetch_sources: Callable[[BaseException], None] | None = None


#: set by ports.py: notes that ports travel to actors [(node, actor)], for their receivers' sake
link_ports: Callable[[Sequence[Any], Sequence[tuple[int, int]], Any], None] = lambda ports, actors, host_of: None


class Spec(NamedTuple):
    """What a process needs to know to create an actor, besides class and arguments."""

    name: str  #: as given to spawn
    full_name: str  #: unique, `<label>-<suffix>`
    class_name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    owner_node: int
    owner_host: tuple[Any, ...]  #: a Host
    owner_actor: int
    parent: str  #: display of the spawning actor
    creator: Any  #: CreatorInstance of the spawning actor
    is_async: bool
    mesh: Any  #: the proc mesh it was spawned on (a reference)


class View(NamedTuple):
    """The handle a message was sent through: method, and the shape its rank is relative to."""

    method: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    as_endpoint: int  #: 0 an endpoint; 1 a plain method called as one; 2 with an explicit port
    caller: tuple[Any, ...]  #: the Host of the calling process, for response ports that travel on


_views: dict[bytes, View] = {}


def view_of(meta: Any) -> View:
    meta = bytes(meta)
    view = _views.get(meta)
    if view is None:
        if len(_views) > 10_000:
            _views.clear()
        view = _views[meta] = View(*pickling.loads(meta))
    return view


class Here(NamedTuple):
    """Where code runs now: the cell, and the shape and rank of the message being handled."""

    cell: Cell
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int


here: contextvars.ContextVar[Here | None] = contextvars.ContextVar("monarch_here", default=None)


class Owned(NamedTuple):
    """What the runtime keeps with a mesh of the ownership tree: how people know it, and how to stop it."""

    name: str
    display: Callable[[int], str]  #: rank in the whole mesh -> how errors name it
    stop: Callable[[str], Future[Any]]
    mesh: Any  #: the handle


def describe(name: str, labels: tuple[str, ...], sizes: tuple[int, ...], rank: int) -> str:
    """The `{'gpus': 0/4}` part of a display; empty for zero dims."""
    parts = []
    for label, size in zip(reversed(labels), reversed(sizes), strict=True):
        parts.append(f"'{label}': {rank % size}/{size}")
        rank //= size
    return "{" + ", ".join(reversed(parts)) + "}" if parts else ""


class Cell:
    """Base of both kinds of actors; also the client's root (class Root in client.py)."""

    def __init__(self, node: Node, ident: int, rank: int, spec: Spec) -> None:
        self.node = node
        self.id = ident
        self.rank = rank
        self.spec = spec
        self.state = "starting"
        self.report = ""
        self.instance: Any = None  #: the actor layer's Instance, made on demand
        self.obj: Any = None
        self.stopped: Future[None] = Future._make()
        self.kept: dict[int, Frame] = {}  #: calls taken, whose response ports were not used yet
        self.running = ""  #: the endpoint being run, for people
        self._lock = threading.Lock()
        self._table: dict[str, Any] = {}
        self._to_stop: list[Mesh] = []  #: what it owned when it ended
        node.tree.add(ident, self.owner())
        where = describe(spec.name, spec.labels, spec.sizes, rank)
        self.display = f"{spec.parent}.<{spec.class_name} {spec.name}{where}>"

    # -- what subclasses say

    def deliver(self, frame: Frame) -> None:
        raise NotImplementedError

    def post_event(self, event: Event) -> None:
        """A failure of an owned mesh, or a message that bounced, to be handled before queued messages."""
        raise NotImplementedError

    def request_stop(self, reason: str, drain: bool = True) -> Future[None]:
        """Stops after queued messages (at once when not `drain`); the future settles when cleanup is done."""
        raise NotImplementedError

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls back when what is queued now was handled, or when the actor has ended."""
        callback()

    # -- shared by both kinds

    def owner(self) -> Owner | None:
        """Who owns this actor; None for a root."""
        return Owner(self.spec.owner_node, self.spec.owner_actor)

    def set_here(self, view: View | None, rank: int) -> None:
        if view is None:
            here.set(Here(self, self.spec.labels, self.spec.sizes, self.rank))
        else:
            here.set(Here(self, view.labels, view.sizes, rank))

    def lookup(self, view: View) -> tuple[Callable[..., Any], bool, bool, bool]:
        """(function, explicit port, concurrent, async def) for a method of this actor."""
        found = self._table.get(view.method)
        if found is None or view.as_endpoint:
            attr = inspect.getattr_static(type(self.obj), view.method, None)
            method = getattr(attr, "_method", None)
            if method is not None and not view.as_endpoint:
                concurrent = bool(getattr(attr, "_concurrent", False))
                explicit = bool(attr._explicit_response_port) and not getattr(attr, "_returning", False)
                bound = method.__get__(self.obj)
                if attr._instrument and instrument is not None:
                    bound = instrument(bound)
                found = (bound, explicit, concurrent, inspect.iscoroutinefunction(bound))
            elif view.as_endpoint:
                plain = getattr(self.obj, view.method)
                found = (plain, view.as_endpoint == 2, False, inspect.iscoroutinefunction(plain))
            else:
                raise AttributeError(f"{type(self.obj).__name__} has no endpoint {view.method!r}")
            if not view.as_endpoint:
                self._table[view.method] = found
        return found

    def arguments(self, frame: Frame) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parts = frame.parts
        args, kwargs = pickling.loads(parts[1], parts[2:])
        return args, kwargs

    def answer(self, frame: Frame, value: Any) -> None:
        """Replies with a value; a value that refuses pickling becomes an error for the caller."""
        if not frame.reply:
            return
        payload = pickling.dumps(value)
        if payload.nbytes > SURELY_FITS:
            check_size(payload, self, None)
        if payload.passengers:
            link_ports(payload.passengers, [(frame.origin, frame.sender or 1)], None)
        self.node.reply(frame, 0, (b"", payload.stream(), *payload.buffers))

    def answer_error(self, frame: Frame, error: BaseException, message: str) -> None:
        self.node.reply(frame, ERROR, (b"", dump_error(error, message, f"{self.display}, {self.node.who()}")))

    def call_name(self, view: View) -> str:
        return f"{self.spec.name}.{view.method}"

    def died(self, reason: str, *, failed: bool) -> list[Frame]:
        """Leaves the running state: later messages are answered by the node. Returns nothing twice."""
        with self._lock:
            if self.state in ("failed", "stopped"):
                return []
            self.state = "failed" if failed else "stopped"
            self.report = death_report(self.display, reason, self.node.who()) if failed else (
                f"{self.display} has status: stopped: {reason}"
            )  # fmt: skip
            self.node.dead_cells[self.id] = self.report
            self.node.cells.pop(self.id, None)
            self.node.ending[self.id] = self
            self._leave_tree(failed)
        kept, self.kept = list(self.kept.values()), {}
        return self.pending() + kept

    def pending(self) -> list[Frame]:
        raise NotImplementedError

    def handles_a_message(self) -> bool:
        """The calling code is a plain endpoint of this actor, which takes no other message before it returns."""
        return False

    def refuse_to_wait_for_itself(self, made: Here) -> None:
        """RuntimeError when waiting for a call that this actor made to itself, from `made`, could never end."""
        if here.get() is made and self.handles_a_message():
            raise RuntimeError(
                f"{self.spec.name} would wait for ever: it waits for its own answer, and takes no message before "
                "this endpoint returns. Call a plain helper method instead, or await from a @concurrent_endpoint."
            )

    def tell_owner(self, cause: str, chain: str = "", again: bool = False) -> None:
        """Reports this actor's failure. `again`: one that counts though the actor's end is known (its cleanup's)."""
        spec = self.spec
        failure = MeshFailure(spec.full_name, [self.rank], self.display, cause, chain=chain, where=self.node.who())
        from monarch.runtime.node import Host

        key = self.reported_mesh()
        frame = self.node.control_frame(spec.owner_node, "failure", failure, key, again, key=spec.owner_actor)
        try:
            self.node.send(frame, Host(*spec.owner_host))
        except Exception:  # the owner is gone too; its own owner hears of that
            log.debug("owner of %s is gone", self.display)

    def reported_mesh(self) -> int:
        """The key, in the owner's tree, of the mesh whose failure this actor's failure is."""
        return self.id

    # -- what it owns

    def own(
        self, key: int, ranks: dict[int, int], host_of: Callable[[int], Host], is_procs: bool, owned: Owned
    ) -> None:
        """From now on the mesh `key` is this actor's. RuntimeError when it is ending."""
        hosts: dict[int, set[int]] = {}
        for node in ranks:
            agent = host_of(node).agent
            if agent != self.node.agent_id:
                hosts.setdefault(agent, set()).add(node)
        with self.node.tree.lock:
            self.node.tree.own(self.id, key, ranks, is_procs, owned, hosts)

    def stop_mesh(self, key: int, stop: Callable[[], Future[None]]) -> Future[None]:
        """The owner's wish: `stop` must be idempotent."""
        tree = self.node.tree
        with tree.lock:
            tree.stop(self.id, key)
        done = stop()

        def gone() -> None:
            with tree.lock:
                tree.stopped(self.id, key)

        done._on_ready(gone)
        return done

    def _leave_tree(self, failed: bool) -> None:
        tree = self.node.tree
        with tree.lock:
            self._to_stop = [e.mesh for e in tree.end(self.id, failed) if isinstance(e, Stop)]

    def stop_owned(self, reason: str, seconds: float) -> None:
        """Stops what this actor owned when it ended, actors before processes, newest first, and waits.

        On the actor's own thread.
        """
        meshes, self._to_stop = self._to_stop, []
        if meshes:
            from monarch.runtime.future import wait_all

            wait_all([mesh.handle.stop(reason) for mesh in meshes], seconds)

    def child_failed(self, failure: MeshFailure, key: int, again: bool) -> None:
        """A rank of a mesh that this actor owns reported its failure."""
        tree = self.node.tree
        with tree.lock:
            asks = [a for rank in failure.crashed_ranks for a in tree.failed(self.id, key, rank)]
            if not asks and not (again and tree.is_running(self.id)):
                return
        if asks and isinstance(asks[0], Ask):
            failure.mesh = asks[0].mesh.handle.mesh
        self.post_event(failure)


#: payloads up to this size are never compared with the limit: no limit is that low
SURELY_FITS = 4096


def check_size(payload: pickling.Payload, sender: Cell, endpoint: str | None) -> None:
    """SupervisionError for a message over `codec_max_frame_length`: nothing was sent, nobody fails."""
    size, limit = payload.nbytes + 64, int(store.effective("codec_max_frame_length"))
    if size > limit:
        who = f"{sender.display} (RootClientActor)" if sender.display == "<root>" else sender.display
        raise SupervisionError(
            f"undeliverable message from {who}: rejecting oversize frame: len={size} > max={limit}. "
            f"Send less at a time, or raise the limit: configure(codec_max_frame_length=...) before spawn_procs, or "
            f"HYPERACTOR_CODEC_MAX_FRAME_LENGTH in the environment",
            endpoint,
        )


def dump_error(error: BaseException, message: str, where: str = "") -> bytes:
    """An ActorError, pickled. An exception that does not survive pickling is replaced by a stand-in.

    `where` (actor, process, host) goes into the head of the last traceback.
    """
    error.__traceback__ = without_our_frames(error.__traceback__)
    if fetch_sources is not None:
        fetch_sources(error)
    wrapped = ActorError(error, message)
    if where:
        before, head, after = wrapped.exception_formatted.rpartition(ActorError.HEAD)
        if head:
            wrapped.exception_formatted = f"{before}{head}, in {where}{after}"
    try:
        data = pickling.dump_bytes(wrapped)
        if type(error).__module__ != "builtins":
            pickling.loads(data)
        return data
    except Exception:
        stand_in = RemoteException(f"{type(error).__module__}.{type(error).__qualname__}", _safe_text(error))
        replaced = ActorError(stand_in, message)
        replaced.exception_formatted = wrapped.exception_formatted
        return pickling.dump_bytes(replaced)


def without_our_frames(trace: Any) -> Any:
    """A traceback from where the user's code begins; whole when it never leaves the framework."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_OURS):
        at = at.tb_next
    return trace if at is None else at


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<no text>"


def format_failure(error: BaseException) -> str:
    """The reason text for an actor that an exception ended."""
    error.__traceback__ = without_our_frames(error.__traceback__)
    if fetch_sources is not None:
        fetch_sources(error)
    return "".join(traceback.format_exception(error)).rstrip()


Event = Union[MeshFailure, UndeliverableMessageEnvelope]


def hook_for(event: Event) -> str:
    """The method of the user's class that is asked about an event."""
    return "__supervise__" if isinstance(event, MeshFailure) else "_handle_undeliverable_message"


def supervise(cell: Cell, event: Event, outcome: Any, raised: BaseException | None) -> str | None:
    """The reason `cell` fails, given what its handler returned or raised; None when it handled the event."""
    if raised is None and outcome:
        return None
    report = event.report()
    if isinstance(event, UndeliverableMessageEnvelope) and raised is None:
        return report
    if raised is not None:
        return f"{format_failure(raised)}\nThis error occurred while handling another failure:\n{report}"
    return f"it failed because it did not handle a supervision event from its child:\n{report}"


def overrides(obj: Any, hook: str) -> Any:
    """The user's version of a hook, or None when only the base class's documentation stub is there."""
    method = getattr(obj, hook, None)
    return None if method is None or getattr(method, "_is_stub", False) else method


def cleanup_limit() -> float:
    return float(store.effective("cleanup_timeout"))


def stop_limit() -> float:
    return float(store.effective("stop_actor_timeout"))


__all__ = ["Cell", "Here", "Host", "Owned", "Spec", "SupervisionError", "View", "here", "view_of"]
