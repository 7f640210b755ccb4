"""Actors that own memory, and actors that reach for it."""

import array
import mmap
import os
import signal
import time

import torch

from monarch.actor import Actor, endpoint
from monarch.rdma import RDMAAction, RDMABuffer


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
    def forget(self, name):
        del self.memory[name]

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
    async def read_many(self, buffers):
        dst = [array.array("B", bytes(b.size())) for b in buffers]
        action = RDMAAction()
        for d, b in zip(dst, buffers, strict=True):
            action.read_remote(memoryview(d), b)
        await action.submit()
        return [d.tobytes() for d in dst]
