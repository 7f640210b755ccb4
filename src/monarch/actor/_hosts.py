"""Handles of host meshes, and how hosts are found: this machine, or worker daemons attached by address."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Union

from monarch.actor import _mock, _procs
from monarch.actor._names import label_of
from monarch.actor._procs import ProcMesh, SpawnWait
from monarch.config import store
from monarch.mesh import Extent, MeshTrait, Point, Region, Shape, Slice
from monarch.runtime import client
from monarch.runtime.agent import parse_cpus
from monarch.runtime.cell import Cell, Owned
from monarch.runtime.client import current_here, current_host, current_node
from monarch.runtime.errors import ActorError
from monarch.runtime.failure import Exit, MeshFailure
from monarch.runtime.future import Future
from monarch.runtime.node import RANK_BITS, RANK_MASK, Host, Node, NodeDown, Port, new_mesh_id
from monarch.version import __version__
from monarch.wire import addresses, pickling, trust
from monarch.wire.frames import CONTROL, ERROR, URGENT, Frame


class BootstrapCommand:
    """The command that starts one process. `env` values of None remove a variable; `inherit_env=False` starts empty."""

    def __init__(
        self,
        program: str,
        arg0: str | None,
        args: list[str],
        env: Mapping[str, str | None],
        inherit_env: bool = True,
    ) -> None:
        self.program, self.arg0, self.args = program, arg0, list(args)
        self.env: dict[str, str | None] = dict(env)
        self.inherit_env = inherit_env

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """A copy with `env` merged on top."""
        return BootstrapCommand(self.program, self.arg0, self.args, {**self.env, **env}, self.inherit_env)

    def _packed(self) -> tuple[Any, ...]:
        return self.program, self.arg0, self.args, self.env, self.inherit_env

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BootstrapCommand) and self._packed() == other._packed()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BootstrapCommand(program={self.program!r}, args={self.args!r}, env={self.env!r})"


def default_bootstrap_cmd() -> BootstrapCommand:
    """The current interpreter, running the framework's bootstrap module."""
    return BootstrapCommand(sys.executable, None, ["-m", "monarch._src.actor.bootstrap_main"], {})


Bootstrap = Union[Callable[[], None], Callable[[], Awaitable[None]]]


