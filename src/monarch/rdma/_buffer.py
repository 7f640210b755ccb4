"""`RDMABuffer`: a handle to memory of some process, and the transfers it offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from monarch.rdma import _backends, _handle, _transfer
from monarch.rdma._handle import Handle
from monarch.rdma._manager import manager
from monarch.rdma._memory import Region, region
from monarch.rdma._paths import Op
from monarch.rdma._runs import Runs
from monarch.rdma._table import READONLY
from monarch.runtime.future import Future

if TYPE_CHECKING:
    import torch

    Memory: TypeAlias = torch.Tensor | memoryview | bytearray


class RDMABuffer:
    """Registers `data`, memory of this process, so that other processes can read and write it without our help.

    `data`: a one-dimensional contiguous torch tensor (any dtype), memoryview, bytearray, mmap or numpy array. Nothing
    is copied: the buffer *is* that memory, as it is at each moment. It stays alive until `drop()` or the end of this
    process. The handle is small (under 300 bytes pickled) and may be sent anywhere in messages.

    Raises ValueError for other data (the message names what is wrong with it), RuntimeError when this process has no
    backend (see `get_rdma_backend`).
    """

    __slots__ = ("__weakref__", "_handle")
    _handle: Handle

    def __init__(self, data: Memory) -> None:
        _backends.before_register(data)
        found = region(data, pin=True)
        if found.nbytes == 0:
            raise ValueError("Cannot create RDMABuffer with size 0.")
        self._handle = manager().register(found)

    # -- what it is

    def size(self) -> int:
        """Bytes; also after `drop`."""
        return self._handle.slot.size

    @property
    def backend(self) -> str:
        """`get_rdma_backend()` of the calling process. See `path` for how this very buffer is reached."""
        return _backends.get_rdma_backend()

    @property
    def owner(self) -> str:
        """Text that names the owner, for logs: `rdma_manager.<proc>@<address>`."""
        return self._handle.owner

    def path(self) -> str:
        """The rung of the ladder that transfers between this process and the buffer take.

        "local", "slab", "vm", "nixl", "tcp" or "relay"; see `docs/guide/rdma.md`. May ask the owner's host, so it can
        take a moment. Raises RDMAInitError when there is none, RDMAOwnerDiedError.
        """
        m = manager()
        op = Op(self._handle, False, 0, Region(0, 0, True, None), 0)
        try:
            return (m.path(self._handle) or m.find_path(self._handle)).name
        except Exception as e:
            raise _transfer.failure(m, op, None, e, 0, 0) from None

    # -- transfers

    def read_into(
        self, dst: Memory, *, offset: int = 0, nbytes: int | None = None, timeout: float = 60
    ) -> Future[None]:
        """Copies the buffer into `dst`, memory of the calling process; starts now.

        offset   where to begin in the buffer, bytes
        nbytes   how many bytes; default: all from `offset` on. `dst` must have room; what is behind stays as it is
        timeout  seconds; 0 fails at once

        Raises ValueError at the call when `dst` is too small, read-only or not one-dimensional contiguous memory.
        The future gives None, or raises RDMATimeoutError, RDMABufferDroppedError, RDMAOwnerDiedError, RDMAError.
        """
        return _transfer.start(manager(), read_op(self, dst, offset, nbytes), _transfer.check_timeout(timeout))

    def write_from(self, src: Memory, *, offset: int = 0, timeout: float = 60) -> Future[None]:
        """Copies all of `src`, memory of the calling process, into the buffer at `offset` bytes; starts now.

        What is behind stays as it is. Raises ValueError at the call when `src` is larger than the room there, or the
        buffer is read-only. The future is as that of `read_into`.
        """
        return _transfer.start(manager(), write_op(self, src, offset), _transfer.check_timeout(timeout))

    def drop(self) -> Future[None]:
        """Ends the registration, for all holders; transfers that start later fail.

        Any holder may call it, any number of times, also when the owner is gone. The memory itself stays with whoever
        else holds it.
        """
        return manager().drop(self._handle)

    # -- identity

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RDMABuffer):
            return NotImplemented
        return self._handle.slot.id == other._handle.slot.id and self._handle.node == other._handle.node

    def __hash__(self) -> int:
        return hash((self._handle.node, self._handle.slot.id))

    def __repr__(self) -> str:
        h = self._handle
        state = ""
        if h.node == manager().node.id and manager().table.get(h.slot.id) is None:
            state = ", dropped"
        return f"<RDMABuffer {h.slot.id:x}: {h.slot.size} bytes of {h.owner}{state}>"

    def __reduce__(self) -> Any:
        return _open, (self._handle.pack(),)


def _open(data: bytes) -> RDMABuffer:
    self = RDMABuffer.__new__(RDMABuffer)
    self._handle = _handle.unpack(data)
    return self


def _check_offset(buffer: RDMABuffer, offset: Any) -> int:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"expected an RDMABuffer, got {type(buffer).__name__}: the local memory is the other argument")
    size = buffer._handle.slot.size
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset must be a number of bytes, not {type(offset).__name__}")
    if not 0 <= offset <= size:
        raise ValueError(f"offset {offset} is outside the buffer of {size} bytes")
    return size - offset


def read_op(buffer: RDMABuffer, dst: Any, offset: int = 0, nbytes: int | None = None) -> Op:
    """The checked operation buffer -> dst."""
    n = _check_offset(buffer, offset)
    if nbytes is not None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 <= nbytes <= n:
            raise ValueError(f"nbytes {nbytes!r} must be between 0 and the {n} bytes from offset {offset} on")
        n = nbytes
    local = region(dst)
    if local.nbytes < n:
        raise ValueError(
            f"destination local memory size ({local.nbytes}) must be >= remote buffer size ({n})"
            f"{f' from offset {offset} on' if offset else ''}"
        )
    if local.readonly and n:
        raise ValueError("the destination is read-only memory: pass writable memory, such as a bytearray")
    return Op(buffer._handle, False, offset, local, n)


def write_op(buffer: RDMABuffer, src: Any, offset: int = 0) -> Op:
    """The checked operation src -> buffer."""
    room = _check_offset(buffer, offset)
    local = region(src)
    if local.nbytes > room:
        raise ValueError(
            f"source local memory size ({local.nbytes}) must be <= remote buffer size ({room})"
            f"{f' from offset {offset} on' if offset else ''}"
        )
    if buffer._handle.slot.flags & READONLY and local.nbytes:
        raise ValueError(f"the buffer is read-only memory of {buffer.owner}: it can be read, not written")
    return Op(buffer._handle, True, offset, local, local.nbytes)


#: runs of so many bytes are read as ranges of their own: there is nothing to gain from gathering them
_LONG = 256 << 10


def gather_ops(buffer: RDMABuffer, dst: Any, offset: int, count: int, runs: Runs) -> list[Op]:
    """The checked operations: `count` runs of the buffer, the first at `offset`, -> dst, packed."""
    local, n = region(dst), count * runs.length
    if local.readonly or local.nbytes < n:
        raise ValueError(f"the destination must be writable memory of {n} bytes at least, it has {local.nbytes}")
    if not (0 < runs.length <= runs.stride and offset >= 0 and runs.end(offset, n) <= buffer.size()):
        raise ValueError(
            f"{count} runs of {runs.length} bytes, {runs.stride} apart, from {offset} on are not inside the buffer of "
            f"{buffer.size()} bytes"
        )
    handle = buffer._handle
    if runs.stride == runs.length or count == 1:
        return [Op(handle, False, offset, local, n)]
    if runs.length < _LONG and not handle.gpu and local.device == "cpu":
        return [Op(handle, False, offset, local, n, runs)]
    parts = enumerate(runs.parts(offset, 0, n))
    return [
        Op(handle, False, at, local._replace(address=local.address + i * size, nbytes=size), size)
        for i, (at, size) in parts
    ]
