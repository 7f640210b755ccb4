"""One per process: its registrations, its paths to other processes, and what it answers to their questions."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from monarch.config import store
from monarch.rdma import _remote, _slab, _work
from monarch.rdma._handle import NOT_SHARED, Handle, machine
from monarch.rdma._memory import NO_GUARD, Region
from monarch.rdma._paths import Local, Path, SameHost
from monarch.rdma._peer import Gone, Peer, Refused, _never
from monarch.rdma._table import CUDA, SLAB, Table
from monarch.runtime import client
from monarch.runtime.failure import Exit
from monarch.runtime.future import Future
from monarch.runtime.node import Node, Port
from monarch.wire import pickling
from monarch.wire.frames import Frame

log = logging.getLogger("monarch.rdma")

_lock = threading.Lock()
_manager: Manager | None = None


def manager() -> Manager:
    """This process's manager, made at first use; in the script, that makes the client too."""
    global _manager
    found = _manager
    node = client.current_node()
    if found is not None and found.node is node:
        return found
    with _lock:
        if _manager is None or _manager.node is not node:
            _manager = Manager(node)
        return _manager


class Manager:
    """See the module's text."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.host = client.current_host()
        self.table = Table(node.poller.call_later)
        self.local = Local(self.table)
        self._paths: dict[tuple[int, int, bool], Path] = {}
        self._refused: set[int] = set()  #: processes that the kernel does not let us look into
        self._unmappable: set[int] = set()
        self._lock = threading.Lock()
        self._finding = threading.Lock()  #: one asks; the others find the answer
        if node.agent is None:
            node.tell(node.agent_id, "rdma_table", self.table.pid, self.table.address, self.table.cookie)
        node.control["rdma_drop"] = self._on_drop
        node.control["rdma_ipc"] = self._on_ipc
        node.control["rdma_nixl"] = self._on_nixl
        node.control["rdma_nixl_busy"] = self._on_nixl_busy
        self.nixl: Any = None  #: the adapter, once somebody needed it
        node.on_node_down.append(self._on_node_down)

    # -- the owner's side

    def register(self, region: Region) -> Handle:
        flags, shared = (CUDA if region.device != "cpu" else 0), NOT_SHARED
        found = _slab.find(region.address, region.nbytes)
        if found is not None:  # it stays where it is for as long as we hold the arena
            flags, shared = flags | SLAB, found[0]
            region = region._replace(guard=NO_GUARD, keep=(region.keep, found[1]))
        slot = self.table.add(region, flags)
        return Handle(
            self.node.id, self.host, machine(), os.getpid(), self.table.address, self.table.cookie, slot,
            max(self.table.fd, 0), shared, self.node.name,
        )  # fmt: skip

    def _on_nixl(self, frame: Frame, ident: int) -> None:
        from monarch.rdma import _nixl

        _nixl.on_ask(self, frame, ident)

    def _on_nixl_busy(self, frame: Frame) -> None:
        if self.nixl is not None:
            _work.submit(self.nixl.expect)

    def _forget_registration(self, ident: int) -> None:
        self.table.drop(ident)
        if self.nixl is not None:
            _work.submit(lambda: self.nixl.forget(ident))

    def _on_drop(self, frame: Frame, ident: int) -> None:
        self._forget_registration(ident)
        self.node.reply(frame, 0, (b"", pickling.dumps(None).stream()))

    def _on_ipc(self, frame: Frame, ident: int) -> None:
        """Another process of this host wants to map GPU memory."""

        def do() -> None:
            from monarch.rdma import _cuda

            region = self.table.get(ident)
            shared = _cuda.share(region) if region is not None else None
            self.node.reply(frame, 0, (b"", pickling.dumps(shared).stream()))

        _work.submit(do)

    def drop(self, handle: Handle) -> Future[None]:
        if handle.node == self.node.id:
            self._forget_registration(handle.slot.id)
            return Future._of(None)
        port = Answer(self.node, (handle.node, handle.host.agent), gone_is_fine=True)
        if not self.node.tell(handle.node, "rdma_drop", handle.slot.id, host=handle.host, reply=port.ident):
            port.settle(None)
        return port.future

    # -- the initiator's side

    def path(self, handle: Handle) -> Path | None:
        """The path to a buffer, if it is known or can be found without waiting."""
        if handle.node == self.node.id:
            return self.local
        slab = handle.slot.flags & SLAB and handle.node not in self._unmappable
        found = self._paths.get((handle.node, handle.cookie, bool(slab)))
        if found is not None:
            return found
        if slab and handle.machine == machine() != 0 and not store.effective("rdma_disable_vm_access"):
            try:
                return self._keep(handle, _slab.Mapped(handle))
            except Refused as e:
                log.info("%s: its memory cannot be mapped (%s): taking the next path", handle.owner, e)
                self._unmappable.add(handle.node)
                return self.path(handle)
        if self.same_machine(handle):
            try:
                peer = Peer(handle.pid, handle.table, handle.cookie)
            except Refused as e:
                log.info("%s: the kernel refuses access to its memory (%s): taking the next path", handle.owner, e)
                self._refused.add(handle.node)
                return None
            return self._keep(handle, SameHost(peer))
        return None

    def find_path(self, handle: Handle, cancelled: Callable[[], bool] = _never) -> Path:
        """The path to a buffer, for which its host may have to be asked. Raises Refused, Gone, Cancelled."""
        with self._finding:
            return self.path(handle) or self._keep(handle, _remote.find(self, handle, cancelled))

    def same_machine(self, handle: Handle) -> bool:
        return (
            handle.machine == machine() != 0
            and handle.node not in self._refused
            and not handle.slot.flags & CUDA
            and not store.effective("rdma_disable_vm_access")
        )

    def _keep(self, handle: Handle, path: Path) -> Path:
        with self._lock:
            kept = self._paths.setdefault((handle.node, handle.cookie, path.name == "slab"), path)
        if kept is path:
            log.info("transfers with %s take the path %r", handle.owner, path.name)
        else:
            path.close()
        return kept

    def refuse(self, handle: Handle) -> None:
        """The path that was taken does not work after all."""
        known = self._paths.get((handle.node, handle.cookie, True))
        (self._unmappable if known is not None else self._refused).add(handle.node)
        self.forget(handle)

    def forget(self, handle: Handle) -> None:
        """The next transfer looks for a path again."""
        with self._lock:
            paths = [self._paths.pop((handle.node, handle.cookie, slab), None) for slab in (True, False)]
        for path in paths:
            if path is not None:
                path.close()

    def how_it_ended(self, handle: Handle) -> str:
        exit = self.node.exit_of(handle.node, handle.host)
        return f": {exit.describe()}" if exit is not None else ""

    def _on_node_down(self, node: int, exit: Exit) -> None:
        with self._lock:
            gone = [k for k in self._paths if k[0] == node]
            paths = [self._paths.pop(k) for k in gone]
        self._refused.discard(node)
        self._unmappable.discard(node)
        for path in paths:
            path.close()


class Answer(Port):
    """One answer to a control message, or the news that nobody is left to give it."""

    def __init__(self, node: Node, who: tuple[int, ...], *, gone_is_fine: bool = False) -> None:
        self.node, self.who, self._fine = node, who, gone_is_fine
        self.future: Future[Any] = Future._make()
        self.ident = node.open_port(self)

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        self.node.close_port(self.ident)
        if error is not None and self._fine:
            value = error = None
        self.future._settle(value, error)

    def deliver(self, frame: Frame) -> None:
        self.settle(None if self._fine else [bytes(p) if type(p) is not bytes else p for p in frame.parts])

    def node_down(self, node: int, exit: Exit) -> None:
        if node in self.who:
            self.settle(error=Gone(exit.describe()))

    def node_down_all(self, reason: str) -> None:
        self.settle(error=Gone(reason))