class HostMesh(MeshTrait):
    """Hosts that can start processes. `this_host()`, or what `attach_to_workers` returns."""

    def __init__(self, hosts: tuple[Host, ...], shape: Shape, *, owned: bool = False, executable: str = "") -> None:
        self._hosts, self._shape, self._is_owned, self._executable = hosts, shape, owned, executable
        self._attached: list[Future[Any]] = []
        self._ended: Future[None] | None = None
        self._down = False
        self._meshes: list[ProcMesh] = []
        self.stream_logs = False
        self.is_fake_in_process = False

    # -- mesh

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Sequence[str]:
        return self._shape.labels

    @property
    def region(self) -> Region:
        return self._shape.region

    def _new_with_shape(self, shape: Shape) -> HostMesh:
        return self if shape == self._shape else HostMesh(self._hosts, shape, executable=self._executable)

    def _used(self) -> tuple[Host, ...]:
        return tuple(self._hosts[i] for i in self._shape.ndslice)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostMesh):
            return NotImplemented
        return self._used() == other._used() and self._dims() == other._dims() and (
            self.stream_logs, self.is_fake_in_process
        ) == (other.stream_logs, other.is_fake_in_process)  # fmt: skip

    def _dims(self) -> tuple[Any, ...]:
        return tuple(self._shape.labels), tuple(self._shape.ndslice.sizes)

    def __hash__(self) -> int:
        return hash((self._used(), self._dims()))

    def __reduce__(self) -> Any:
        return _rebuild, (tuple(map(tuple, self._hosts)), self._shape, self._executable)

    def __repr__(self) -> str:
        return f"HostMesh(shape={self._shape}, hosts={[h.address or 'local' for h in self._used()]})"

    # -- processes

    def spawn_procs(
        self,
        per_host: dict[str, int] | None = None,
        bootstrap: Bootstrap | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        env: Mapping[str, str | None] | Callable[[Point], Mapping[str, str | None]] | None = None,
    ) -> ProcMesh:
        """Starts processes on each host; returns at once, with the mesh of hosts' dims followed by `per_host`.

        `per_host`: dims of the processes of one host, default one process without a dim. `bootstrap`: runs once in
        each process before any actor. `proc_bind`: one dict per process of a host (`cpus`, or numactl's
        `cpunodebind`, `membind`, `physcpubind`). `bootstrap_command`, `env`: the command, or the environment, of each
        process, fixed or by its Point.

        Raises ValueError for overlapping dims, sizes below 1, a `proc_bind` of the wrong length. What goes wrong later
        surfaces on `initialized` and on calls.
        """
        if self._down:
            raise RuntimeError("HostMesh has already been shut down")
        per_host = dict(per_host or {})
        self._check(per_host, proc_bind)
        labels = [*self._shape.labels, *per_host]
        sizes = [*self._shape.ndslice.sizes, *per_host.values()]
        each = math.prod(per_host.values())
        extent = Extent(labels, sizes)
        node, cell = current_node(), current_here().cell
        hosts = self._used()
        base = new_mesh_id()
        label = label_of(name or "anon")
        shape = Shape(labels, Slice.new_row_major(sizes))
        mesh = ProcMesh(base, label, hosts, each, shape, tuple(self._shape.labels))
        ranks = {base | r: r for r in range(each * len(hosts))}
        wait = SpawnWait(node, ranks, lambda n: f"process {label}-{n & 0xFFFFFF}", f"{label}.spawn_procs()", len)
        wait.hosts = hosts
        _procs._futures[base] = wait.future

        def stop(reason: str) -> Future[None]:
            return cell.stop_mesh(base, lambda: mesh._stop(reason, node))

        mesh._owned = Owned(f"{label}-{base >> RANK_BITS:x}", lambda r: f"<process {label}-{r}>", stop, mesh)
        cell.own(base, ranks, lambda n: hosts[(n & RANK_MASK) // each], True, mesh._owned)
        error = self._commands(extent, each, bootstrap_command, env)
        commands: dict[int, Any] = {}
        if isinstance(error, dict):
            commands = error
        order = {
            "mesh_id": base,
            "name": label,
            "labels": labels,
            "sizes": sizes,
            "owner": (node.id, tuple(current_host()), cell.id),
            "mesh": mesh._new_reference(),
            "root": client.orders().get("root") or (node.id, tuple(current_host())),
            "config": store.snapshot_for_children(),
            "argv": list(sys.argv),
            "sys_path": list(sys.path),
            "version": __version__,
        }
        patches = _mock.get_actor_mock_registry_state()
        setup = bootstrap
        payload: tuple[Any, ...] = ()
        if setup is not None or patches:
            packed = pickling.dumps(_mock.with_patches(setup, patches) if patches else setup)
            payload = (packed.stream(), *packed.buffers)
        if isinstance(error, Exception):
            wait._close()
            wait.future._settle(error=error)
        else:
            for i, host in enumerate(hosts):
                mine = range(i * each, (i + 1) * each)
                body = {
                    **order,
                    "ranks": list(mine),
                    "host": tuple(host),
                    "bind": {r: proc_bind[r - i * each] for r in mine} if proc_bind else {},
                    "commands": {r: commands[r] for r in mine if r in commands},
                }
                control = pickling.dump_bytes(("spawn_procs", body))
                frame = Frame(CONTROL, host.agent, node.id, 0, (b"", control, *payload), reply=wait.ident)
                try:
                    node.send(frame, host)
                except NodeDown as e:
                    wait.node_down(host.agent, e.exit)
        _report_if_unnoticed(wait, cell, mesh, node)
        if self._is_owned:
            self._meshes.append(mesh)
        for callback in list(_procs._callbacks):
            callback(mesh)
        return mesh

    def _check(self, per_host: dict[str, int], proc_bind: list[dict[str, str]] | None) -> None:
        overlap = sorted(set(per_host) & set(self._shape.labels))
        if overlap:
            raise ValueError(
                f"per_host dims {list(per_host)} overlap with the hosts' dims {list(self._shape.labels)}: {overlap}"
            )
        for key, size in per_host.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"per_host[{key!r}] must be an int, not {size!r}")
            if size < 1:
                raise ValueError(f"per_host[{key!r}] must be at least 1, not {size}")
        each = math.prod(per_host.values())
        if proc_bind is not None:
            if len(proc_bind) != each:
                raise ValueError(f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({each})")
            for bind in proc_bind:
                if "cpus" in bind:
                    parse_cpus(bind["cpus"])

    def _commands(self, extent: Extent, each: int, command: Any, env: Any) -> dict[int, Any] | Exception:
        """rank -> packed command; an exception is what `initialized` will raise."""
        if command is None and env is None and not self._executable:
            return {}
        base = default_bootstrap_cmd()
        if self._executable:
            base.program = self._executable
        out: dict[int, Any] = {}
        for rank in range(extent.nelements):
            point = Point(rank, extent)
            made = command if command is not None else base
            try:
                if callable(command):
                    made = command(point)
                if not isinstance(made, BootstrapCommand):
                    return ValueError(
                        f"per-rank bootstrap callable did not return BootstrapCommand for {point}: {made!r}"
                    )
                extra = env(point) if callable(env) else env
            except Exception as e:
                return ValueError(f"per-rank bootstrap callable raised: {type(e).__name__}: {e}")
            out[rank] = (made.with_env(extra) if extra else made)._packed()
        return out

    def with_python_executable(self, path: str) -> HostMesh:
        """The same hosts; processes start with the interpreter `path`. This handle is not changed."""
        out = HostMesh(self._hosts, self._shape, owned=self._is_owned, executable=path)
        out._attached, out._meshes = self._attached, self._meshes
        return out

    # -- lifetime

    @property
    def initialized(self) -> Future[bool]:
        """True when every host was reached once; raises the attach error."""
        out: Future[bool] = Future._make()
        left = len(self._attached)
        if not left:
            return Future._of(True)
        lock = threading.Lock()

        def one() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            errors = [str(f._error) for f in self._attached if f._error is not None]
            if errors:
                text = f"attach failed: config push failed during attach on {len(errors)} host(s):\n"
                out._settle(error=RuntimeError(text + "\n".join(f"  {e}" for e in errors)))
            else:
                out._settle(True)

        for f in self._attached:
            f._on_ready(one)
        return out

    def _owner_only(self) -> None:
        if not self._is_owned:
            raise RuntimeError("cannot stop/shut down `HostMesh` that is a reference instead of owned")

    def stop(self) -> Future[None]:
        """Ends everything this client started on these hosts; the daemons stay. Owner only. Idempotent."""
        self._owner_only()
        return self._release(False)

    def shutdown(self) -> Future[None]:
        """As `stop`, and the daemons exit with status 0. Owner only; RuntimeError the second time."""
        self._owner_only()
        if self._down:
            raise RuntimeError("HostMesh has already been shut down")
        self._down = True
        return self._release(True)

    def _release(self, end_daemon: bool) -> Future[None]:
        from monarch.actor._mesh import StopWait

        node = current_node()
        for mesh in self._meshes:
            if mesh._owned is not None and mesh._stop_future is None:
                mesh._owned.stop("its hosts were stopped")
        self._meshes.clear()
        hosts = self._used()
        wait = StopWait(node, {h.agent: i for i, h in enumerate(hosts)})
        for i, host in enumerate(hosts):
            frame = node.control_frame(host.agent, "release_host", end_daemon, reply=wait.ident)
            frame.rank = i
            try:
                node.send(frame, host)
            except NodeDown:
                wait.done(i)
        return wait.future

    async def __aenter__(self) -> HostMesh:
        if self._down:
            raise RuntimeError("HostMesh has already been shut down")
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if not self._down:
            await self.shutdown()

    async def sync_workspace(self, workspace: Any, conda: bool = False, auto_reload: bool = False) -> None:
        if not self._is_owned:
            raise RuntimeError(
                "cannot call sync_workspace on a sliced host mesh or one that was sent over an actor endpoint"
            )
        raise RuntimeError("sync_workspace is not available in this version; share the code directory by other means")


def _rebuild(hosts: tuple[tuple[Any, ...], ...], shape: Shape, executable: str) -> HostMesh:
    return HostMesh(tuple(Host(*h) for h in hosts), shape, executable=executable)


_GRACE = 2.0  # seconds in which somebody may look at `initialized` before a failed start is a failure of the owner's


def _report_if_unnoticed(wait: SpawnWait, cell: Cell, mesh: ProcMesh, node: Node) -> None:
    """A mesh that did not start is a failure of an owned mesh; its owner is told unless somebody saw it already.

    A process that died on its way is reported as any death is; this is for bootstrap callables and commands.
    """

    def tell() -> None:
        error = wait.future.exception()
        if isinstance(error, (ActorError, ValueError)) and "it ended before it was ready" not in str(error):
            assert mesh._owned is not None
            ranks = sorted(mesh._nodes().values())
            name = mesh._owned.name
            cell.child_failed(MeshFailure(name, ranks, f"<processes {name}>", str(error)), mesh._base, False)

    def check() -> None:
        if not wait.future._seen and node.tree.is_live(cell.id, mesh._base):
            threading.Thread(target=tell, name="monarch-report", daemon=True).start()  # it unpickles the user's error

    def settled() -> None:
        if wait.failed():
            node.poller.call_later(_GRACE, check)

    wait.future._on_ready(settled)


def _one_host(host: Host) -> HostMesh:
    return HostMesh((host,), Shape([], Slice(offset=0, sizes=[], strides=[])))


def this_host() -> HostMesh:
    """The machine this code runs on, zero-dimensional (a reference)."""
    return _one_host(current_host())


def this_proc() -> ProcMesh:
    """The process this code runs in, zero-dimensional (a reference)."""
    return _procs.own_proc()


# -- worker daemons


class _Attach(Port):
    """The answer to one attach."""

    def __init__(self, alias: int, address: str) -> None:
        self.alias, self.address = alias, address
        self.future: Future[Any] = Future._make()

    def deliver(self, frame: Frame) -> None:
        if frame.flags & ERROR:
            self.future._settle(error=RuntimeError(f"{self.address}: the worker refused"))
        else:
            self.future._settle(True)

    def node_down(self, node: int, exit: Exit) -> None:
        if node == self.alias:
            self.future._settle(error=RuntimeError(f"{self.address}: {exit.detail or exit.describe()}"))

    def node_down_all(self, reason: str) -> None:
        self.future._settle(error=RuntimeError(f"{self.address}: {reason}"))


def attach_to_workers(
    *,
    private_key: bytes | None = None,
    ca: Any,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
) -> HostMesh:
    """The hosts served by worker daemons at the addresses `workers`; one dim, `hosts`. Returns at once.

    Connects in the background, retrying for `mesh_attach_config_timeout`; the outcome is on `initialized`. ValueError
    for a bad address or an empty list, or certificates that cannot be used. `ca` and `private_key`: whom to trust, see
    docs/guide/security.md.
    """
    texts = [w if isinstance(w, str) else w.get(timeout=60) for w in workers]
    if not texts:
        raise ValueError("attach_to_workers needs at least one worker address")
    wanted, trusts = [], []
    for t in texts:
        where = addresses.parse(t)
        trusts.append(trust.of(ca, private_key, where.scheme))
        wanted.append(trusts[-1].address(where))
    node = current_node()
    mesh_id = new_mesh_id()
    hosts = tuple(Host(mesh_id | i, str(a._replace(bind=""))) for i, a in enumerate(wanted))
    out = HostMesh(hosts, Shape(["hosts"], Slice.new_row_major([len(hosts)])), owned=True)
    limit = float(store.effective("mesh_attach_config_timeout"))
    node.trusts |= {host.address: how for host, how in zip(hosts, trusts)}
    for host in hosts:
        answer = _Attach(host.agent, host.address)
        reply = node.open_port(answer)
        node.dialling[host.agent] = []
        hello = node.control_frame(host.agent, "attach", store.snapshot_for_children(), reply=reply)
        hello.flags |= URGENT
        node.send(hello, host)
        out._attached.append(answer.future)
        threading.Thread(target=_dial, args=(node, host, limit), name="monarch-dial", daemon=True).start()
    return out


def _dial(node: Any, host: Host, limit: float) -> None:
    where = addresses.parse(host.address)
    end = time.monotonic() + limit
    pause = 0.01
    while True:
        try:
            sock = addresses.dial(where, max(0.1, end - time.monotonic()))
            break
        except OSError as e:
            if time.monotonic() + pause >= end:
                node.dial_failed(host.agent, Exit("lost", detail=f"cannot connect to {host.address}: {e}"))
                return
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)
    try:
        node.dialled(host.agent, sock, host.address)
    except (OSError, RuntimeError, ValueError) as e:
        sock.close()
        node.dial_failed(host.agent, Exit("lost", detail=str(e)))


def start_worker_loop_forever(*, private_key: bytes | None = None, ca: Any, address: str) -> Future[None]:
    """Serves this machine as a host at `address`, in the background; the future ends when a client shuts it down."""
    where = addresses.parse(address)
    how = trust.of(ca, private_key, where.scheme)
    from monarch.runtime.agent import HostAgent
    from monarch.runtime.node import Node

    ident = new_mesh_id()
    node = Node(ident, ident)
    node.name = "worker"
    agent = HostAgent(node, Host(ident, address))
    try:
        node.listen_to_hosts(str(where), how)
    except BaseException:
        agent.close()
        node.close()
        raise
    done: Future[None] = Future._make()

    def end() -> None:
        def close() -> None:
            agent.close()
            node.close()
            done._settle(None)

        threading.Thread(target=close, name="monarch-shutdown", daemon=True).start()

    agent.on_shutdown = end
    node.poller.start("monarch-runtime")
    return done


def run_worker_loop_until_shutdown(*, private_key: bytes | None = None, ca: Any, address: str) -> None:
    """Serves this machine as a host; returns when a client shuts it down."""
    start_worker_loop_forever(private_key=private_key, ca=ca, address=address).get()


def run_worker_loop_forever(*, private_key: bytes | None = None, ca: Any, address: str) -> None:
    """Serves this machine as a host until a client shuts it down; then the process exits with status 0."""
    run_worker_loop_until_shutdown(private_key=private_key, ca=ca, address=address)
    sys.exit(0)


def hosts_from_config(name: str) -> HostMesh:
    """Hosts listed in a configuration file; not available in this version."""
    raise NotImplementedError("hosts_from_config is not available in this version; use attach_to_workers")


def attach(addr: str) -> None:
    """Routes this client through one reachable worker; not available in this version."""
    raise NotImplementedError("attach is not available in this version; use attach_to_workers")


_unused = (os, socket)
