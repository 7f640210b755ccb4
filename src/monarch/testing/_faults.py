"""Faults in processes: death, freezing, and an interpreter lock that is not given back."""

from __future__ import annotations

import contextlib
import ctypes
import signal as signals
import threading
from collections.abc import Iterable
from typing import Any

from monarch.actor._actor import Actor
from monarch.actor._channel import Channel
from monarch.actor._context import context
from monarch.actor._endpoint import endpoint
from monarch.actor._mesh import ActorMesh, StopWait
from monarch.actor._procs import ProcMesh
from monarch.mesh import Shape, Slice
from monarch.runtime.client import current_node
from monarch.runtime.failure import Exit
from monarch.runtime.future import Future, when_all
from monarch.runtime.node import RANK_MASK, Host, Node, NodeDown, Port
from monarch.wire import pickling
from monarch.wire.frames import Frame

WAIT = 30.0  #: seconds that anything here may take before it raises TimeoutError


def _places(mesh: Any) -> dict[int, Host]:
    """node -> host of each rank of an actor mesh, a proc mesh, or a slice of one, in rank order."""
    if isinstance(mesh, ActorMesh):
        return {node: mesh._host_of(node) for node in mesh._node_ranks()}
    if isinstance(mesh, ProcMesh):
        hosts, each = mesh._hosts, mesh._per_host
        return {n: hosts[0] if len(hosts) == 1 else hosts[(n & RANK_MASK) // each] for n in mesh._nodes()}
    raise TypeError(f"expected an actor mesh or a proc mesh, or a slice of one, not {type(mesh).__name__}")


def _hosts_of(mesh: ActorMesh[Any]) -> tuple[tuple[Host, ...], int]:
    return mesh._placement.hosts, mesh._placement.per_host


class _Answers(Port):
    """One answer from each of several host agents."""

    def __init__(self, node: Node, hosts: Iterable[int]) -> None:
        self.node, self.left = node, set(hosts)
        self.found: dict[int, int] = {}
        self.lock = threading.Lock()
        self.future: Future[dict[int, int]] = Future._make()
        self.ident = node.open_port(self)

    def deliver(self, frame: Frame) -> None:
        host, found = pickling.loads(frame.parts[1])
        with self.lock:
            self.found.update(found)
            self.left.discard(host)
            done = not self.left
        if done:
            self._settle()

    def node_down(self, node: int, exit: Exit) -> None:
        with self.lock:
            done = node in self.left and not (self.left - {node})
            self.left.discard(node)
        if done:
            self._settle()

    def node_down_all(self, reason: str) -> None:
        self._settle()

    def _settle(self) -> None:
        self.node.close_port(self.ident)
        self.future._settle(self.found)


def _ask(places: dict[int, Host], op: str, *args: Any) -> dict[int, int]:
    """Sends a control message about processes to the agents of their hosts; node -> pid, for those that live."""
    node = current_node()
    by_host: dict[Host, list[int]] = {}
    for n, host in places.items():
        by_host.setdefault(host, []).append(n)
    answers = _Answers(node, [host.agent for host in by_host])
    for host, nodes in by_host.items():
        try:
            frame = node.control_frame(host.agent, op, host.agent, nodes, *args, reply=answers.ident)
            node.send(frame, host)
        except NodeDown as e:
            answers.node_down(host.agent, e.exit)
    return answers.future.get(timeout=WAIT)


def pids(mesh: Any) -> list[int]:
    """The pid of each rank's process, in rank order; 0 for one that is gone. Waits until they were started."""
    places = _places(mesh)
    with contextlib.suppress(Exception):
        mesh.initialized.get(timeout=WAIT)
    found = _ask(places, "pids")
    return [found.get(node, 0) for node in places]


def kill(mesh: Any, signal: int = signals.SIGKILL) -> None:
    """Ends the processes of all ranks by a signal; returns when this process knows that they are dead.

    The failure then runs its course: owners are told, pending and later calls raise. A signal that does not end them
    raises TimeoutError after 30 s.
    """
    places = _places(mesh)
    pids(mesh)
    node = current_node()
    wait = StopWait(node, {n: i for i, n in enumerate(places)})
    for n, host in places.items():
        exit = node.exit_of(n, host)
        if exit is not None:
            wait.node_down(n, exit)
        elif host.agent != node.id:
            node.tell(node.agent_id, "watch", n, tuple(host))
    _ask(places, "signal_procs", int(signal))
    wait.future.get(timeout=WAIT)


def freeze(mesh: Any) -> None:
    """Stops the processes of all ranks (SIGSTOP): they neither run nor die. Returns when they are stopped.

    See `get_actor_state_max_idle`.
    """
    places = _places(mesh)
    pids(mesh)
    _ask(places, "signal_procs", int(signals.SIGSTOP))


def thaw(mesh: Any) -> None:
    """Lets frozen processes go on (SIGCONT). Returns when they do."""
    _ask(_places(mesh), "signal_procs", int(signals.SIGCONT))


class _Holder(Actor):
    """Sits in native code with the interpreter lock held."""

    @endpoint
    def hold(self, seconds: float, begun: Any) -> None:
        begun.send(None)
        # PyDLL: unlike CDLL it does not release the lock during the call
        ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))
        context().actor_instance.stop("done")


def hold_gil(mesh: Any, seconds: float) -> Future[Any]:
    """Makes each rank's process hold its interpreter lock for `seconds`, in native code: no Python runs there.

    Returns when all of them hold it; the future is done when they have let go. ValueError for a negative number.
    """
    if seconds < 0:
        raise ValueError(f"hold_gil: seconds must not be negative, got {seconds}")
    places = _places(mesh)
    hosts, each = (mesh._hosts, mesh._per_host) if isinstance(mesh, ProcMesh) else _hosts_of(mesh)
    port, begun = Channel[None].open()
    holds = []
    for n in places:
        one = Shape([], Slice(offset=n & RANK_MASK, sizes=[], strides=[]))
        proc = ProcMesh(n & ~RANK_MASK, "held", hosts, each, one)
        holder: Any = proc.spawn("gil_holder", _Holder)
        holds.append(holder.hold.call_one(seconds, port))
    for _ in places:
        begun.recv().get(timeout=WAIT)
    done: Future[Any] = Future._make()
    when_all(holds, lambda: done._settle(None))
    return done
