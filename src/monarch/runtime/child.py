"""A worker process, from birth to exit: set-up, its node, the actors it is told to run.

The runtime loop runs on the process's main thread; actors run on threads of their own. Importing this module is
what makes a zygote warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from typing import Any

import cloudpickle  # noqa: F401 - warm: most scripts send classes of __main__

from monarch.config import store
from monarch.runtime import client
from monarch.runtime.cell import Cell, Spec, cleanup_limit, dump_error
from monarch.runtime.executors import AsyncCell, SyncCell
from monarch.runtime.failure import OWNER_GONE, Exit, MeshFailure
from monarch.runtime.future import wait_all
from monarch.runtime.node import Host, Node
from monarch.runtime.ownership import Ask, End
from monarch.wire import pickling
from monarch.wire.frames import Frame

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
#: variables that CUDA reads once, when it is initialised
_CUDA_EARLY = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_CACHE_DISABLE",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def set_title(title: str) -> None:
    """What `ps -o comm` and `top` show for this process (15 characters on Linux)."""
    _prctl(_PR_SET_NAME, title.encode()[:15])


def read_orders(sock: socket.socket) -> dict[str, Any]:
    """The first thing on an exec'd worker's socket: its orders, length-prefixed."""
    (n,) = struct.unpack("<I", _exactly(sock, 4))
    orders: dict[str, Any] = pickle.loads(_exactly(sock, n))
    return orders


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        chunk = sock.recv(n - len(data))
        if not chunk:
            raise EOFError("the host agent closed the connection before giving orders")
        data += chunk
    return data


def run_forked(fd: int, orders: dict[str, Any]) -> None:
    """In a process just forked from the zygote."""
    if orders["die_with_parent"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    env = orders["env"]
    os.environ.clear()
    os.environ.update(env)
    with contextlib.suppress(OSError):
        os.chdir(orders["cwd"])
    cpus = orders.get("cpus")
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except (OSError, ValueError) as e:
            print(f"Failed to bootstrap proc due to: cannot bind to cpus {sorted(cpus)}: {e}", file=sys.stderr)
            os._exit(1)
    command = orders.get("command")
    if command is not None:
        _exec(fd, command, orders)
    born_with = set(sys.modules)
    if "numpy" in sys.modules:  # its global generator was seeded in the zygote
        sys.modules["numpy"].random.seed()
    run(socket.socket(fileno=fd), orders)
    finalise(born_with)


def finalise(born_with: set[str]) -> None:
    """Ends a forked worker as the interpreter would, but without tearing down the modules that came with the zygote.

    Exit handlers run, globals of the user's modules are dropped (their `__del__` runs), streams are flushed. Taking
    torch apart in every worker would cost most of a stop's time.
    """
    import atexit
    import gc

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for name in [n for n in sys.modules if n not in born_with and not n.startswith("monarch.")]:
        module = sys.modules.get(name)
        values = getattr(module, "__dict__", None)
        if values is not None:
            for key in [k for k in values if not k.startswith("__")]:
                with contextlib.suppress(BaseException):
                    values[key] = None
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(0)


def _exec(fd: int, command: tuple[str, list[str]], orders: dict[str, Any]) -> None:
    program, argv = command
    if fd != 3:
        os.dup2(fd, 3)
    os.set_inheritable(3, True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(program, argv, os.environ)
    except OSError as e:
        print(
            f"Failed to bootstrap proc due to: {e}. Make sure your proc bootstrap command is correct: {' '.join(argv)}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(127)


def run_executed() -> None:
    """In a process started by a bootstrap command: finds its socket in the environment."""
    mode = os.environ.get("HYPERACTOR_MESH_BOOTSTRAP_MODE", "")
    if not mode.startswith("fd:"):
        print(
            "Failed to bootstrap proc due to: HYPERACTOR_MESH_BOOTSTRAP_MODE is not set. Make sure your proc bootstrap "
            f"command is correct: {' '.join(sys.orig_argv)}",
            file=sys.stderr,
        )
        sys.exit(1)
    sock = socket.socket(fileno=int(mode[3:]))
    os.set_inheritable(sock.fileno(), False)
    orders = read_orders(sock)
    if orders["die_with_parent"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    run(sock, orders)


class Worker:
    """The handlers of a worker's node."""

    def __init__(self, sock: socket.socket, orders: dict[str, Any]) -> None:
        self.node = node = Node(orders["node"], orders["agent"], secret=orders["secret"])
        self.orders = orders
        self.host = Host(orders["agent"], orders["agent_address"])
        node.name = orders["name"]
        node.on_uplink_lost = self.orphaned
        node.control |= {"spawn": self.spawn, "stop_actor": self.stop_actor, "exit": self.exit, "failure": self.failure}
        node.control["settle"] = self.settle
        node.on_node_down.append(self.node_down)
        if orders["has_bootstrap"]:
            node.gate = []
        node.control["bootstrap"] = self.bootstrap
        node.listen(orders["listen"], orders["secret"])
        node.adopt_uplink(sock)
        client.install(node, self.host, orders)
        self.exiting = False
        self.watched: set[int] = set()

    def orphaned(self, reason: str) -> None:
        """The agent is gone, so is the client or the host's daemon: nothing to stay for."""
        os._exit(1)

    def spawn(self, frame: Frame, *spec: Any) -> None:
        start_actor(self.node, frame, Spec(*spec))
        owner = Spec(*spec).owner_node
        if owner not in (self.node.id, self.node.agent_id) and owner not in self.watched:
            self.watched.add(owner)
            self.node.tell(self.node.agent_id, "watch", owner, tuple(Spec(*spec).owner_host))

    def stop_actor(self, frame: Frame, reason: str) -> None:
        stop_actor(self.node, frame, reason)

    def settle(self, frame: Frame) -> None:
        settle(self.node, frame)

    def failure(self, frame: Frame, failure: Any, mesh: int, again: bool) -> None:
        cell = self.node.cells.get(frame.key)
        if cell is not None:
            cell.child_failed(failure, mesh, again)

    def node_down(self, node: int, exit: Exit) -> None:
        react_to_death(self.node, node, exit)

    def bootstrap(self, frame: Frame) -> None:
        """Runs the user's bootstrap callable on a thread, with rank context, before any actor is made."""
        from monarch.runtime.bootstrap import BootstrapCell

        cell = BootstrapCell(self.node, self.orders, frame)
        cell.start(self.bootstrapped)

    def bootstrapped(self, error: BaseException | None) -> None:
        if error is not None:
            self.node.broken = dump_error(error, f"The bootstrap of process {self.node.name} failed.")
        self.node.tell(self.node.agent_id, "ready", self.node.id, self.node.broken, self.node.address)
        self.node.poller.post(self.node.open_gate)

    def exit(self, frame: Frame, reason: str) -> None:
        if not self.exiting:
            self.exiting = True
            threading.Thread(target=self._leave, args=(reason,), name="monarch-stop", daemon=True).start()

    def _leave(self, reason: str) -> None:
        cells = list(self.node.cells.values())
        ending = [c.stopped for c in self.node.ending.values()]
        wait_all([c.request_stop(reason) for c in cells] + ending, cleanup_limit())
        self.node.poller.stop()


