"""Chaos: processes are killed, frozen and crashed several times a second while clients keep calling.

    python benchmarks/soak.py --minutes 10

A supervisor actor keeps a pool of processes alive; a chaos thread of this script harms random ones; client threads and
a client actor keep calling. At the end: every call gave the right answer or raised one of the two errors; none hung;
no process, thread, socket file or segment is left; the supervisor heard of every death. Exit status 1 when not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time

import monarch.actor
from monarch.actor import Actor, ActorError, SupervisionError, endpoint, shutdown_context, this_host
from monarch.config import configure
from monarch.testing import leftovers, traces

LIMIT = 60.0  #: seconds after which a call counts as hung
PAYLOAD = bytes(range(256)) * 1024  # 256 KiB: goes through shared memory


class Worker(Actor):
    """Answers; harms itself when told to."""

    def __init__(self, slot):
        self.slot = slot

    @endpoint
    def square(self, x):
        return x * x

    @endpoint
    def echo(self, payload):
        return payload

    @endpoint
    def refuse(self, x):
        raise ValueError(f"{x} is refused")

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def crash(self, how):
        if how == "segfault":
            ctypes.string_at(0)
        elif how == "exit":
            os._exit(random.choice([0, 1, 77]))
        raise SystemExit("the actor fails, its process goes on")


class Supervisor(Actor):
    """Keeps `n` one-process meshes alive: each death it hears of is counted, and the slot filled again."""

    def __init__(self, n):
        self.heard = collections.Counter()  # mesh name -> failures
        self.retired = []
        self.slots = {}
        self.by_name = {}
        for slot in range(n):
            self._fill(slot)

    def _fill(self, slot):
        procs = this_host().spawn_procs(name=f"slot{slot}")
        worker = procs.spawn(f"worker{slot}", Worker, slot)
        self.slots[slot] = procs, worker
        self.by_name[worker.name] = slot

    def __supervise__(self, failure):
        self.heard[failure.mesh_name] += 1
        slot = self.by_name.pop(failure.mesh_name, None)
        if slot is not None:
            self.retired.append(self.slots[slot][0])
            self._fill(slot)
        while len(self.retired) > 4:  # not at once: a stop of a dying process is a stop too
            self.retired.pop(0).stop().get(timeout=LIMIT)
        return True

    @endpoint
    def worker(self, slot):
        return self.slots[slot][1], self.slots[slot][1].name

    @endpoint
    def deaths(self):
        return dict(self.heard), list(self.by_name)


class Client(Actor):
    """A client inside the mesh: calls workers through references that it was given."""

    @endpoint
    async def ask(self, worker, x):
        return await worker.square.call_one(x)


class Run:
    def __init__(self, seconds, pool, clients, seed):
        self.random = random.Random(seed)
        self.pool = pool
        self.deadline = time.monotonic() + seconds
        self.over = threading.Event()
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.wrong = []
        self.killed = {}  # worker mesh name -> how
        self.faults = []
        monarch.actor.unhandled_fault_hook = self.faults.append
        self.supervisor = this_host().spawn_procs(name="supervisor").spawn("supervisor", Supervisor, pool)
        self.client = this_host().spawn_procs(name="client").spawn("client", Client)
        self.supervisor.deaths.call_one().get(timeout=LIMIT)
        self.threads = [threading.Thread(target=self.call, args=(i,), name=f"client-{i}") for i in range(clients)]

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def worker(self, slot):
        return self.supervisor.worker.call_one(slot).get(timeout=LIMIT)

    def call(self, index):
        """One client: calls of several kinds, each judged."""
        dice = random.Random(index)
        while not self.over.is_set():
            try:
                worker, _ = self.worker(dice.randrange(self.pool))
                for _ in range(dice.randrange(1, 40)):
                    self.one_call(worker, dice)
            except Exception as e:
                self.wrong.append(f"the supervisor did not answer: {type(e).__name__}: {e}")
                return

    def one_call(self, worker, dice):
        x = dice.randrange(1000)
        kind = dice.choice(["square", "square", "square", "through an actor", "payload", "refused"])
        try:
            if kind == "square":
                got, want = worker.square.call_one(x).get(timeout=LIMIT), x * x
            elif kind == "through an actor":
                got, want = self.client.ask.call_one(worker, x).get(timeout=LIMIT), x * x
            elif kind == "payload":
                got, want = worker.echo.call_one(PAYLOAD).get(timeout=LIMIT), PAYLOAD
            else:
                worker.refuse.call_one(x).get(timeout=LIMIT)
                got, want = "no error", "ActorError"
            self.count("answered" if got == want else "wrong answer")
            if got != want:
                self.wrong.append(f"{kind}: {str(got)[:100]}")
        except ActorError as e:
            self.count("ActorError")
            if kind not in ("refused", "through an actor"):
                self.wrong.append(f"{kind}: {e}")
        except SupervisionError:
            self.count("SupervisionError")
        except TimeoutError:
            self.count("hung")
            self.wrong.append(f"{kind} hung for {LIMIT:g} s")
        except Exception as e:
            self.count(f"other error {type(e).__name__}")
            self.wrong.append(f"{kind}: {type(e).__name__}: {e}")

    def harm(self, pause):
        """Until the time is over: one random worker dies, in one of many ways, about every `pause` seconds."""
        ways = ["kill", "kill", "term", "segfault", "exit", "fail", "freeze", "freeze and thaw"]
        while time.monotonic() < self.deadline:
            how = self.random.choice(ways)
            worker, name = self.worker(self.random.randrange(self.pool))
            if name in self.killed:
                self.over.wait(0.001)  # its replacement is on its way
                continue
            try:
                pid = worker.pid.call_one().get(timeout=LIMIT)
            except SupervisionError:
                continue  # it died of something before; counted then
            if how in ("segfault", "exit", "fail"):
                worker.crash.broadcast(how)
            elif how == "freeze and thaw":
                os.kill(pid, signal.SIGSTOP)
                self.over.wait(0.02)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                self.count("froze for a moment")
                continue
            else:
                os.kill(pid, {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}[how])
            self.killed[name] = how
            self.over.wait(pause)

    def lost(self):
        heard, _ = self.supervisor.deaths.call_one().get(timeout=LIMIT)
        return {name: how for name, how in self.killed.items() if not heard.get(name)}

    def go(self, pause):
        for thread in self.threads:
            thread.start()
        try:
            self.harm(pause)
            end = time.monotonic() + 15
            while self.lost() and time.monotonic() < end:
                self.over.wait(0.05)
        finally:
            self.over.set()
            for thread in self.threads:
                thread.join(LIMIT)
        heard, alive = self.supervisor.deaths.call_one().get(timeout=LIMIT)
        twice = {name: n for name, n in heard.items() if n > 1}
        unasked = set(heard) - set(self.killed)
        return heard, alive, twice, unasked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--pool", type=int, default=8)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two deaths")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    before = traces()
    devnull = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("SOAK_SHOW_STDERR"):
        os.dup2(devnull, 2)  # hundreds of crashes print hundreds of reports
    os.close(devnull)
    configure(get_actor_state_max_idle="200ms")
    began = time.monotonic()
    run = Run(options.minutes * 60, options.pool, options.clients, seed)
    heard, alive, twice, unasked = run.go(options.pause)
    lost = run.lost()
    shutdown_context().get(timeout=LIMIT)
    left = leftovers(before, within=10)
    ways = collections.Counter(run.killed.values())
    print(f"seed {seed}, {time.monotonic() - began:.0f} s, pool of {options.pool}, {options.clients} clients")
    print(f"deaths: {len(run.killed)} ({', '.join(f'{n} {how}' for how, n in sorted(ways.items()))})")
    print(f"heard by the supervisor: {len(heard)}; lost: {len(lost)}; twice: {len(twice)}; unexplained: {len(unasked)}")
    print(f"calls: {', '.join(f'{n} {what}' for what, n in sorted(run.counts.items()))}")
    print(f"faults that reached the root: {len(run.faults)}; left behind: {left or 'nothing'}")
    problems = [f"not heard: {name} ({how})" for name, how in lost.items()]
    problems += [f"heard {n} times: {name}" for name, n in twice.items()]
    problems += [f"heard, but nobody killed it: {name}" for name in unasked]
    problems += run.wrong + [f"fault at the root: {f.report()}" for f in run.faults]
    if len(alive) != options.pool:
        problems.append(f"the pool has {len(alive)} of {options.pool} workers")
    if left:
        problems.append(f"left behind: {left}")
    for problem in problems[:20]:
        print("PROBLEM", problem)
    print("FAILED" if problems else "PASSED")
    sys.stdout.flush()
    os._exit(1 if problems else 0)


if __name__ == "__main__":
    main()
