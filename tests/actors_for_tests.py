"""Actor classes that several test files use."""

import asyncio
import ctypes
import os
import threading
import time

from monarch.actor import Actor, Channel, concurrent_endpoint, context, endpoint


class Echo(Actor):
    def __init__(self, tag=None):
        self.tag = tag

    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def fail(self, text="boom"):
        raise ValueError(text)

    @endpoint
    def exit(self, code):
        os._exit(code)

    @endpoint
    def segfault(self):
        ctypes.string_at(0)

    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)
        return "rested"

    @endpoint
    def ranks(self):
        c = context()
        return c.message_rank.rank, c.actor_instance.rank.rank

    @endpoint
    def apply(self, function, *args):
        return function(*args)

    @endpoint
    def thread(self):
        return threading.current_thread().name, threading.get_ident()

    def helper(self, x):
        return x + 1


class PortMaker(Actor):
    @endpoint
    def make(self):
        port, self.receiver = Channel.open()
        return port


class AsyncEcho(Actor):
    def __init__(self):
        self.gate = asyncio.Event()

    @endpoint
    async def echo(self, x):
        return x

    @endpoint
    async def pid(self):
        return os.getpid()

    @concurrent_endpoint
    async def hold(self):
        await self.gate.wait()
        return "released"

    @endpoint
    async def release(self):
        self.gate.set()

    @endpoint
    async def fail(self):
        raise ValueError("boom")
