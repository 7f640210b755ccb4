"""Actors that fail and actors that own meshes. Workers import this: nothing of pytest here."""

import asyncio
import inspect
import os
from typing import NamedTuple

from actors_for_tests import Echo
from monarch.actor import Actor, context, endpoint, this_host


class Told(NamedTuple):
    """What a `__supervise__` was told."""

    mesh: str
    ranks: list
    report: str
    text: str


class Ruin(BaseException):
    """Fails the actor that raises it, call or broadcast."""


class Frail(Echo):
    """A sync actor that can be broken in many ways."""

    @endpoint
    def ruin(self, text="ruined"):
        raise Ruin(text)

    @endpoint
    def end(self, how, *reason):
        return getattr(context().actor_instance, how)(*reason)

    @endpoint
    def exit_process(self, code):
        os._exit(code)


class AsyncFrail(Actor):
    @endpoint
    async def echo(self, x):
        return x

    @endpoint
    async def pid(self):
        return os.getpid()

    @endpoint
    async def fail(self, text="boom"):
        raise ValueError(text)

    @endpoint
    async def ruin(self, text="ruined"):
        raise Ruin(text)

    @endpoint
    async def end(self, how, *reason):
        return getattr(context().actor_instance, how)(*reason)

    @endpoint
    async def exit_process(self, code):
        os._exit(code)

    @endpoint
    async def apply(self, function, *args):
        out = function(*args)
        return await out if inspect.iscoroutine(out) else out

    @endpoint
    async def nap(self, seconds):
        await asyncio.sleep(seconds)
        return "rested"


class Leaf(Frail):
    """Notes its cleanup in a file."""

    def __init__(self, path, tag="leaf"):
        self.path, self.tag = path, tag

    def __cleanup__(self, exc):
        note(self.path, f"{self.tag} {'normal' if exc is None else 'failed'}")


def note(path, line):
    with open(path, "a") as f:
        f.write(line + "\n")


def notes(path):
    return open(path).read().splitlines() if os.path.exists(path) else []


class _Keeping:
    """What the keepers share: `answer` is what the hook returns, raises, or calls with the failure."""

    def __init__(self, answer=True, path=None, tag="keeper"):
        self.answer, self.path, self.tag = answer, path, tag
        self.heard = []

    def listen(self, failure):
        self.heard.append(Told(failure.mesh_name, list(failure.crashed_ranks), failure.report(), str(failure)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(self, failure) if callable(self.answer) else self.answer

    def keep(self, n, cls, args):
        self.procs = this_host().spawn_procs({"gpus": n}, name="kept")
        self.child = self.procs.spawn("child", cls, *args)
        return self.child


class Keeper(_Keeping, Actor):
    """Owns meshes and answers their failures; `do` runs any function on it."""

    @endpoint
    def do(self, function, *args):
        return function(self, *args)

    @endpoint
    def grow(self, n=1, cls=Frail, *args):
        return self.keep(n, cls, args)

    @endpoint
    def told(self):
        return self.heard

    @endpoint
    def pid(self):
        return os.getpid()

    def __supervise__(self, failure):
        return self.listen(failure)

    def __cleanup__(self, exc):
        if self.path:
            note(self.path, f"{self.tag} {'normal' if exc is None else 'failed'}")


class AsyncKeeper(_Keeping, Actor):
    @endpoint
    async def do(self, function, *args):
        out = function(self, *args)
        return await out if inspect.iscoroutine(out) else out

    @endpoint
    async def grow(self, n=1, cls=Frail, *args):
        return self.keep(n, cls, args)

    @endpoint
    async def told(self):
        return self.heard

    @endpoint
    async def pid(self):
        return os.getpid()

    async def __supervise__(self, failure):
        out = self.listen(failure)
        return await out if inspect.iscoroutine(out) else out

    async def __cleanup__(self, exc):
        if self.path:
            note(self.path, f"{self.tag} {'normal' if exc is None else 'failed'}")


class MixedKeeper(AsyncKeeper):
    """Async endpoints, a plain hook."""

    def __supervise__(self, failure):
        return self.listen(failure)


class Heedless(Actor):
    """Owns meshes and does not override the hook."""

    @endpoint
    def grow(self, n=1, cls=Frail, *args):
        self.procs = this_host().spawn_procs({"gpus": n}, name="kept")
        self.child = self.procs.spawn("child", cls, *args)
        return self.child

    @endpoint
    def ping(self):
        return "pong"

    @endpoint
    def pid(self):
        return os.getpid()


KEEPERS = [Keeper, AsyncKeeper, MixedKeeper]
