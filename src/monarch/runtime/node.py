"""The node: one process's place in the network. It sends frames, receives them, and knows who is down.

Routing. Processes of one host talk directly, over sockets whose addresses the host's agent hands out. Everything
else goes through the agents of the two hosts. A frame carries its final destination, so an agent forwards it
without looking inside. Because all frames between two nodes take one path, they stay in order.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.config import store
from monarch.runtime.failure import Exit, UndeliverableMessageEnvelope
from monarch.runtime.ownership import Tree
from monarch.wire import addresses, pickling, trust
from monarch.wire.connection import Connection, ConnectionClosed, Limits, release_frame
from monarch.wire.door import Door
from monarch.wire.frames import CALL, CAST, CONTROL, DEAD, ERROR, RANKED, RELEASE, REPLY, SHM, URGENT, Bytes, Frame
from monarch.wire.poller import READ, Poller
from monarch.wire.segments import AVAILABLE, MappedSegments, SegmentPool
from monarch.wire.session import Revival, Session, Terms

if TYPE_CHECKING:
    from monarch.runtime.agent import HostAgent
    from monarch.runtime.cell import Cell

log = logging.getLogger("monarch.runtime")

#: control messages whose handlers are loaded by the first of them: a module with `install(node)`
ON_DEMAND = dict.fromkeys(("rdma_table", "rdma_dial", "rdma_get", "rdma_put"), "monarch.rdma._serve")

RANK_BITS = 24
RANK_MASK = (1 << RANK_BITS) - 1


class Host(NamedTuple):
    """How to reach a host: its agent's node id and address ("" for an agent reachable only over its uplink)."""

    agent: int
    address: str


def new_mesh_id() -> int:
    """A random id for a proc mesh; its processes are `id | rank`."""
    return (random.SystemRandom().getrandbits(39) | 1) << RANK_BITS


def new_id() -> int:
    """A random id for an actor mesh."""
    return random.SystemRandom().getrandbits(62) | (1 << 62)


class NodeDown(Exception):
    """The destination's process is gone; `exit` says how."""

    def __init__(self, exit: Exit) -> None:
        super().__init__(exit.describe())
        self.exit = exit


class Port:
    """What waits for frames addressed to a port of this node: a call's result, a channel's receiver."""

    def deliver(self, frame: Frame) -> None:
        """A frame arrived. On the runtime thread: no user code, no blocking."""
        raise NotImplementedError

    def node_down(self, node: int, exit: Exit) -> None:
        """A process died; ports that wait for it fail."""

    def node_down_all(self, reason: str) -> None:
        """This node itself is ending."""

    def actor_gone(self, node: int, actor: int, report: str) -> None:
        """An actor ended that this node asked about (`watch_actor`)."""


