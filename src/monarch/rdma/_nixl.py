"""RDMA NICs through `nixl`: UCX for InfiniBand and RoCE, libfabric for EFA. Optional, imported at first need.

Owners register a region when the first reader asks for it, and hand out the agent's metadata. A reader fetches the
data, then the owner's slot, and so notices a drop. Agents have no progress thread of their own: the reader polls while
it waits, and tells the owner that work is in flight, which polls meanwhile (connections are set up that way; some
transports need it for each transfer).
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch.config import store
from monarch.rdma import _work
from monarch.rdma._backends import is_ibverbs_available
from monarch.rdma._handle import Handle
from monarch.rdma._paths import Op, Path
from monarch.rdma._peer import Cancelled, Dropped, Gone, Refused
from monarch.rdma._table import READONLY, SLOT, SLOTS
from monarch.wire import pickling
from monarch.wire.frames import Frame

if TYPE_CHECKING:
    from monarch.rdma._manager import Manager

#: seconds for which an owner polls after it heard of work, and after which a reader at work says so again
_LEASE, _RENEW = 1.0, 0.3
_TICK = 20e-6


def usable() -> bool:
    """Whether this process takes this path: by the configuration, a NIC, and the library."""
    wanted = str(store.effective("rdma_nixl"))
    if wanted not in ("auto", "on"):
        return False
    if wanted == "auto" and (not is_ibverbs_available() or store.effective("rdma_disable_ibverbs")):
        return False
    return importlib.util.find_spec("nixl") is not None


def _backend() -> str:
    drivers = [os.path.basename(os.path.realpath(d)) for d in glob.glob("/sys/class/infiniband/*/device/driver")]
    return "LIBFABRIC" if "efa" in drivers else "UCX"


def _memory(device: str) -> tuple[str, int]:
    """(nixl's kind of memory, number of the device) of a device as torch names it."""
    return ("DRAM", 0) if device == "cpu" else ("VRAM", int(device.partition(":")[2] or 0))


class Adapter:
    """This process's agent. Thread-safe: one call at a time goes into the library."""

    def __init__(self, manager: Manager) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,unused-ignore]

        self.manager, self.lock = manager, threading.RLock()
        self.name = f"monarch-{manager.node.id:x}-{manager.table.cookie:x}"
        self.backend = _backend()
        self.agent: Any = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=[self.backend]))
        if self.backend not in self.agent.backends:
            raise Refused(f"nixl has no {self.backend} backend here")
        self._registered: dict[int, Any] = {}
        self._table: Any = None
        self._until = 0.0
        self._polling = False

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Any:
        kind, number = _memory(device)
        with self.lock:
            return self.agent.register_memory([(address, nbytes, number, "")], kind, backends=[self.backend])

    def deregister(self, descs: Any) -> None:
        with self.lock:
            self.agent.deregister_memory(descs, backends=[self.backend])

    # -- the owner's side

    def offer(self, ident: int) -> tuple[str, bytes]:
        """(agent, metadata) for readers of a registration. Raises Dropped."""
        region = self.manager.table.get(ident)
        if region is None:
            raise Dropped("it was dropped")
        with self.lock:
            if self._table is None:
                self._table = self.register(self.manager.table.address, SLOTS * SLOT)
            if ident not in self._registered:
                self._registered[ident] = self.register(region.address, region.nbytes, region.device)
            self.expect()
            return self.name, self.agent.get_agent_metadata()

    def forget(self, ident: int) -> None:
        with self.lock:
            descs = self._registered.pop(ident, None)
            if descs is not None:
                self.deregister(descs)

    def expect(self) -> None:
        """Somebody is at work with our memory: polls for a while."""
        with self.lock:
            self._until = time.monotonic() + _LEASE
            if self._polling:
                return
            self._polling = True
        threading.Thread(target=self._poll, name="monarch-rdma-nixl", daemon=True).start()

    def _poll(self) -> None:
        while True:
            with self.lock:
                if time.monotonic() > self._until:
                    self._polling = False
                    return
                self.agent.update_notifs()
            time.sleep(_TICK)  # the library has nothing to wait on

    # -- the reader's side

    def transfer(
        self, kind: str, local: tuple[int, int, int], remote: tuple[int, int, int], types: tuple[str, str],
        agent: str, cancelled: Callable[[], bool], busy: Callable[[], None],
    ) -> None:  # fmt: skip
        """Runs one transfer to its end. Raises Cancelled, OSError."""
        with self.lock:
            here = self.agent.get_xfer_descs([local], types[0])
            there = self.agent.get_xfer_descs([remote], types[1])
            handle = self.agent.initialize_xfer(kind, here, there, agent, backends=[self.backend])
            state = self.agent.transfer(handle)
        try:
            while state == "PROC":
                if cancelled():
                    raise Cancelled
                busy()
                with self.lock:
                    state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"nixl reports {state}")
        finally:
            with self.lock:
                handle.release()


