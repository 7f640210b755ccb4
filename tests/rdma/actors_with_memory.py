"""Actors that own memory, and actors that reach for it."""

import array
import ctypes
import mmap
import os
import signal
import time

import torch

from monarch.actor import Actor, endpoint
from monarch.config import configure
from monarch.rdma import RDMAAction, RDMABuffer, RDMAError, allocate, allocate_tensor


def drop_ptrace_capability():
    """Takes CAP_SYS_PTRACE (bit 19) out of this process's capabilities: capset(2), version 3."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for i in range(3):
        data[i] &= ~(1 << 19)
    assert libc.capset(header, data) == 0


class Owner(Actor):
    """Holds tensors and bytearrays by name."""

    def __init__(self):
        self.memory = {}
        self.buffers = {}

    @endpoint
    def tensor(self, name, values, dtype="float32"):
        t = self.memory[name] = torch.tensor(values, dtype=getattr(torch, dtype))
        b = self.buffers[name] = RDMABuffer(t)
        return b

    @endpoint
    def zeros(self, name, nbytes):
        self.memory[name] = torch.zeros(nbytes, dtype=torch.uint8)
        self.buffers[name] = RDMABuffer(self.memory[name])
        return self.buffers[name]

    @endpoint
    def view(self, name, data, readonly=False):
        m = self.memory[name] = memoryview(bytes(data)) if readonly else memoryview(bytearray(data))
        self.buffers[name] = RDMABuffer(m)
        return self.buffers[name]

    @endpoint
    def slab(self, name, nbytes):
        m = self.memory[name] = allocate(nbytes)
        self.buffers[name] = RDMABuffer(m)
        return self.buffers[name]

    @endpoint
    def slab_tensor(self, name, *shape):
        t = self.memory[name] = allocate_tensor(*shape)
        self.buffers[name] = RDMABuffer(t.view(-1))
        return self.buffers[name]

    @endpoint
    def forget(self, name):
        del self.memory[name]

    @endpoint
    def mapped(self, name, nbytes):
        self.map = mmap.mmap(-1, nbytes)
        m = self.memory[name] = memoryview(self.map)
        self.buffers[name] = RDMABuffer(m)
        return self.buffers[name]

    @endpoint
    def release_map(self, name):
        self.memory[name].release()
        self.map.close()

    @endpoint
    def resize(self, name, n):
        self.memory[name].resize_(n)

    @endpoint
    def fill(self, name, value):
        self.memory[name].fill_(value)

    @endpoint
    def content(self, name):
        m = self.memory[name]
        return bytes(memoryview(m.numpy() if hasattr(m, "numpy") else m))

    @endpoint
    def drop(self, name):
        self.buffers[name].drop().get(timeout=10)

    @endpoint
    def hold_the_lock(self, seconds):
        """Busy in Python: nothing else of this process's Python runs, except now and then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def stop_yourself(self):
        os.kill(os.getpid(), signal.SIGSTOP)


class Taker(Actor):
    """Reads and writes what it is handed."""

    @endpoint
    async def read(self, buffer, nbytes=None, **options):
        dst = bytearray(buffer.size() if nbytes is None else nbytes)
        await buffer.read_into(memoryview(dst), **options)
        return bytes(dst)

    @endpoint
    async def read_part(self, buffer, offset, nbytes):
        dst = bytearray(nbytes)
        await buffer.read_into(dst, offset=offset, nbytes=nbytes)
        return bytes(dst)

    @endpoint
    async def write(self, buffer, data, **options):
        await buffer.write_from(memoryview(bytearray(data)), **options)

    @endpoint
    async def drop(self, buffer):
        return await buffer.drop()

    @endpoint
    async def path(self, buffer):
        return buffer.path()

    @endpoint
    async def refuse_vm(self):
        """From now on this process does not use the kernel's door."""
        configure(rdma_disable_vm_access=True)

    @endpoint
    async def lose_the_right(self):
        """The kernel refuses this process to look into others: it lacks a capability that they have."""
        drop_ptrace_capability()

    @endpoint
    async def error(self, buffer, write=False, timeout=60):
        """(error type, text, backend, seconds) of a transfer that fails."""
        data = bytearray(buffer.size())
        start = time.monotonic()
        try:
            await (buffer.write_from(data, timeout=timeout) if write else buffer.read_into(data, timeout=timeout))
        except RDMAError as e:
            return type(e), str(e), e.backend, time.monotonic() - start

    @endpoint
    async def forge(self, buffer, **changes):
        """A handle that was tampered with."""
        h = buffer._handle
        slot = h.slot._replace(**{k: v for k, v in changes.items() if k in h.slot._fields})
        forged = RDMABuffer.__new__(RDMABuffer)
        forged._handle = h._replace(slot=slot, **{k: v for k, v in changes.items() if k not in h.slot._fields})
        return forged

    @endpoint
    async def read_slowly(self, buffer, seconds, ready):
        """Reads again and again for a while; how often it got an error, by type name."""
        data, end, seen = bytearray(buffer.size()), time.monotonic() + seconds, {}
        ready.send(None)
        while time.monotonic() < end:
            try:
                await buffer.read_into(data)
                name = "ok"
            except RDMAError as e:
                name = type(e).__name__
            seen[name] = seen.get(name, 0) + 1
        return seen

    @endpoint
    async def read_many(self, buffers):
        dst = [array.array("B", bytes(b.size())) for b in buffers]
        action = RDMAAction()
        for d, b in zip(dst, buffers, strict=True):
            action.read_remote(memoryview(d), b)
        await action.submit()
        return [d.tobytes() for d in dst]