def start_actor(node: Node, frame: Frame, spec: Spec) -> None:
    """Makes the cell of one actor; class and arguments are unpickled on its own thread."""
    if node.broken is not None:
        return
    kind = AsyncCell if spec.is_async else SyncCell
    cell = kind(node, frame.key, frame.rank, spec)
    parts = frame.parts

    def build() -> Any:
        return pickling.loads(parts[2], parts[3:])

    node.add_cell(frame.key, cell)
    cell.start(build)


def stop_actor(node: Node, frame: Frame, reason: str) -> None:
    """Stops one actor and answers when its cleanup is done."""
    cell = node.cells.get(frame.key)
    if cell is not None:
        done = cell.request_stop(reason)
    else:
        ending = node.ending.get(frame.key)
        if ending is None:
            return node.reply(frame, 0, (b"", pickle.dumps(None)))
        done = ending.stopped
    done._on_ready(lambda: node.reply(frame, 0, (b"", pickle.dumps(None))))


def settle(node: Node, frame: Frame) -> None:
    """Answers twice: `SETTLING` at once, and when the actors here have done what is queued now, or ended."""
    node.reply(frame, 0, (b"", client.SETTLING))
    cells = [c for c in [*node.cells.values(), *node.ending.values()] if not c.stopped.done()]
    left = len(cells)
    lock = threading.Lock()

    def one_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left <= 0
        if last:
            node.reply(frame, 0, (b"", pickle.dumps(None)))

    if not cells:
        one_done()
    for cell in cells:
        cell.when_idle(one_done)


def react_to_death(node: Node, dead: int, exit: Exit) -> None:
    """A process ended: owners here are asked about its ranks; actors here that it owned are stopped."""
    with node.tree.lock:
        with_it = node.tree.on_host(dead)
        effects = node.tree.process_ended(dead, exit.failed)
    for other in with_it:  # a whole host was lost
        node.mark_down(other, exit)
    for effect in effects:
        cell = node.cells.get(effect.actor) if isinstance(effect, (Ask, End)) else None
        if cell is None:
            continue
        if isinstance(effect, End):
            if exit.kind == "lost" and store.effective("mesh_orphan_timeout") is None:
                continue  # the user wants actors to outlive an owner that cannot be reached
            cell.request_stop(f"{OWNER_GONE}, for mesh {cell.spec.name}", drain=False)
        elif isinstance(effect, Ask):
            owned, rank = effect.mesh.handle, effect.rank
            failure = MeshFailure(owned.name, [rank], owned.display(rank), exit.describe(), exit=exit, mesh=owned.mesh)
            cell.post_event(failure)


def run(sock: socket.socket, orders: dict[str, Any]) -> None:
    """The life of a worker process; returns when it was told to exit, and the interpreter then finalises."""
    os.environ["HYPERACTOR_PROCESS_NAME"] = orders["process_name"]
    os.environ["HYPERACTOR_MESH_BOOTSTRAP_MODE"] = "running"
    for path in orders["sys_path"]:
        if path not in sys.path:
            sys.path.append(path)
    store.install_inherited(orders["config"])
    set_title(orders["name"])
    with contextlib.suppress(Exception):  # a crash in native code then says where, on stderr and in its report
        faulthandler.enable(2, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    with contextlib.suppress(Exception):
        import multiprocessing

        multiprocessing.set_start_method("forkserver" if sys.platform == "linux" else "spawn", force=True)
    sys.argv = orders["argv"]
    worker = Worker(sock, orders)
    if not orders["has_bootstrap"]:
        if os.environ.get("MONARCH_ERROR_DURING_BOOTSTRAP_FOR_TESTING") == "1":
            print("Failed to bootstrap proc due to: MONARCH_ERROR_DURING_BOOTSTRAP_FOR_TESTING", file=sys.stderr)
            sys.exit(1)
        worker.node.tell(worker.node.agent_id, "ready", worker.node.id, None, worker.node.address)
    asyncio._set_running_loop(None)
    worker.node.poller.run()
    worker.node.closing = True
    worker.node.stop_listening()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


__all__ = ["Cell", "Worker", "run", "run_executed", "run_forked", "start_actor"]
