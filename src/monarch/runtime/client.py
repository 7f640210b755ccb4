"""The client: the node of the user's script, its root of the ownership tree, and its end.

Made once per process, on first use, whichever thread comes first. In a worker process `install` puts the worker's
own node here instead, so that `current_node()` is the same question everywhere.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from monarch.config import store
from monarch.runtime import future
from monarch.runtime.cell import Cell, Event, Here, Spec, here
from monarch.runtime.errors import WouldBlockRuntime
from monarch.runtime.failure import Exit, MeshFailure
from monarch.runtime.future import Future, wait_all
from monarch.runtime.node import Host, Node, Port, new_mesh_id
from monarch.runtime.ownership import Owner
from monarch.wire.frames import Frame

ROOT_ACTOR = 1

_lock = threading.Lock()
_node: Node | None = None
_host: Host | None = None
_orders: dict[str, Any] = {}
_ended: Future[None] | None = None
_forked = False  #: this process is a fork of one that had a client

#: replaced by the actor layer: looks up `monarch.actor.unhandled_fault_hook` at the time of each fault
fault_hook: Callable[[MeshFailure], None] = lambda failure: sys.exit(1)

#: called with the node when it exists: the actor layer adds what it needs
on_start: list[Callable[[Node], None]] = []


class UnhandledFault(KeyboardInterrupt, SystemExit):
    """Raised in the main thread when a failure reached the root and nobody handled it.

    A KeyboardInterrupt, so that every interruptible wait ends; a SystemExit, so that the exit status is its code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _LateFault(UnhandledFault):
    """Raised where only the class can be given."""

    def __init__(self) -> None:
        super().__init__(_fault_code)


class Root(Cell):
    """The user's script, as an actor: it owns meshes; failures that reach it go to `unhandled_fault_hook`."""

    def __init__(self, node: Node, host: Host) -> None:
        spec = Spec("root", "client", "", (), (), node.id, tuple(host), 0, "", None, False, None)
        super().__init__(node, ROOT_ACTOR, 0, spec)
        self.display = "<root>"
        self.state = "running"
        self.faults: queue.SimpleQueue[MeshFailure | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.here: Here | None = None
        self.handling = 0  #: faults that the hook was not asked about yet, or is being asked about
        self.handled = threading.Condition()

    def deliver(self, frame: Frame) -> None:
        self.node.reply_dead(frame, "the client is not an actor that can be called")

    def pending(self) -> list[Frame]:
        return []

    def owner(self) -> Owner | None:
        return None

    def tell_owner(self, cause: str, chain: str = "", again: bool = False) -> None:
        pass

    def request_stop(self, reason: str, drain: bool = True) -> Future[None]:
        return Future._of(None)

    def post_event(self, event: Event) -> None:
        if _ended is not None:  # shutting down: everything ends now
            return
        if not isinstance(event, MeshFailure):
            event = MeshFailure("<none>", [], self.display, event.report())
        with self.handled:
            self.handling += 1
        self.faults.put(event)
        if self.thread is None:
            self.thread = threading.Thread(target=self._handle_faults, name="monarch-root", daemon=True)
            self.thread.start()

    def _handle_faults(self) -> None:
        here.set(Here(self, (), (), 0))
        while True:
            failure = self.faults.get()
            if failure is None:
                return
            try:
                fault_hook(failure)
            except BaseException as e:
                self._unhandled(failure, e)
            finally:
                with self.handled:
                    self.handling -= 1
                    self.handled.notify_all()

    def _unhandled(self, failure: MeshFailure, raised: BaseException) -> None:
        code = raised.code if isinstance(raised, SystemExit) else 1
        extra = "" if isinstance(raised, SystemExit) else f"\nThe fault hook raised {type(raised).__name__}: {raised}"
        print(
            f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, PID={os.getpid()} "
            f"at time {time.strftime('%Y-%m-%d %H:%M:%S')}:\n{failure.report()}{extra}",
            file=sys.stderr,
            flush=True,
        )
        interrupt_main(code if isinstance(code, int) else 1)


#: what wakes the main thread for an unhandled fault: a signal that nobody ignores or handles, unlike SIGINT, which is
#: ignored in a program that a shell script put into the background, and replaced by asyncio.run
_FAULT_SIGNAL = signal.SIGRTMIN + 4 if hasattr(signal, "SIGRTMIN") else signal.SIGURG
_fault_code = 1
_have_handler = False


def _take_fault_signal() -> None:
    """Only the main thread may install a handler: done at the first use of the framework there."""
    global _have_handler
    if not _have_handler and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(ValueError):
            signal.signal(_FAULT_SIGNAL, _on_fault)
            _have_handler = True


def interrupt_main(code: int) -> None:
    """Ends the program: raises UnhandledFault in the main thread, out of whatever it waits for."""
    global _fault_code, _exit_status
    _fault_code = code
    main = threading.main_thread()
    if _script_over:
        _exit_status = code
    elif not _have_handler:  # the client was made by another thread: the next bytecode of the main thread raises
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main.ident or 0), ctypes.py_object(_LateFault))
        _thread.interrupt_main()
    elif main.is_alive():
        signal.pthread_kill(main.ident or 0, _FAULT_SIGNAL)


