"""The host agent: starts, watches and ends the processes of one host, through its zygote.

One lives in each client (for the client's own machine) and one in each worker daemon. It is the only process of its
host that talks to other hosts; it forwards frames for its processes and tells everyone who asked when one dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from monarch.config import store
from monarch.runtime.cell import dump_error
from monarch.runtime.failure import OWNER_GONE, Exit
from monarch.runtime.future import Future, when_all
from monarch.runtime.node import RANK_MASK, Host, NodeDown
from monarch.runtime.pulse import Pulse
from monarch.runtime.zygote import receive_message, send_message
from monarch.wire import addresses, pickling
from monarch.wire.frames import ERROR, URGENT, Frame
from monarch.wire.poller import READ
from monarch.wire.trust import Untrusted

if TYPE_CHECKING:
    from monarch.runtime.node import Node
    from monarch.wire.connection import Connection

#: A process must be exec'd, not forked, when one of these differs from what the zygote was started with:
#: they are read while an interpreter or a numeric library starts.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "NUMEXPR_", "DYLD_")
#: seconds that a daemon which was shut down keeps its connections, so that its last words arrive everywhere
_LINGER = 0.25
_PRELOAD = ("numpy", "torch")


def _early(env: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_START)}


class Process:
    """What the agent knows of one worker process."""

    def __init__(
        self, node: int, name: str, owner: tuple[Any, ...], waiting: Frame, rank: int, command: str, starter: Starter
    ) -> None:  # fmt: skip
        self.starter = starter
        self.node = node
        self.name = name
        self.owner_node: int = owner[0]
        self.pid = 0
        self.waiting: Frame | None = waiting  #: the spawn request, until this process is ready
        self.rank = rank
        self.command = command
        self.address = ""
        self.ready = False
        self.stopping = ""
        self.freezes = 0  #: how often it was stopped by a signal or continued
        self.is_frozen = False
        self.turn: Future[None] = Future._make()  #: settled when it is frozen or goes on next, or is gone
        self.frozen_for = 0.0  #: seconds after which it was given up
        self.gone: Future[None] = Future._make()

    def who(self) -> str:
        return f"process {self.name}, pid {self.pid}, on {socket.gethostname()}"


class Starter:
    """The agent's end of one zygote."""

    def __init__(self, folder: str, preload: list[str]) -> None:
        mine, theirs = socket.socketpair()
        src = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [src, env.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=env,
        )
        theirs.close()
        self.sock = mine
        self.reading = threading.Lock()
        send_message(mine, ("folder", folder))
        if preload:
            send_message(mine, ("preload", preload))

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):
            send_message(self.sock, message, fds)

    def receive(self) -> Any:
        """A message, None when there is none after all (another thread took it), False at the end."""
        with self.reading:
            try:
                if not select.select([self.sock], [], [], 0)[0]:
                    return None
                got = receive_message(self.sock)
            except (OSError, ValueError):
                got = None
        return False if got is None else got[0]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class HostAgent:
    """See the module's text. Handlers may run on any thread; state is guarded by `lock`."""

    def __init__(self, node: Node, host: Host) -> None:
        self.node = node
        self.host = host
        self.lock = threading.RLock()
        self.processes: dict[int, Process] = {}
        self.hosts: dict[int, Host] = {}  #: dest node -> its host, for nodes of other hosts (hints)
        self.watchers: dict[int, set[int]] = {}
        self.resolving: dict[int, list[int]] = {}
        self.folder = addresses.private_folder()
        self.on_shutdown: Any = None
        self.over_tcp = False  #: processes of this host talk over loopback TCP instead of unix sockets
        self._start_env = _early(dict(os.environ))
        self._preloaded = {m for m in _PRELOAD if m in sys.modules}
        self.closing = False
        self.pulse = Pulse(node)
        self._starters: list[Starter] = []
        self._current = self._new_starter(sorted(self._preloaded))
        self._warming: Starter | None = None
        node.agent = self
        node.control |= {
            "spawn_procs": self.spawn_procs,
            "stop_procs": self.stop_procs,
            "resolve": self.resolve,
            "why": self.why,
            "watch": self.watch,
            "ready": self.ready,
            "hint": self.hint,
            "attach": self.attach,
            "release_host": self.release_host,
            "pulse": self.show_life,
            "pids": self.pids,
            "signal_procs": self.signal_procs,
            "alive": lambda frame: None,
        }
        node.on_node_down.append(self._after_death)

    # -- zygotes

    def _new_starter(self, preload: list[str]) -> Starter:
        starter = Starter(self.folder, preload)
        self._starters.append(starter)
        self.node.poller.watch(starter.sock.fileno(), READ, lambda event: self._from_zygote(starter))
        return starter

    def _warm(self) -> None:
        """Heavy modules that the client imported since: a second zygote imports them while the first goes on."""
        wanted = {m for m in _PRELOAD if m in sys.modules}
        if wanted <= self._preloaded:
            return
        self._preloaded |= wanted
        self._warming = self._new_starter(sorted(wanted))

    def _from_zygote(self, starter: Starter) -> None:
        got = starter.receive()
        if got is None:
            return
        if got is False:
            self.node.poller.unwatch(starter.sock.fileno())
            if not self.closing and starter in self._starters:
                self._starters.remove(starter)
                for p in list(self.processes.values()):
                    if p.starter is starter:
                        self._ended(p, Exit("lost", detail="the host's process starter died"))
                if starter is self._current:
                    self._current = self._new_starter(sorted(self._preloaded))
            return
        op, items = got
        if op == "warm":
            if starter is self._warming:
                self._current, self._warming = starter, None
        elif op == "forked":
            for node, pid in items:
                process = self.processes.get(node)
                if process is not None:
                    process.pid = pid
        elif op == "exit":
            for node, pid, status, last_words in items:
                process = self.processes.get(node)
                if process is not None:
                    process.pid = pid
                    exit = Exit.of_status(status, bool(process.stopping), process.who())
                    if process.frozen_for:
                        exit = Exit("frozen", who=process.who(), detail=f"{process.frozen_for:g} s")
                    elif last_words and exit.failed:
                        exit = exit._replace(detail=f"The last lines it wrote to stderr:\n{last_words}")
                    self._ended(process, exit)
        elif op == "frozen":
            for node, is_frozen in items:
                self._frozen(node, is_frozen)

    def _frozen(self, node: int, is_frozen: bool) -> None:
        """A process was stopped by a signal, or goes on. One that stays stopped counts as dead, and is then killed.

        The kernel says so, not a clock: a process whose code is merely slow, or holds its interpreter lock, is not
        stopped; nor is one under a debugger.
        """
        process = self.processes.get(node)
        if process is None:
            return
        process.freezes += 1
        with self.lock:
            process.is_frozen = is_frozen
            turn, process.turn = process.turn, Future._make()
        turn._settle(None)
        if is_frozen:
            mark, limit = process.freezes, float(store.effective("get_actor_state_max_idle"))

            def check() -> None:
                if process.freezes == mark and node in self.processes:
                    process.frozen_for = limit
                    self._signal([process], signal.SIGKILL)

            self.node.poller.call_later(limit, check)

    def _signal(self, processes: list[Process], number: int) -> None:
        for starter in list(self._starters):
            # by node, not by pid: one whose fork was only just ordered has none yet
            pairs = [(p.node, number) for p in processes if p.starter is starter and p.node in self.processes]
            if pairs:
                with self.lock:
                    starter.send(("kill", pairs))

    # -- starting

    def spawn_procs(self, frame: Frame, order: dict[str, Any]) -> None:
        """Starts the processes `order["ranks"]` of a mesh; answers once per rank when it is ready or failed."""
        with self.lock:
            exit = self.node.down.get(order["owner"][0])
            if exit is None:
                self._spawn(frame, order)
        if exit is not None:  # its last words arrived after the news of its death
            error = pickling.dump_bytes(RuntimeError(f"the owner of these processes is gone: {exit.describe()}"))
            for rank in order["ranks"]:
                self._answer(frame, rank, error)

    def _spawn(self, frame: Frame, order: dict[str, Any]) -> None:
        env = dict(os.environ)
        must_exec = _early(env) != self._start_env
        name, base = order["name"], order["mesh_id"]
        self._warm()
        self._watch_owner(*order["owner"][:2])
        shared = {
            "agent": order["host"][0],
            "agent_address": order["host"][1],
            "secret": self.node.secret,
            "cwd": os.getcwd(),
            "sys_path": [p for p in [*sys.path, *order["sys_path"]] if p],
            "config": order["config"],
            "argv": order["argv"],
            "labels": order["labels"],
            "sizes": order["sizes"],
            "owner": order["owner"],
            "mesh": order["mesh"],
            "root": order["root"],
            "version": order["version"],
            "tail_log_lines": int(store.effective("tail_log_lines")),
            "has_bootstrap": bool(len(frame.parts) > 2),
            "die_with_parent": bool(store.effective("mesh_bootstrap_enable_pdeathsig")),
        }
        each: list[dict[str, Any]] = []
        fds: list[int] = []
        theirs_all: list[socket.socket] = []
        for rank in order["ranks"]:
            node = base | rank
            mine, theirs = socket.socketpair()
            own_name = f"{name}-{rank}"
            if self.over_tcp:
                listen = "tcp://127.0.0.1:0"
            else:
                listen = f"ipc://{self.folder}/{node:x}"
            own: dict[str, Any] = {
                "node": node,
                "rank": rank,
                "name": own_name,
                "listen": listen,
                "env": env,
                "process_name": f"{own_name} @ {os.environ.get('HYPERACTOR_PROCESS_NAME') or socket.gethostname()}",
            }
            bind = order["bind"].get(rank)
            command = order["commands"].get(rank)
            text = self._command(own, bind, command, must_exec, theirs.fileno())
            process = Process(node, own_name, order["owner"], frame, rank, text, self._current)
            self.processes[node] = process
            if frame.origin != self.node.id:
                self.watchers.setdefault(node, set()).add(frame.origin)
            conn = self.node.adopt_child(mine, node)
            if "command" in own:
                orders = pickle.dumps({**shared, **own, "env": {}}, 5)
                conn._send_raw(struct.pack("<I", len(orders)) + orders)
            if shared["has_bootstrap"]:
                with contextlib.suppress(Exception):
                    control = pickling.dump_bytes(("bootstrap",))
                    parts = (b"", control, *frame.parts[2:])
                    conn.send(Frame(frame.kind, node, self.node.id, 0, parts, flags=URGENT))
            each.append(own)
            fds.append(theirs.fileno())
            theirs_all.append(theirs)
        for start in range(0, len(each), 60):
            self._current.send(("fork", shared, each[start : start + 60]), fds[start : start + 60])
        for sock in theirs_all:
            sock.close()
        limit = float(store.effective("host_spawn_ready_timeout"))
        if limit > 0:
            nodes = [e["node"] for e in each]
            self.node.poller.call_later(limit, lambda: self._not_ready_in_time(nodes, limit))

    def _command(self, own: dict[str, Any], bind: Any, command: Any, must_exec: bool, fd: int) -> str:
        """Decides between fork and exec for one process, and fills in its orders. Returns the command as text."""
        argv = [sys.executable, "-m", "monarch._src.actor.bootstrap_main"]
        program = sys.executable
        env = own["env"]
        if command is not None:
            program, arg0, args, changes, inherit = command
            env = dict(env) if inherit else {}
            for key, value in changes.items():
                if value is None:
                    env.pop(key, None)
                else:
                    env[key] = value
            argv = [arg0 or program, *args]
        numa = {k: v for k, v in (bind or {}).items() if k != "cpus"}
        if bind and "cpus" in bind and not numa and sys.platform == "linux":
            own["cpus"] = parse_cpus(bind["cpus"])
        if numa and os.path.isdir("/sys/devices/system/node/node0"):
            argv = ["numactl", *(f"--{k}={v}" for k, v in numa.items()), program, *argv[1:]]
            program = "numactl"
        if command is not None or must_exec or numa:
            env = dict(env)
            env["HYPERACTOR_PROCESS_NAME"] = own["process_name"]
            env["HYPERACTOR_MESH_BOOTSTRAP_MODE"] = f"fd:{fd_in_child()}"
            src = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            if src not in env.get("PYTHONPATH", "").split(os.pathsep):
                env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), src]))
            own["command"] = (program, argv)
            own["env"] = env
        return shlex.join(argv)

    def ready(self, frame: Frame, node: int, error: bytes | None, address: str) -> None:
        process = self.processes.get(node)
        if process is None:
            return
        process.address = address
        process.ready = True
        waiting, process.waiting = process.waiting, None
        if waiting is not None:
            self._answer(waiting, process.rank, error)
        for asker in self.resolving.pop(node, []):
            self.node.tell(asker, "address", node, self._address_of(process))

    def _answer(self, request: Frame, rank: int, error: bytes | None) -> None:
        to = Frame(request.kind, request.dest, request.origin, reply=request.reply, rank=rank)
        if error is None:
            self.node.reply(to, 0, (b"", pickling.dumps(True).stream()))
        else:
            self.node.reply(to, ERROR, (b"", error))

    def _address_of(self, process: Process) -> str:
        return process.address or f"ipc://{self.folder}/{process.node:x}"

    def _not_ready_in_time(self, nodes: list[int], limit: float) -> None:
        late = [p for n in nodes if (p := self.processes.get(n)) is not None and not p.ready and not p.stopping]
        self._signal(late, signal.SIGKILL)

    # -- ending

    def stop_procs(self, frame: Frame, nodes: list[int], reason: str) -> None:
        """Ends processes politely, then not; answers when all are gone and reaped."""
        with self.lock:
            mine = [p for n in nodes if (p := self.processes.get(n)) is not None]
            for p in mine:
                p.stopping = reason
                exit = self.node.control_frame(p.node, "exit", reason)
                exit.flags |= URGENT
                with contextlib.suppress(NodeDown):
                    self.node.send(exit)
        when_all([p.gone for p in mine], lambda: self.node.reply(frame, 0, (b"", pickling.dumps(None).stream())))
        if not mine:
            return
        grace = float(store.effective("cleanup_timeout")) + 0.3
        hard = grace + min(1.0, float(store.effective("mesh_terminate_timeout")))
        self.node.poller.call_later(grace, lambda: self._signal(mine, signal.SIGTERM))
        self.node.poller.call_later(hard, lambda: self._signal(mine, signal.SIGKILL))

    def _ended(self, process: Process, exit: Exit) -> None:
        """A process is gone: everyone who asked is told why."""
        if process.stopping:
            exit = exit._replace(detail=process.stopping)
        with contextlib.suppress(OSError):
            os.unlink(f"{self.folder}/{process.node:x}")
        if process.waiting is not None:
            waiting, process.waiting = process.waiting, None
            error = ValueError(
                f"error creating proc (host rank {process.rank}): it ended before it was ready: {exit.describe()}; "
                f"command: {process.command}"
            )
            self._answer(waiting, process.rank, pickling.dump_bytes(error))
        self.node.mark_down(process.node, exit)
        self.processes.pop(process.node, None)  # only now: its closing socket must not pass for a lost host
        self.node.mapped.forget_process(process.pid)
        process.gone._settle(None)
        process.turn._settle(None)

    def _after_death(self, node: int, exit: Exit) -> None:
        """For any node that went down: watchers are told, and what it owned here ends."""
        for asker in [*self.watchers.pop(node, ()), *self.resolving.pop(node, [])]:
            self.node.tell(asker, "down", node, tuple(exit))
        if exit.kind == "lost" and store.effective("mesh_orphan_timeout") is None:
            return  # the user wants processes to outlive an owner that cannot be reached
        owned = [p for p in self.processes.values() if p.owner_node == node]
        for p in owned:
            p.stopping = p.stopping or OWNER_GONE
        self._signal(owned, signal.SIGKILL)

    def connection_lost(self, conn: Connection, nodes: list[int], reason: str) -> None:
        """The node's connection to a worker, another host, or a client ended."""
        process = self.processes.get(conn.peer)
        if process is not None:
            # The zygote will say how it ended; if it merely closed its socket, it is of no more use.
            def insist() -> None:
                self._signal([process], signal.SIGKILL)

            self.node.poller.call_later(1.0, insist)
            return
        where = f"{conn.address}: " if conn.address else ""
        for node in nodes:
            self.node.mark_down(node, Exit("lost", detail=f"its host was lost: {where}{reason}"))

    # -- questions

    def resolve(self, frame: Frame, dest: int) -> None:
        process = self.processes.get(dest)
        exit = self.node.down.get(dest)
        if process is None:
            exit = exit or Exit("lost", detail="there is no such process on this host")
            self.node.tell(frame.origin, "down", dest, tuple(exit))
            return
        self.watchers.setdefault(dest, set()).add(frame.origin)
        if process.ready:
            self.node.tell(frame.origin, "address", dest, self._address_of(process))
        else:
            self.resolving.setdefault(dest, []).append(frame.origin)

    def why(self, frame: Frame, dest: int) -> None:
        exit = self.node.down.get(dest)
        if exit is not None:
            self.node.tell(frame.origin, "down", dest, tuple(exit))
        elif dest in self.processes:
            self.watchers.setdefault(dest, set()).add(frame.origin)
        else:
            self.node.tell(frame.origin, "down", dest, tuple(Exit("lost", detail="connection closed")))

    def watch(self, frame: Frame, dest: int, host: tuple[Any, ...]) -> None:
        """`frame.origin` wants to hear when `dest` dies; across hosts, its agent is asked in turn."""
        exit = self.node.down.get(dest)
        if exit is not None:
            self.node.tell(frame.origin, "down", dest, tuple(exit))
            return
        self.watchers.setdefault(dest, set()).add(frame.origin)
        where = Host(*host)
        if where.agent not in (self.host.agent, dest) and frame.origin >> 24 != where.agent >> 24:
            self.node.tell(where.agent, "watch", dest, host, host=where)

    def _watch_owner(self, owner: int, host: tuple[Any, ...]) -> None:
        """A process of another host owns processes here: its host's agent is asked to say when it dies."""
        where = Host(*host)
        if where.agent not in (self.host.agent, owner) and owner not in self.processes:
            self.node.tell(where.agent, "watch", owner, host, host=where)

    def hint(self, frame: Frame, dest: int, agent: int, address: str) -> None:
        """A process of this host is about to send to `dest`, on another host; it wants to hear if that host is lost."""
        exit = self.node.down.get(agent)
        if exit is not None:
            self.node.tell(frame.origin, "down", agent, tuple(exit))
            return
        self.watchers.setdefault(agent, set()).add(frame.origin)
        if dest in self.node.routes:
            return
        with contextlib.suppress(NodeDown, OSError, Untrusted):
            conn = self.node.routes.get(agent)
            if conn is None or conn.closed:
                conn = self.node.routes[agent] = self.node.connect_host(address)
            self.node.routes[dest] = conn

    # -- being a host for remote clients

    def attach(self, frame: Frame, config: dict[str, Any]) -> None:
        """A client attaches, under a name it chose for this host; its configuration holds for what it starts here."""
        self.node.aliases.add(frame.dest)
        store.install_inherited(config)
        conn = self.node.routes.get(frame.origin)
        if conn is not None:
            conn.keep_alive(float(store.effective("mesh_orphan_timeout") or 0.0))
        self.node.reply(frame, 0, (b"", pickling.dumps(True).stream()))

    # -- for tests: see monarch.testing

    def pids(self, frame: Frame, name: int, nodes: list[int]) -> None:
        """node -> pid, for those of `nodes` that live. `name` is what the asker calls this host."""
        found = {n: p.pid for n in nodes if (p := self.processes.get(n)) is not None}
        self.node.reply(frame, 0, (b"", pickling.dumps((name, found)).stream()))

    def signal_procs(self, frame: Frame, name: int, nodes: list[int], number: int) -> None:
        """Answers as `pids` does; SIGSTOP and SIGCONT have taken effect by then."""
        targets = [p for n in nodes if (p := self.processes.get(n)) is not None]
        frozen = number == signal.SIGSTOP if number in (signal.SIGSTOP, signal.SIGCONT) else None
        with self.lock:
            turns = [p.turn for p in targets if frozen is not None and p.is_frozen != frozen]
        self._signal(targets, number)
        when_all(turns, lambda: self.pids(frame, name, nodes))

    def show_life(self, frame: Frame) -> None:
        self.node.tell(frame.origin, "alive")

    def release_host(self, frame: Frame, end_daemon: bool) -> None:
        """A client is done with this host: its processes end; with `end_daemon` everything does."""
        family = frame.origin
        mine = [p.node for p in self.processes.values() if end_daemon or self._root_of(p) == family]

        def then() -> None:
            self.node.reply(frame, 0, (b"", pickling.dumps(None).stream()))
            if end_daemon and self.on_shutdown is not None:
                self.node.poller.post(self.node.stop_listening)
                self.node.poller.call_later(_LINGER, self.on_shutdown)

        inner = Frame(frame.kind, self.node.id, self.node.id, reply=0)
        self.stop_procs(inner, mine, "the host was released by its client")
        when_all([p.gone for n in mine if (p := self.processes.get(n)) is not None], then)

    def _root_of(self, process: Process) -> int:
        """The client at the top of a process's ownership chain."""
        node = process.owner_node
        for _ in range(64):
            above = self.processes.get(node)
            if above is None:
                return node
            node = above.owner_node
        return node

    def close(self) -> None:
        """Ends the zygotes, and with them whatever still runs."""
        self.closing = True
        for starter in self._starters:
            self.node.poller.unwatch(starter.sock.fileno())
            starter.close()
        addresses.remove_folder(self.folder)


_ZYGOTE = "import monarch.actor; from monarch.runtime.zygote import main; main()"


def fd_in_child() -> int:
    """The descriptor number an exec'd worker finds its socket at (the forked child moves it there)."""
    return 3


def parse_cpus(text: str) -> set[int]:
    """`"0,2-4"` as a set of CPU numbers. ValueError on anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"bad CPU list {text!r}: expected for example '0,2-4'")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


_ = (dump_error, RANK_MASK)
