"""How soon a death is known: from the moment a process dies to its owner, in several ways.

    python benchmarks/detection.py --deaths 100

The dying process stamps the monotonic clock, which all processes of a machine share, right before it kills itself.
The owner is an actor with `__supervise__`; it stamps the clock when it is called. Also measured: a call that was
pending (in another process than the owner's), and the hook of the root.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time

import monarch.actor
import monarch.testing
from monarch.actor import Actor, Channel, SupervisionError, endpoint, shutdown_context, this_host

WAIT = 60


class Victim(Actor):
    @endpoint
    def ready(self):
        return os.getpid()

    @endpoint
    def die(self, port):
        port.send(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def wait(self):
        time.sleep(WAIT)


class Owner(Actor):
    """Owns one victim at a time."""

    def __init__(self, port):
        self.port = port

    @endpoint
    def replace(self):
        self.procs = this_host().spawn_procs()
        self.victim = self.procs.spawn("victim", Victim)
        self.victim.ready.call_one().get(timeout=WAIT)
        return self.victim

    def __supervise__(self, failure):
        self.port.send(time.monotonic())
        return True


def table(name, seconds):
    ms = sorted(1000 * s for s in seconds)
    print(
        f"| {name} | {statistics.median(ms):.1f} | {ms[int(0.95 * (len(ms) - 1))]:.1f} | {ms[-1]:.1f} | {len(ms)} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=100)
    deaths = parser.parse_args().deaths
    hooked = []
    monarch.actor.unhandled_fault_hook = lambda failure: hooked.append(time.monotonic())
    print("| death of a process, known to | median ms | 95 % ms | worst ms | deaths |")
    print("|---|---|---|---|---|")
    at_death, died = Channel.open()
    at_owner, heard = Channel.open()
    owner = this_host().spawn_procs().spawn("owner", Owner, at_owner)
    owner_side, caller_side, root_side = [], [], []
    for _ in range(deaths):
        victim = owner.replace.call_one().get(timeout=WAIT)
        victim.die.broadcast(at_death)
        began = died.recv().get(timeout=WAIT)
        owner_side.append(heard.recv().get(timeout=WAIT) - began)
    table("`__supervise__` of the owner, an actor", owner_side)
    for _ in range(deaths):
        victim = owner.replace.call_one().get(timeout=WAIT)
        pending = victim.wait.call_one()
        pids = monarch.testing.pids(victim)
        began = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        try:
            pending.get(timeout=WAIT)
        except SupervisionError:
            caller_side.append(time.monotonic() - began)
        heard.recv().get(timeout=WAIT)
    table("a pending call of somebody else", caller_side)
    for _ in range(deaths):
        procs = this_host().spawn_procs()
        victim = procs.spawn("victim", Victim)
        victim.ready.call_one().get(timeout=WAIT)
        hooked.clear()
        victim.die.broadcast(at_death)
        began = died.recv().get(timeout=WAIT)
        end = time.monotonic() + WAIT
        while not hooked and time.monotonic() < end:
            time.sleep(0.0005)
        root_side.append(hooked[0] - began)
        procs.stop().get(timeout=WAIT)
    table("`unhandled_fault_hook` of the script", root_side)
    shutdown_context().get(timeout=WAIT)


if __name__ == "__main__":
    main()