def _on_fault(number: int, stack: Any) -> None:
    global _exit_status
    if _script_over:  # raised here it would end nothing any more, only be printed
        _exit_status = _fault_code
    else:
        raise UnhandledFault(_fault_code)


_script_over = False  #: the main thread left the script and waits for other threads, or runs exit handlers
_exit_status: int | None = None  #: of a fault that came that late


def _note_end_of_script() -> None:
    global _script_over
    _script_over = True


def _leave_with_status() -> None:
    """Runs after the exit handlers registered since this module was imported. Exits with a late fault's status.

    Nothing but `_exit` can set the status at this point; what the interpreter would still do is done here.
    """
    if _exit_status is not None and not _forked:
        logging.shutdown()
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_exit_status)


def _quiet_fault(kind: Any, value: Any, trace: Any) -> None:
    if not isinstance(value, UnhandledFault):
        _previous_hook(kind, value, trace)


_previous_hook = sys.excepthook


def _after_fork() -> None:
    global _forked
    _forked = _node is not None


_take_fault_signal()
atexit.register(_leave_with_status)
with contextlib.suppress(AttributeError, RuntimeError):  # private, but nothing else tells that the script is over
    threading._register_atexit(_note_end_of_script)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork)


def install(node: Node, host: Host, orders: dict[str, Any]) -> None:
    """In a worker: its node is what this process sends from."""
    global _node, _host, _orders
    _node, _host, _orders = node, host, orders
    future.guest_poller = node.poller
    for callback in on_start:
        callback(node)


def orders() -> dict[str, Any]:
    """In a worker: what it was told when it was started. Empty in the client."""
    return _orders


def current_node() -> Node:
    """This process's node; makes the client on first use. RuntimeError after shutdown, or in a forked child."""
    node = _node
    if node is not None and _ended is None and not _forked:
        return node
    return start()


def current_host() -> Host:
    current_node()
    assert _host is not None
    return _host


def exists() -> bool:
    return _node is not None


def has_ended() -> bool:
    """The client was shut down: nothing that it could reach will ever answer."""
    return _ended is not None


def peek() -> Node | None:
    """This process's node if there is one; never makes it."""
    return _node


def is_worker() -> bool:
    return bool(_orders)


def start() -> Node:
    global _node, _host
    if future.on_runtime_thread():
        raise WouldBlockRuntime("the client cannot be created on the framework's runtime thread")
    with _lock:
        if _ended is not None:
            raise RuntimeError("the client was shut down (shutdown_context); it cannot be used again in this process")
        if _node is not None:
            if _forked:
                raise RuntimeError("a forked child may not use its parent's client; leave it by exec or os._exit")
            return _node
        node = _make_client()
        _node = node
        return node


def _make_client() -> Node:
    from monarch.runtime.agent import HostAgent

    global _host, _previous_hook
    ident = new_mesh_id()
    transport = str(store.effective("default_transport"))
    over_tcp = transport.startswith(("tcp", "tls", "metatls"))
    bind = transport if "://" in transport else "tcp://127.0.0.1:0"
    secret = os.urandom(32) if over_tcp else None
    node = Node(ident, ident, secret=secret)
    agent = HostAgent(node, Host(ident, ""))
    agent.over_tcp = over_tcp
    address = node.listen(bind if over_tcp else f"ipc://{agent.folder}/agent", secret)
    _host = agent.host = Host(ident, address)
    root = Root(node, _host)
    node.cells[ROOT_ACTOR] = root
    _add_worker_handlers(node)
    node.poller.start("monarch-runtime")
    future.guest_poller = node.poller
    _take_fault_signal()
    _previous_hook = sys.excepthook
    sys.excepthook = _quiet_fault
    os.environ.setdefault("MONARCH_CLIENT_TRACE_ID", f"{ident:x}")
    atexit.register(_at_exit)
    for callback in on_start:
        callback(node)
    return node


def _add_worker_handlers(node: Node) -> None:
    """The client can run actors too (`this_proc().spawn`, controllers)."""

    def spawn(frame: Frame, *spec: Any) -> None:
        from monarch.runtime.child import start_actor

        start_actor(node, frame, Spec(*spec))
        owner = Spec(*spec)
        if owner.owner_node != node.id and node.agent is not None:
            node.agent.watchers.setdefault(owner.owner_node, set())

    def stop(frame: Frame, reason: str) -> None:
        from monarch.runtime.child import stop_actor

        stop_actor(node, frame, reason)

    def failure(frame: Frame, failure: MeshFailure, mesh: int, again: bool) -> None:
        cell = node.cells.get(frame.key)
        if cell is not None:
            cell.child_failed(failure, mesh, again)

    def down(dead: int, exit: Exit) -> None:
        from monarch.runtime.child import react_to_death

        react_to_death(node, dead, exit)

    node.control |= {"spawn": spawn, "stop_actor": stop, "failure": failure}
    node.on_node_down.append(down)


def root() -> Root:
    cell = current_node().cells[ROOT_ACTOR]
    assert isinstance(cell, Root)
    return cell