class Nixl(Path):
    """The way to one owner."""

    name = "nixl"

    def __init__(self, manager: Manager, handle: Handle) -> None:
        self.manager, self.owner = manager, handle
        self.adapter = adapter(manager)
        self._known: set[int] = set()
        self._agent = ""
        self._told = 0.0
        self._word = (ctypes.c_uint64 * 8)()
        self._word_descs = self.adapter.register(ctypes.addressof(self._word), SLOT)
        self._lock = threading.Lock()
        self._learn(handle)

    def _learn(self, handle: Handle) -> None:
        """Asks the owner for what its agent needs us to know of a registration. Raises Refused, Dropped, Gone."""
        from monarch.rdma._manager import Answer

        node = self.manager.node
        answer = Answer(node, (handle.node, handle.host.agent))
        if not node.tell(handle.node, "rdma_nixl", handle.slot.id, host=handle.host, reply=answer.ident):
            answer.settle()
            raise Gone
        kind, *got = pickling.loads(answer.future.get(timeout=30)[1])
        if kind == "dropped":
            raise Dropped("it was dropped")
        if kind != "ok":
            raise Refused(f"its owner does not use nixl: {got[0]}")
        with self.adapter.lock:
            if self._agent:
                self.adapter.agent.remove_remote_agent(self._agent)
            self._agent = self.adapter.agent.add_remote_agent(got[1])
            if isinstance(self._agent, bytes):
                self._agent = self._agent.decode()
        self._told = time.monotonic()
        self._known.add(handle.slot.id)

    def _busy(self) -> None:
        now = time.monotonic()
        if now - self._told > _RENEW:
            self._told = now
            self.manager.node.tell(self.owner.node, "rdma_nixl_busy", host=self.owner.host)

    def run(self, op: Op, cancelled: Callable[[], bool]) -> None:
        handle, slot = op.handle, op.handle.slot
        with self._lock:
            if slot.id not in self._known:
                self._learn(handle)
            self._busy()
            if op.write:
                self._check(op, cancelled)
            local = self.adapter.register(op.local.address, op.nbytes, op.local.device)
            try:
                kind, number = _memory(op.local.device)
                types = (kind, "VRAM" if handle.gpu else "DRAM")
                at = 0
                pieces = [(op.offset, op.nbytes)] if op.runs is None else op.runs.parts(op.offset, 0, op.nbytes)
                for offset, n in pieces:
                    self.adapter.transfer(
                        "WRITE" if op.write else "READ", (op.local.address + at, n, number),
                        (slot.address + offset, n, 0), types, self._agent, cancelled, self._busy,
                    )  # fmt: skip
                    at += n
            except Exception as e:
                if isinstance(e, (Cancelled, OSError)) and not self._dead():
                    self._check(op, cancelled)
                    raise
                if isinstance(e, Cancelled):
                    raise
                raise Gone(*([str(e)] if self._dead() is None else [])) from None
            finally:
                self.adapter.deregister(local)
            self._check(op, cancelled)

    def _dead(self) -> Any:
        return self.manager.node.exit_of(self.owner.node, self.owner.host)

    def _check(self, op: Op, cancelled: Callable[[], bool]) -> None:
        slot = op.handle.slot
        if not 0 < slot.at < SLOTS:
            raise Dropped("there is no such registration")
        try:
            self.adapter.transfer(
                "READ", (ctypes.addressof(self._word), SLOT, 0), (self.owner.table + slot.at * SLOT, SLOT, 0),
                ("DRAM", "DRAM"), self._agent, cancelled, self._busy,
            )  # fmt: skip
        except Cancelled:
            raise
        except Exception as e:
            raise Gone(str(e)) from None
        if self._word[0] != slot.id:
            self._known.discard(slot.id)
            raise Dropped("it was dropped")
        if (self._word[1], self._word[2]) != (slot.address, slot.size) or op.end > self._word[2]:
            raise Dropped("the handle does not match the registration")
        if op.write and self._word[6] & READONLY:
            raise PermissionError("the buffer is read-only memory")

    def close(self) -> None:
        with self.adapter.lock:
            if self._word_descs is not None:
                self.adapter.deregister(self._word_descs)
                self._word_descs = None


_making = threading.Lock()


def adapter(manager: Manager) -> Adapter:
    """The manager's adapter, made at first use. Raises Refused."""
    with _making:
        if manager.nixl is None:
            try:
                manager.nixl = Adapter(manager)
            except Refused:
                raise
            except Exception as e:
                raise Refused(f"nixl: {e}") from None
        found: Adapter = manager.nixl
        return found


def on_ask(manager: Manager, frame: Frame, ident: int) -> None:
    """A reader wants to reach a registration of ours."""

    def do() -> None:
        try:
            answer: tuple[Any, ...] = ("ok", *adapter(manager).offer(ident)) if usable() else ("no", "not set up there")
        except Dropped:
            answer = ("dropped",)
        except Exception as e:
            answer = ("no", f"{type(e).__name__}: {e}")
        manager.node.reply(frame, 0, (b"", pickling.dumps(answer).stream()))

    _work.submit(do)