class Node:
    """See the module's text. One per process, made by `client.start` or in a child by `child.main`."""

    def __init__(self, ident: int, agent: int, *, secret: bytes | None = None) -> None:
        self.id = ident
        self.agent_id = agent
        self.secret = secret
        self.trust: trust.Trust | None = None  #: how other hosts and this one prove themselves
        self.sessions: dict[bytes, Connection] = {}  #: of hosts and clients that dialled
        self.trusts: dict[str, trust.Trust] = {}  #: address of a host attached -> the same
        self.poller = Poller(float(store.effective("busy_wait")))
        self.pool: SegmentPool | None = SegmentPool(int(store.effective("shm_pool_limit"))) if AVAILABLE else None
        self.mapped = MappedSegments()
        self.limits = Limits(
            int(store.effective("codec_max_frame_length")),
            int(store.effective("send_queue_limit")),
            silence=float(store.effective("mesh_orphan_timeout") or 0.0),
        )
        self.shm_threshold = int(store.effective("shm_threshold"))
        self.routes: dict[int, Connection] = {}
        self.down: dict[int, Exit] = {}
        self.cells: dict[int, Cell] = {}
        self.dead_cells: dict[int, str] = {}
        self.ending: dict[int, Cell] = {}  #: no longer answering, still cleaning up
        self.ports: dict[int, Port] = {}
        self.tree = Tree()  #: who owns what, as far as it concerns this process
        self.uplink: Connection | None = None
        self.agent: HostAgent | None = None
        self.listening: socket.socket | None = None
        self.address = ""
        self.name = "client"
        self.closing = False
        self.broken: bytes | None = None  #: pickled ActorError when the bootstrap callable failed
        self.gate: list[tuple[Connection | None, Frame]] | None = None  #: frames held until bootstrap is done
        self.control: dict[str, Callable[..., None]] = {
            "down": self._told_down,
            "address": self._told_address,
            "watch_actor": self._watch_actor,
            "actor_gone": self._actor_gone,
        }
        self.actor_watchers: dict[int, set[int]] = {}  #: actor here -> nodes that want to hear of its end
        self.on_node_down: list[Callable[[int, Exit], None]] = []
        self.on_uplink_lost: Callable[[str], None] = lambda reason: None
        self.aliases: set[int] = set()  #: the names that attached clients gave to this host's agent
        self.dialling: dict[int, list[Frame]] = {}  #: hosts being attached, and what waits for them
        self._port_ids = itertools.count(1)
        self._waiting: dict[int, list[Frame]] = {}
        self.early: dict[int, list[Frame]] = {}
        self._early_lock = threading.Lock()
        self._route_lock = threading.Lock()

    def who(self) -> str:
        """This process, for people."""
        return f"process {self.name}, pid {os.getpid()}, on {socket.gethostname()}"

    # -- ports

    def open_port(self, port: Port) -> int:
        """Registers `port`; its id on this node."""
        ident = next(self._port_ids)
        self.ports[ident] = port
        return ident

    def close_port(self, ident: int) -> None:
        self.ports.pop(ident, None)

    # -- sending, from any thread

    def send(self, frame: Frame, host: Host | None = None) -> None:
        """Sends `frame` towards `frame.dest`, which lives on `host` (None: somewhere a route is known for).

        Raises NodeDown when the destination is known to be gone.
        """
        conn = self.routes.get(frame.dest)
        if conn is not None:
            try:
                conn.send(frame)
                return
            except ConnectionClosed:
                pass
        self._send_slowly(frame, host)

    def _send_slowly(self, frame: Frame, host: Host | None) -> None:
        dest = frame.dest
        if dest == self.id:
            frame.parts = [p if type(p) is bytes else memoryview(bytearray(p)) for p in frame.parts]
            self._dispatch(None, frame)
            return
        exit = self.exit_of(dest, host)
        if exit is not None:
            raise NodeDown(exit)
        with self._route_lock:
            conn = self.routes.get(dest)
            if conn is None or conn.closed:
                queue = self._waiting.get(dest)
                if queue is None:
                    queue = self.dialling.get(dest if host is None else host.agent)
                if queue is not None:
                    queue.append(self._snapshot(frame))
                    return
                conn = self._new_route(dest, host)
                if conn is None:
                    self._waiting[dest] = [self._snapshot(frame)]
            if conn is not None:
                with contextlib.suppress(ConnectionClosed):
                    conn.send(frame)

    def exit_of(self, dest: int, host: Host | None) -> Exit | None:
        """How `dest` ended, or its whole host; None when it is not known to be gone."""
        return self.down.get(dest) or (self.down.get(host.agent) if host is not None else None)

    @staticmethod
    def _snapshot(frame: Frame) -> Frame:
        frame.parts = [p if type(p) is bytes else bytes(p) for p in frame.parts]
        return frame

    def _new_route(self, dest: int, host: Host | None) -> Connection | None:
        """A connection towards `dest`; None when an address was asked for. Under the route lock."""
        on_this_host = host is None or host.agent == self.agent_id
        if self.agent is not None:
            if dest == self.id or on_this_host:
                if dest in self.agent.processes:  # it closed its socket; how it ended is about to be reported
                    return None
                self.poller.post(lambda: self.mark_down(dest, Exit("lost", detail="no such process on this host")))
                return None
            assert host is not None
            conn = self.routes.get(host.agent)
            if conn is None or conn.closed:
                conn = self.connect_host(host.address)  # who attached it first chose the name we know
                self.routes[host.agent] = conn
            self.routes[dest] = conn
            return conn
        assert self.uplink is not None
        if dest == self.agent_id or not on_this_host:
            if host is not None and not on_this_host:
                self.uplink.send(self.control_frame(self.agent_id, "hint", dest, host.agent, host.address))
            self.routes[dest] = self.uplink
            return self.uplink
        self.uplink.send(self.control_frame(self.agent_id, "resolve", dest))
        return None

    def control_frame(self, dest: int, op: str, *args: Any, key: int = 0, reply: int = 0, rank: int = 0) -> Frame:
        body = pickling.dump_bytes((op, *args))
        return Frame(CONTROL, dest, self.id, key, (b"", body), reply=reply, rank=rank)

    def tell(self, dest: int, op: str, *args: Any, host: Host | None = None, key: int = 0, reply: int = 0) -> bool:
        """Sends a control message; False when the destination is known to be gone."""
        try:
            self.send(self.control_frame(dest, op, *args, key=key, reply=reply), host)
            return True
        except NodeDown:
            return False

    def cast(
        self, frames: Sequence[tuple[int, int]], template: Frame, host_of: Callable[[int], Host]
    ) -> list[tuple[int, Exit]]:
        """Sends one payload to many: `frames` are (destination, rank). Returns who is known to be gone, and how.

        Parts are encoded once; on one host large parts lie in one segment; to another host goes one frame.
        """
        gone: list[tuple[int, Exit]] = []
        local: list[tuple[int, int]] = []
        remote: dict[Host, list[tuple[int, int]]] = {}
        mine = self.agent_id
        for dest, rank in frames:
            host = host_of(dest)
            if host.agent == mine or dest == self.id:
                local.append((dest, rank))
            else:
                remote.setdefault(host, []).append((dest, rank))
        for host, targets in remote.items():
            alive = []
            for target in targets:
                exit = self.exit_of(target[0], host)
                if exit is None:
                    alive.append(target)
                else:
                    gone.append((target[0], exit))
            if len(alive) == 1:
                self._send_copy(template, *alive[0], host, gone)
            elif alive:
                meta = pickling.dump_bytes((template.kind, alive))
                out = Frame(
                    CAST, host.agent, self.id, template.key, (meta, *template.parts),
                    flags=template.flags, reply=template.reply, sender=template.sender,
                )  # fmt: skip
                try:
                    self.send(out, host)
                except NodeDown as e:
                    gone += [(d, e.exit) for d, _ in alive]
        shared = template
        if len(local) > 1:
            dests = [d for d, _ in local if d != self.id and d in self.routes]
            conn = self.routes.get(dests[0]) if dests else None
            if conn is not None and len(dests) == len(local):
                lent = conn.lend(self._copy(template, 0, 0), dests)
                if lent is not None:
                    shared = lent
        for dest, rank in local:
            self._send_copy(shared, dest, rank, Host(mine, ""), gone)
        return gone

    def _send_copy(self, template: Frame, dest: int, rank: int, host: Host, gone: list[tuple[int, Exit]]) -> None:
        try:
            self.send(self._copy(template, dest, rank), host)
        except NodeDown as e:
            gone.append((dest, e.exit))

    def _copy(self, t: Frame, dest: int, rank: int) -> Frame:
        return Frame(t.kind, dest, self.id, t.key, t.parts, flags=t.flags, rank=rank, reply=t.reply, sender=t.sender)

    def reply(self, to: Frame, flags: int, parts: Sequence[Bytes]) -> None:
        """Answers a frame that has a reply port; silent when the caller is gone."""
        if not to.reply:
            return
        frame = Frame(REPLY, to.origin, self.id, to.reply, parts, flags=flags | RANKED, rank=to.rank)
        with contextlib.suppress(NodeDown):
            self.send(frame)

    def reply_dead(self, to: Frame, report: str) -> None:
        self.reply(to, DEAD, (b"", report.encode()))

    # -- connections

    def trust_for(self, address: str) -> trust.Trust:
        """How a host at `address` and this one prove themselves: as it was attached, else as this process was told."""
        found = self.trusts.get(address) or self.trust
        if found is None:
            found = self.trust = trust.of(trust.ANYBODY, None, addresses.parse(address).scheme)
        return found

    def dialled(self, alias: int, sock: socket.socket, address: str) -> None:
        """A host being attached answered: what waited for it goes out. The handshake may still refuse."""
        proofs = self._proofs(address, sock.getpeername()[0] if sock.family != socket.AF_UNIX else "")
        with self._route_lock:
            frames = self.dialling.pop(alias, [])
            conn = self._with_session(self._adopt(sock, peer=0, address=address, dialled=True, **proofs), proofs)
            self.routes[alias] = conn
            for frame in frames:
                self.routes[frame.dest] = conn
                with contextlib.suppress(ConnectionClosed):
                    conn.send(frame)
            if self.agent is not None:  # after the greeting, by which the host learns its name
                pulse = self.agent.pulse
                self.poller.post(lambda: pulse.watch(alias, conn))

    def dial_failed(self, alias: int, exit: Exit) -> None:
        with self._route_lock:
            frames = self.dialling.pop(alias, [])
        for dest in {alias, *(f.dest for f in frames)}:
            self.mark_down(dest, exit)

    def connect(self, address: str, peer: int, secret: bytes | None) -> Connection:
        """Starts connecting to the process `peer` of this host; frames may be sent at once."""
        where = addresses.parse(address)
        if where.scheme == "ipc":
            sock = addresses.dial(where, 5.0)
            return self._adopt(sock, peer=peer, dialled=True, secret=None)
        sock, _ = _start_connecting(where)
        return self._adopt(sock, peer=peer, address=address, dialled=True, secret=secret, connecting=True)

    def connect_host(self, address: str) -> Connection:
        """Starts connecting to another host's agent. Raises OSError, and Untrusted when nothing would protect it."""
        where = addresses.parse(address)
        if where.scheme == "ipc":
            return self._adopt(addresses.dial(where, 5.0), peer=0, dialled=True, secret=None)
        sock, numeric = _start_connecting(where)
        try:
            proofs = self._proofs(address, numeric)
        except BaseException:
            sock.close()
            raise
        made = self._adopt(sock, peer=0, address=address, dialled=True, connecting=True, **proofs)
        return self._with_session(made, proofs)

    def _terms(self) -> Terms:
        return Terms(
            max(1, int(store.effective("message_ack_every_n_messages"))),
            float(store.effective("message_ack_time_interval")),
            int(store.effective("send_queue_limit")),
            float(store.effective("channel_reconnect_timeout")),
            float(store.effective("channel_refused_timeout")),
        )

    def _with_session(self, conn: Connection, proofs: dict[str, Any]) -> Connection:
        """A connection that this end dialled survives the loss of its socket; not within one machine's unix sockets."""
        where = addresses.parse(conn.address) if conn.address else None
        if where is None or where.scheme == "ipc":
            return conn

        def again(revival: Revival) -> Connection:
            def ready(made: Connection) -> None:
                made.attempt(session)

            sock, _ = _start_connecting(where)
            return Connection(
                self.poller, sock, self.id, self.limits, self._on_frame, lambda c, r: None,
                peer=conn.peer, address=conn.address, dialled=True, connecting=True, on_ready=ready,
                reviving=revival, **proofs,
            )  # fmt: skip

        session = Session(self._terms(), dial=again)
        own = self.address if self.listening is not None and self.address.startswith("t") else ""
        conn.begin_session(session, "" if self.agent is None or self.agent.on_shutdown is None else own)
        return conn

    def _proofs(self, address: str, numeric: str) -> dict[str, Any]:
        if not numeric:
            return {"secret": None}
        found = self.trust_for(address)
        found.check(numeric, f"connecting to {address}")
        return {"secret": found.secret, "tls": found.context(False) if found.kind == "tls" else None}

    def adopt_uplink(self, sock: socket.socket) -> None:
        """The socket this process was born with: the other end is the host's agent."""
        self.uplink = self._adopt(sock, peer=self.agent_id, handshake=False)
        self.routes[self.agent_id] = self.uplink

    def adopt_child(self, sock: socket.socket, node: int) -> Connection:
        conn = self._adopt(sock, peer=node, handshake=False)
        self.routes[node] = conn
        return conn

    def _adopt(self, sock: socket.socket, **options: Any) -> Connection:
        return Connection(
            self.poller, sock, self.id, self.limits, self._on_frame, self._on_close,
            pool=self.pool, shm_threshold=self.shm_threshold, **options,
        )  # fmt: skip

    def listen(self, address: str, secret: bytes | None) -> str:
        """For processes of this host: accepts connections; the address to hand out. TCP peers must prove `secret`."""
        return self._listen(addresses.parse(address), {"secret": secret}, None)

    def listen_to_hosts(self, address: str, how: trust.Trust) -> str:
        """Accepts connections of other hosts that prove themselves as `how` says. Raises Untrusted, OSError."""
        self.trust = how
        tls = how.context(True) if how.kind == "tls" else None
        return self._listen(how.address(addresses.parse(address)), {"secret": how.secret, "tls": tls}, how)

    def _listen(self, wanted: addresses.Address, proofs: dict[str, Any], how: trust.Trust | None) -> str:
        sock, where = addresses.listen(wanted)
        if how is not None and sock.family != socket.AF_UNIX:
            try:
                how.check(sock.getsockname()[0], f"listening on {where}")
            except BaseException:
                sock.close()
                raise
        sock.setblocking(False)
        self.listening = sock
        self.address = str(where)

        def arrived(conn: socket.socket) -> Connection:
            if conn.family == socket.AF_UNIX:
                return self._adopt(conn, on_ready=self._accepted, secret=None)
            addresses.tune(conn)
            made = self._adopt(conn, on_ready=self._accepted, **proofs)
            if how is not None:
                made.sessions = self.sessions
                made.session_of = lambda ident: Session(self._terms(), ident)
            return made

        self.poller.watch(sock.fileno(), READ, Door(self.poller, sock, arrived).on_event)
        return self.address

    def stop_listening(self) -> None:
        if self.listening is not None:
            self.poller.unwatch(self.listening.fileno())
            self.listening.close()
            self.listening = None
            if self.address.startswith("ipc:///"):
                with contextlib.suppress(OSError):
                    os.unlink(self.address[6:])

    def _accepted(self, conn: Connection) -> None:
        self.down.pop(conn.peer, None)
        self.routes.setdefault(conn.peer, conn)

    # -- on the runtime thread

    def _on_frame(self, conn: Connection, frame: Frame) -> None:
        if frame.origin not in self.routes and frame.origin != self.id and not self._is_dead(frame.origin, conn):
            self.routes[frame.origin] = conn
            self.down.pop(frame.origin, None)
        if frame.dest != self.id and frame.dest not in self.aliases:
            attaching = frame.kind == CONTROL and frame.flags & URGENT and frame.dest not in self.routes
            if not attaching:
                self._forward(conn, frame)
                return
        if self.gate is not None and frame.kind in (CALL, CONTROL) and not frame.flags & URGENT:
            self.gate.append((conn, frame))
            return
        self._dispatch(conn, frame)

    def _is_dead(self, origin: int, conn: Connection) -> bool:
        """`origin` ended, and this is what it had sent before; only those who were merely out of reach come back."""
        exit = self.down.get(origin)
        return exit is not None and (exit.kind != "lost" or conn.peer in self.down)

    def open_gate(self) -> None:
        """Bootstrap is done: handles what arrived meanwhile, in order."""
        held, self.gate = self.gate or [], None
        for conn, frame in held:
            self._dispatch(conn, frame)

    def _dispatch(self, conn: Connection | None, frame: Frame) -> None:
        kind = frame.kind
        if frame.flags & SHM and kind != RELEASE and not self._open_memory(frame):
            return
        if kind == CALL:
            cell = self.cells.get(frame.key)
            if cell is not None:
                cell.deliver(frame)
            elif self.broken is not None:
                self.reply(frame, ERROR, (b"", self.broken))
            else:
                report = self.dead_cells.get(frame.key)
                if report is None:
                    self._hold(frame)
                else:
                    self.reply_dead(frame, report)
        elif kind == REPLY:
            port = self.ports.get(frame.key)
            if port is not None:
                port.deliver(frame)
        elif kind == CONTROL:
            op, *args = pickling.loads(frame.parts[1])
            handler = self.control.get(op)
            if handler is None and op in ON_DEMAND:
                importlib.import_module(ON_DEMAND[op]).install(self)
                handler = self.control.get(op)
            if handler is None:
                log.warning("node %s: unknown control message %r", self.name, op)
            else:
                handler(frame, *args)
        elif kind == RELEASE:
            if self.pool is not None:
                self.pool.give_back(frame.key, frame.origin)
        elif kind == CAST:
            self._fan_out(frame)

    def _hold(self, frame: Frame) -> None:
        """A call that came before the actor: its sender got the handle from the spawner and overtook it."""
        with self._early_lock:
            cell = self.cells.get(frame.key)
            if cell is None:
                early = self.early.setdefault(frame.key, [])
                early.append(frame)
                if len(early) == 1:
                    limit = float(store.effective("pending_actor_delivery_timeout"))
                    self.poller.call_later(limit, lambda: self._too_early(frame.key))
        if cell is not None:
            cell.deliver(frame)

    def _too_early(self, key: int) -> None:
        with self._early_lock:
            frames = self.early.pop(key, [])
        for frame in frames:
            self.reply_dead(frame, self._unknown_actor(key))

    def add_cell(self, key: int, cell: Cell) -> None:
        """From now on `cell` gets what is addressed to `key`; what came too early is delivered first."""
        with self._early_lock:
            early = self.early.pop(key, [])
            for frame in early:
                cell.deliver(frame)
            self.cells[key] = cell

    def _watch_actor(self, frame: Frame, actor: int) -> None:
        report = self.dead_cells.get(actor)
        if report is not None:
            self.tell(frame.origin, "actor_gone", actor, report)
        else:
            self.actor_watchers.setdefault(actor, set()).add(frame.origin)

    def actor_ended(self, actor: int, report: str) -> None:
        """An actor of this node ended: those who asked are told, after all that it sent."""
        for origin in self.actor_watchers.pop(actor, ()):
            self.tell(origin, "actor_gone", actor, report)

    def _actor_gone(self, frame: Frame, actor: int, report: str) -> None:
        for port in list(self.ports.values()):
            port.actor_gone(frame.origin, actor, report)

    def _unknown_actor(self, key: int) -> str:
        return f"has status: stopped: there is no such actor in process {self.name} [pid {os.getpid()}]"

    def _open_memory(self, frame: Frame) -> bool:
        """Replaces a ticket by the parts behind it. False when the sender is gone."""
        origin, me, poller = frame.origin, frame.dest, self.poller  # it was lent to the addressee, by that name

        def release(segment: int) -> None:  # runs in any thread, even inside the garbage collector
            poller.post(lambda: self._give_back(origin, me, segment))

        try:
            frame.parts = self.mapped.open(frame.parts[0], release)
        except OSError as e:
            log.warning("a payload was lost with its sender: %s", e)
            return False
        frame.flags &= ~SHM
        return True

    def _give_back(self, origin: int, me: int, segment: int) -> None:
        with contextlib.suppress(NodeDown):
            if not self.closing and origin in self.routes:
                self.send(release_frame(origin, me, segment))

    def _forward(self, conn: Connection, frame: Frame) -> None:
        out = self.routes.get(frame.dest)
        if out is None or out is conn:
            exit = self.down.get(frame.dest) or Exit("lost", detail="no route to this process")
            if frame.kind == CALL or frame.kind == CONTROL:
                self.tell(frame.origin, "down", frame.dest, tuple(exit))
            return
        if frame.kind == CALL and self.agent is not None and frame.dest in self.agent.processes:
            self.agent.watchers.setdefault(frame.dest, set()).add(frame.origin)
        if frame.flags & SHM and out._pool is None and not self._open_memory(frame):
            return
        with contextlib.suppress(ConnectionClosed):
            out.send(frame)

    def _fan_out(self, frame: Frame) -> None:
        kind, targets = pickling.loads(frame.parts[0])
        for dest, rank in targets:
            copy = Frame(
                kind, dest, frame.origin, frame.key, frame.parts[1:],
                flags=frame.flags, rank=rank, reply=frame.reply, sender=frame.sender,
            )  # fmt: skip
            out = self.routes.get(dest)
            if dest == self.id:
                self._dispatch(None, copy)
            elif out is None or out.closed:
                exit = self.down.get(dest) or Exit("lost", detail="no such process on this host")
                self.tell(frame.origin, "down", dest, tuple(exit))
            else:
                if self.agent is not None:
                    self.agent.watchers.setdefault(dest, set()).add(frame.origin)
                with contextlib.suppress(ConnectionClosed):
                    out.send(copy)

    def _told_address(self, frame: Frame, dest: int, address: str) -> None:
        """The agent answered a `resolve`."""
        with self._route_lock:
            frames = self._waiting.pop(dest, [])
            try:
                conn = self.connect(address, dest, secret=self.secret)
            except OSError:
                conn = None
            if conn is not None:
                self.routes[dest] = conn
                for f in frames:
                    with contextlib.suppress(ConnectionClosed):
                        conn.send(f)
        if conn is None and self.uplink is not None:
            self._ask_why(dest)

    def _told_down(self, frame: Frame, node: int, exit: tuple[Any, ...]) -> None:
        self.mark_down(node, Exit(*exit))

    def _on_close(self, conn: Connection, reason: str) -> None:
        if self.closing:
            return
        lost = [n for n, c in self.routes.items() if c is conn]
        for n in lost:
            del self.routes[n]
        if conn is self.uplink:
            self.on_uplink_lost(reason)
        elif self.agent is not None:
            self.agent.connection_lost(conn, lost, reason)
        else:
            for n in lost:
                self._ask_why(n)

    def _ask_why(self, node: int) -> None:
        """A direct connection ended: the agent knows whether and how the process died."""
        if node in self.down or self.uplink is None:
            return
        with contextlib.suppress(ConnectionClosed):
            self.uplink.send(self.control_frame(self.agent_id, "why", node))
        self.poller.call_later(5.0, lambda: self.mark_down(node, Exit("lost", detail="connection closed")))

    def mark_down(self, node: int, exit: Exit) -> None:
        """`node` is gone: fails what waits for it. Idempotent; the first reason counts."""
        if self.closing or self.down.setdefault(node, exit) is not exit:
            return
        conn = self.routes.pop(node, None)
        if conn is not None and conn.peer == node and not conn.closed:
            conn.drain()
        with self._route_lock:
            unsent = self._waiting.pop(node, [])
        for frame in unsent:
            self.bounce(frame, exit)
        if self.pool is not None:
            self.pool.borrower_gone(node)
        for port in list(self.ports.values()):
            port.node_down(node, exit)
        for callback in list(self.on_node_down):
            callback(node, exit)

    def bounce(self, frame: Frame, exit: Exit) -> None:
        """A message cannot be delivered: the actor that sent it is asked, if its port wants that."""
        if frame.kind != REPLY or not frame.flags & URGENT:
            return
        cell = self.cells.get(frame.sender or 1)
        if cell is not None:
            where = f"port {frame.key} of process {frame.dest:x}"
            cell.post_event(UndeliverableMessageEnvelope(cell.display, where, exit.describe()))

    def close(self) -> None:
        """Lets go of everything; on the runtime thread or after it ended."""
        self.closing = True
        self.stop_listening()
        for conn in {*self.routes.values(), *self.sessions.values()}:
            conn.close("this process is shutting down")
        self.routes.clear()
        if self.pool is not None:
            self.pool.close()
        self.poller.stop()


def _start_connecting(where: addresses.Address) -> tuple[socket.socket, str]:
    """A socket on its way to `where`, and the numeric address of that."""
    family, kind, proto, _, sockaddr = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    addresses.tune(sock)
    sock.setblocking(False)
    sock.connect_ex(sockaddr)
    return sock, str(sockaddr[0])