def current_here() -> Here:
    """Where this code runs: an actor's message, or the root client."""
    now = here.get()
    if now is not None and now.cell.node is _node:
        return now
    node = current_node()
    if _orders:
        return Here(_plain_sender(node), (), (), 0)
    cell = node.cells[ROOT_ACTOR]
    assert isinstance(cell, Root)
    if cell.here is None:
        cell.here = Here(cell, (), (), 0)
    return cell.here


def _plain_sender(node: Node) -> Cell:
    """The identity of threads in a worker that no actor's context reached: one per process, never a new client."""
    cell = node.cells.get(ROOT_ACTOR)
    if cell is None:
        from monarch.runtime.bootstrap import PlainSender

        cell = node.cells[ROOT_ACTOR] = PlainSender(node, _orders)
    return cell


def shutdown(budget: float) -> Future[None]:
    """Ends the client: stops what it owns (cleanups included), then everything else. Idempotent."""
    global _ended
    with _lock:
        if _node is None or is_worker():
            return Future._of(None)
        if _ended is not None:
            return Future._of(None)
        done: Future[None] = Future._make()
        _ended = done
        node = _node
    threading.Thread(target=_shut_down, args=(node, budget, done), name="monarch-shutdown", daemon=True).start()
    return done


def _shut_down(node: Node, budget: float, done: Future[None]) -> None:
    cell = node.cells.get(ROOT_ACTOR)
    try:
        if cell is not None:
            here.set(Here(cell, (), (), 0))
            cell._leave_tree(failed=False)
            local = [c for c in node.cells.values() if c is not cell]
            cell.stop_owned("the client is shutting down", budget)
            wait_all([c.request_stop("the client is shutting down") for c in local], budget)
        if node.agent is not None:
            node.agent.close()
    finally:
        for port in list(node.ports.values()):
            port.node_down_all("the client was shut down")
        node.close()
        if node.poller.thread is not None:
            node.poller.thread.join(2.0)
        done._settle(None)


def _at_exit() -> None:
    """At interpreter exit: a moment for failures that are on their way, then an orderly end."""
    if _forked or _node is None:
        return
    global _ended
    with _lock:
        if _ended is not None:
            return
    _note_end_of_script()
    _collect_faults(_node, min(1.0, float(store.effective("cleanup_timeout"))))
    with _lock:
        done = _ended = Future._make()
    _shut_down(_node, float(store.effective("cleanup_timeout")), done)


def _collect_faults(node: Node, budget: float) -> None:
    """Lets what the script sent last be carried out, and the hook be asked about what fails there.

    Processes that are still starting are given the time they have for that; `budget` counts once they have begun.
    """
    cell = node.cells.get(ROOT_ACTOR)
    if not isinstance(cell, Root):
        return
    with node.tree.lock:
        nodes = {n for mesh in node.tree.owned_by(cell.id) for n in mesh.ranks if n not in mesh.gone and n != node.id}
    known = node.agent.processes if node.agent is not None else {}
    wait = Answers(node, nodes, {n for n in nodes if n in known and not known[n].ready})
    for dest in nodes:
        if not node.tell(dest, "settle", reply=wait.ident):
            wait.done(dest)
    with contextlib.suppress(TimeoutError):
        wait.begun.get(timeout=float(store.effective("host_spawn_ready_timeout")) or None)
    end = time.monotonic() + budget
    with contextlib.suppress(TimeoutError):
        wait.future.get(timeout=budget)
    turn: Future[None] = Future._make()
    node.poller.post(lambda: done_with(turn))  # the news of a death that was just read is passed on first
    with contextlib.suppress(TimeoutError):
        turn.get(timeout=budget)
    with cell.handled:
        cell.handled.wait_for(lambda: not cell.handling, max(0.0, end - time.monotonic()) + 1.0)


def done_with(turn: Future[None]) -> None:
    turn._settle(None)


#: the first answer to the order "settle": it was taken
SETTLING = b"settling"


class Answers(Port):
    """Waits until every node settled or is gone; and, before that, until those of `starting` have begun to."""

    def __init__(self, node: Node, nodes: set[int], starting: set[int]) -> None:
        self.node, self.left, self.starting = node, set(nodes), set(starting)
        self.lock = threading.Lock()
        self.begun: Future[None] = Future._make()
        self.future: Future[None] = Future._make()
        self.ident = node.open_port(self)
        if not self.starting:
            self.begun._settle(None)
        if not self.left:
            self.future._settle(None)

    def deliver(self, frame: Frame) -> None:
        if frame.parts[1] == SETTLING:
            self.begins(frame.origin)
        else:
            self.done(frame.origin)

    def node_down(self, node: int, exit: Exit) -> None:
        self.done(node)

    def begins(self, node: int) -> None:
        with self.lock:
            self.starting.discard(node)
            left = len(self.starting)
        if not left:
            self.begun._settle(None)

    def done(self, node: int) -> None:
        self.begins(node)
        with self.lock:
            self.left.discard(node)
            left = len(self.left)
        if not left:
            self.node.close_port(self.ident)
            self.future._settle(None)
