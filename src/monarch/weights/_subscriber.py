"""The generator's side: fetches the newest complete version when it wants to."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from monarch.rdma import RDMABuffer, RDMABufferDroppedError, RDMAOwnerDiedError
from monarch.weights import _control
from monarch.weights._control import Head
from monarch.weights._errors import LayoutMismatch, WeightsLapped
from monarch.weights._layout import WeightLayout, Weights, named_tensors
from monarch.weights._publisher import WeightHandle

#: seconds between two looks at the publisher's version while waiting for one
_LOOK = 0.001


class WeightSubscriber:
    """Keeps `target`'s weights up to date with a publisher's.

    source          a WeightHandle, or an actor (a mesh of one) with the `WeightSource` endpoints: then a restarted
                    trainer is found again
    target          a module or a dict of tensors; written in place, outside autograd: a complete version or nothing
    retries         reads that may be overtaken by the publisher before WeightsLapped
    allow_rollback  take a version older than ours when the publisher was restarted with it
    lease           keep the publisher from reusing the slot while we read it (its `on_lap` must be "lease")

    One thread at a time. Raises LayoutMismatch when the parameters differ.
    """

    def __init__(
        self, source: Any, target: Weights, *, retries: int = 10, allow_rollback: bool = False, lease: bool = False
    ) -> None:
        self._actor = None if isinstance(source, WeightHandle) else source
        self._target = target
        self._retries, self._rollback, self._lease = retries, allow_rollback, lease
        self._version = -1
        self._lock = threading.Lock()
        self._stats = {"bytes": 0, "seconds": 0.0, "retries": 0, "skipped": 0, "syncs": 0}
        self._path = ""
        self._watching: threading.Thread | None = None
        self._closed = False
        self._reader = random.SystemRandom().getrandbits(62) | 1
        self._cell = random.randrange(_control.CELLS)
        self._leases = 0
        self._head = Head()
        self._incarnation = self._applied_incarnation = 0
        self._generation = -1
        self._slots: list[RDMABuffer] = []
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []
        self._devices: list[str] = []
        self._layout: WeightLayout | None = None
        self._handle: WeightHandle | None = None
        if self._actor is None:
            self._adopt(source)

    # -- what is there

    @property
    def version(self) -> int:
        """The version that `target` holds; -1 before the first sync."""
        return self._version

    def stats(self) -> dict[str, Any]:
        """bytes and seconds of all syncs, how many syncs, retries after being overtaken, skipped (nothing newer), path.

        `path` is the rung of `RDMABuffer.path`, or "message" where the weights came in an ordinary reply.
        """
        return {**self._stats, "path": self._path}

    def sync(self, min_version: int | None = None, timeout: float = 60) -> int | None:
        """Applies the newest version if it is newer than ours; returns it, or None when there is none.

        min_version  wait until at least that version is published
        timeout      seconds for everything

        Raises WeightsLapped, TimeoutError (min_version did not appear), LayoutMismatch, RDMAOwnerDiedError when the
        publisher is gone and there is no actor to ask for its successor.
        """
        with self._lock:
            return self._sync(min_version, time.monotonic() + timeout, timeout)

    async def sync_async(self, min_version: int | None = None, timeout: float = 60) -> int | None:
        """As `sync`, on another thread, for coroutines."""
        return await asyncio.to_thread(self.sync, min_version, timeout)

    # -- how

    def _sync(self, min_version: int | None, end: float, timeout: float) -> int | None:
        start = time.perf_counter()
        while True:
            if self._handle is None and not self._find(end):
                return self._by_message(start)
            try:
                version = self._look(end)
                while min_version is not None and version < min_version:
                    if time.monotonic() >= end:
                        raise TimeoutError(f"version {min_version} was not published in {timeout} s: it is {version}")
                    time.sleep(_LOOK)  # the publisher does not know of us: its memory is looked at again
                    version = self._look(end)
                if not self._is_news(version):
                    self._stats["skipped"] += 1
                    return None
                got = self._fetch(end)
                break
            except (RDMAOwnerDiedError, RDMABufferDroppedError):
                if self._actor is None or time.monotonic() >= end:
                    raise
                self._handle = None
        self._apply()
        self._version = got
        self._stats["bytes"] += self._staging.numel()
        self._stats["seconds"] += time.perf_counter() - start
        self._stats["syncs"] += 1
        return got

    def _is_news(self, version: int) -> bool:
        if version > self._version:
            return True
        return self._rollback and self._incarnation != self._applied_incarnation and version >= 0

    def _find(self, end: float) -> bool:
        """Asks the actor for a handle; False when it has none to give."""
        assert self._actor is not None
        with_layout = self._layout is None
        handle = self._actor.weight_handle.call_one(with_layout).get(timeout=max(0.01, end - time.monotonic()))
        if handle is None:
            return False
        self._adopt(handle)
        return True

    def _adopt(self, handle: WeightHandle) -> None:
        if handle.layout is not None:
            if self._layout is None or handle.layout != self._layout:
                self._fit(handle.layout)
        elif self._layout is None:
            raise ValueError("the handle has no layout, and this subscriber has none yet: use handle(layout=True)")
        self._handle, self._generation, self._slots = handle, -1, []
        self._incarnation = handle.incarnation

    def _fit(self, layout: WeightLayout) -> None:
        mine = WeightLayout.from_module(self._target)
        layout.check(mine, dtypes=False)
        tensors = named_tensors(self._target)
        for e in layout.entries:
            if tensors[e.name].is_floating_point() != e.torch_dtype.is_floating_point:
                raise LayoutMismatch(f"{e.name!r} is published as {e.dtype}, the target has {tensors[e.name].dtype}")
        cuda = any(t.is_cuda for t in tensors.values())
        self._staging = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=cuda)
        views = layout.views(self._staging)
        shared: set[int] = set()
        pairs = []
        for e in layout.entries:
            t = tensors[e.name]
            if e.nbytes and t.data_ptr() not in shared:  # tied on our side: written once
                shared.add(t.data_ptr())
                pairs.append((e.name, views[e.name]))
        self._names, self._values = [n for n, _ in pairs], [v for _, v in pairs]
        self._devices = sorted({str(t.device) for t in tensors.values() if t.is_cuda})
        self._layout = layout

    def _look(self, end: float) -> int:
        """Fetches the head of the publisher's page; the current version."""
        assert self._handle is not None
        self._handle.page.read_into(
            self._head.memory, nbytes=_control.HEAD_BYTES, timeout=max(0.001, end - time.monotonic())
        ).get()
        self._head.check()
        return self._head.version

    def _fetch(self, end: float) -> int:
        """The newest version, complete, in `_staging`."""
        assert self._handle is not None and self._layout is not None
        tried: list[int] = []
        head = self._head
        if head.layout != self._layout.fingerprint:
            raise LayoutMismatch("the publisher's layout is not the one that this subscriber was given")
        for attempt in range(self._retries + 1):
            if attempt:
                self._stats["retries"] += 1
                self._look(end)
            i = head.current
            before = head.slot(i)
            tried.append(before.version)
            if before.stamp & 1:
                continue
            slot = self._slot(i, end)
            if self._lease:
                self._take_lease(i, end)
            try:
                left = max(0.001, end - time.monotonic())
                slot.read_into(self._staging, nbytes=self._layout.nbytes, timeout=left).get()
            finally:
                if self._lease:
                    self._give_lease_back(end)
            self._look(end)
            if head.slot(i).stamp != before.stamp:
                continue
            if before.checksum and zlib.crc32(memoryview(self._staging.numpy())) != before.checksum:
                continue
            self._path = slot.path()
            self._applied_incarnation = head.incarnation
            return before.version
        error = WeightsLapped(
            f"{len(tried)} reads were overtaken by the publisher, of versions {tried}: use more slots, or "
            'WeightPublisher(on_lap="lease") and WeightSubscriber(lease=True)'
        )
        error.versions = tuple(tried)
        raise error

    def _slot(self, i: int, end: float) -> RDMABuffer:
        assert self._handle is not None
        if self._generation != self._head.generation or i >= len(self._slots):
            self._slots = _control.directory(self._handle.page, self._head.slots, max(0.001, end - time.monotonic()))
            self._generation = self._head.generation
        return self._slots[i]

    def _take_lease(self, i: int, end: float) -> None:
        self._leases += 1
        self._write_cell(i + 1, end)

    def _give_lease_back(self, end: float) -> None:
        with contextlib.suppress(RDMAOwnerDiedError, RDMABufferDroppedError):
            self._write_cell(0, end)

    def _write_cell(self, slot: int, end: float) -> None:
        assert self._handle is not None
        cell = bytearray(_control.CELL_BYTES)
        memoryview(cell).cast("q")[:] = memoryview(
            b"".join(x.to_bytes(8, "little") for x in (self._reader, slot, self._leases))
        ).cast("q")
        self._handle.page.write_from(
            cell, offset=_control.cell_at(self._cell), timeout=max(0.001, end - time.monotonic())
        ).get()

    def _apply(self) -> None:
        tensors = named_tensors(self._target)
        with torch.no_grad():
            torch._foreach_copy_([tensors[n] for n in self._names], self._values)
            for device in self._devices:
                torch.cuda.current_stream(device).synchronize()  # the staging memory is reused by the next sync

    def _by_message(self, start: float) -> int | None:
        """The actor has no memory to offer: the weights come in its reply."""
        assert self._actor is not None
        if self._actor.weight_version.call_one().get(timeout=60) <= self._version:
            self._stats["skipped"] += 1
            return None
        state, version = self._actor.weight_state_dict.call_one().get(timeout=60)
        layout = WeightLayout.from_module(state)
        if self._layout is None:
            self._fit(layout)
        tensors = named_tensors(self._target)
        with torch.no_grad():
            for name in self._names:
                tensors[name].copy_(state[name])
        self._version, self._path = version, "message"
        self._stats["bytes"] += layout.nbytes
        self._stats["seconds"] += time.perf_counter() - start
        self._stats["syncs"] += 1
        return int(version)

    # -- being told

    def watch(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(version)` for each new version, on a thread of its own, until `close`.

        Needs an actor as source. Raises ValueError without one, RuntimeError when already watching.
        """
        if self._actor is None:
            raise ValueError("watch needs a WeightSubscriber made with an actor, not with a handle")
        if self._watching is not None:
            raise RuntimeError("this WeightSubscriber is watching already")
        from monarch.actor import Channel

        port, receiver = Channel[int].open()
        self._actor.weight_notify.call_one(port).get(timeout=60)

        def run() -> None:
            while not self._closed:
                try:
                    version = receiver.recv().get(timeout=0.5)
                except TimeoutError:
                    continue
                except Exception:
                    return  # the publisher is gone
                callback(version)

        self._watching = threading.Thread(target=run, name="monarch-weights-watch", daemon=True)
        self._watching.start()

    def close(self) -> None:
        """Ends `watch`. Idempotent."""
        self._closed = True
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join(5)

    def __repr__(self) -> str:
        return f"<WeightSubscriber at version {self._version}, {self._layout}>"
