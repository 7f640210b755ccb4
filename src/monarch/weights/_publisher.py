"""The trainer's side: versions of its weights, in slots that readers fetch by themselves."""

from __future__ import annotations

import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Literal

import torch

from monarch.rdma import RDMABuffer
from monarch.weights import _control
from monarch.weights._control import Page
from monarch.weights._layout import WeightLayout, Weights, named_tensors

if TYPE_CHECKING:
    from monarch.actor import Port

#: seconds after which the lease of a reader that went silent no longer holds a slot
LEASE = 2.0


class WeightHandle:
    """What a subscriber needs: the publisher's page, and the layout. Picklable; without the layout under 400 bytes."""

    __slots__ = ("incarnation", "layout", "page", "version")

    def __init__(self, incarnation: int, page: RDMABuffer, layout: WeightLayout | None, version: int) -> None:
        self.incarnation = incarnation
        self.page = page
        self.layout = layout
        self.version = version  #: when the handle was made

    def __repr__(self) -> str:
        return f"<WeightHandle of {self.page.owner}, version {self.version}, {self.layout}>"

    def __reduce__(self) -> Any:
        return WeightHandle, (self.incarnation, self.page, self.layout, self.version)


class WeightPublisher:
    """Publishes versions of `source`'s weights; readers on any host fetch them one-sided.

    source         a module or a dict of tensors; its values are copied at each `publish`
    slots          versions kept, 2..32; a reader is overtaken when `slots - 1` versions appear while it reads
    staging        "auto": pinned host memory when the weights are on a GPU, plain memory else; "cpu", "pinned"
    dtype          what floating point weights are published as (torch.bfloat16 halves the bytes); None: as they are
    checksum       readers verify a CRC-32 of each version (about 1 s per GB on either side)
    on_lap         "detect": publish never waits; an overtaken reader notices and takes a newer version.
                   "lease": a slot that is being read is not reused
    lease_policy   when all other slots are leased: "wait" for one (at most 2 s, when leases expire) or "grow"
    start_version  of what is published by the constructor

    Not thread-safe: one thread publishes. Raises ValueError for bad arguments.
    """

    def __init__(
        self,
        source: Weights,
        *,
        slots: int = 3,
        staging: Literal["auto", "cpu", "pinned"] = "auto",
        dtype: torch.dtype | None = None,
        checksum: bool = False,
        on_lap: Literal["detect", "lease"] = "detect",
        lease_policy: Literal["wait", "grow"] = "wait",
        start_version: int = 0,
    ) -> None:
        _one_of("staging", staging, ("auto", "cpu", "pinned"))
        _one_of("on_lap", on_lap, ("detect", "lease"))
        _one_of("lease_policy", lease_policy, ("wait", "grow"))
        if not 2 <= slots <= _control.MAX_SLOTS:
            raise ValueError(f"slots must be between 2 and {_control.MAX_SLOTS}, got {slots}")
        if start_version < 0:
            raise ValueError(f"start_version must not be negative, got {start_version}")
        self._source = source
        self._dtype = dtype
        self.layout = WeightLayout.from_module(source, dtype=dtype)
        self._places = self.layout.unique()
        tensors = named_tensors(source)
        self._cuda = sorted({str(t.device) for t in tensors.values() if t.is_cuda})
        self._pinned = staging == "pinned" or (staging == "auto" and bool(self._cuda))
        self._checksum, self._on_lap, self._lease_policy = checksum, on_lap, lease_policy
        self._page = Page(self.layout.nbytes, self.layout.fingerprint)
        self._slots: list[torch.Tensor] = []
        self._views: list[list[torch.Tensor]] = []
        self._buffers: list[RDMABuffer] = []
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        self._watchers: list[Port[int]] = []
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(slots):
            self._add_slot()
        self._publish(start_version)

    def _add_slot(self) -> int:
        slot = torch.empty(self.layout.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        views = self.layout.views(slot)
        self._slots.append(slot)
        self._views.append([views[e.name] for e in self._places])
        if self._page.buffer is None:
            return self._page.add_slot(None)
        self._buffers.append(RDMABuffer(slot))
        return self._page.add_slot(self._buffers[-1])

    @property
    def version(self) -> int:
        """The current version."""
        return self._page.version

    @property
    def incarnation(self) -> int:
        """A number of this publisher: a restarted trainer has another."""
        return self._page.incarnation

    @property
    def slots(self) -> int:
        return self._page.slots

    @property
    def shared(self) -> bool:
        """Whether readers can fetch by themselves; False where memory cannot be shared."""
        return self._page.buffer is not None

    def handle(self, *, layout: bool = True) -> WeightHandle:
        """For subscribers; send it in any message. `layout=False` for those that have it already.

        Raises RuntimeError where memory cannot be shared (`get_rdma_backend()` was "none").
        """
        if self._page.buffer is None:
            raise RuntimeError(
                "memory cannot be shared here: give WeightSubscriber the actor, and the weights come by message"
            )
        return WeightHandle(self.incarnation, self._page.buffer, self.layout if layout else None, self.version)

    def publish(self) -> int:
        """Copies the current values into a slot and makes that the current version, one higher; returns it.

        Raises LayoutMismatch when the source's parameters have changed shape or names, RuntimeError after `close`.
        """
        return self._publish(self._page.version + 1)

    def _publish(self, version: int) -> int:
        if self._closed:
            raise RuntimeError("this WeightPublisher was closed")
        tensors = named_tensors(self._source)
        values = []
        for e in self._places:
            t = tensors.get(e.name)
            if t is None or tuple(t.shape) != e.shape:
                self.layout.check(WeightLayout.from_module(self._source, dtype=self._dtype))
            else:
                values.append(t)
        i = self._next_slot()
        self._page.begin(i)
        with torch.no_grad():
            if self._cuda:
                for view, t in zip(self._views[i], values, strict=True):
                    view.copy_(t, non_blocking=self._pinned)
                for device in self._cuda:
                    torch.cuda.current_stream(device).synchronize()
            else:
                torch._foreach_copy_(self._views[i], values)
        crc = zlib.crc32(memoryview(self._slots[i].numpy())) if self._checksum else 0
        self._page.finish(i, version, crc)
        for port in self._watchers:
            port.send(version)
        return version

    def _next_slot(self) -> int:
        n, current = self._page.slots, self._page.current
        if self._page.version < 0:
            return 0
        if self._on_lap == "detect":
            return (current + 1) % n
        end = time.monotonic() + 2 * LEASE
        while True:
            leased = self._leased()
            for step in range(1, n):
                i = (current + step) % n
                if i not in leased:
                    return i
            if self._lease_policy == "grow" and n < _control.MAX_SLOTS:
                return self._add_slot()
            if time.monotonic() > end:  # cannot be: every lease has expired by now
                return (current + 1) % n
            time.sleep(0.0005)  # readers say in our memory that they are done: there is nothing to wait on

    def _leased(self) -> set[int]:
        """Slots that somebody reads; a lease that does not change for LEASE seconds, by our clock, has expired."""
        now, out, seen = time.monotonic(), set(), {}
        for reader, slot, count in self._page.cells():
            mark, since = self._seen.get(reader, (None, now))
            if mark != (slot, count):
                mark, since = (slot, count), now
            seen[reader] = ((slot, count), since)
            if now - since < LEASE:
                out.add(slot)
        self._seen = seen
        return out

    def notify(self, port: Port[int]) -> None:
        """`port` is sent each new version from now on."""
        self._watchers.append(port)

    def state_dict(self) -> tuple[dict[str, torch.Tensor], int]:
        """A copy of the current version, for readers that cannot reach our memory."""
        i = self._page.current
        return {k: v.clone() for k, v in self.layout.views(self._slots[i]).items()}, self._page.version

    def current_slot(self) -> tuple[torch.Tensor, int]:
        """The bytes of the current version, and its number; valid until `slots - 1` more are published."""
        return self._slots[self._page.current], self._page.version

    def close(self) -> None:
        """Ends the registrations: readers get RDMABufferDroppedError. Idempotent."""
        if not self._closed:
            self._closed = True
            for b in [self._page.buffer, *self._buffers]:
                if b is not None:
                    b.drop().get(timeout=60)

    def __repr__(self) -> str:
        return f"<WeightPublisher version {self.version}, {self.slots} slots of {self.layout.nbytes} bytes>"


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
