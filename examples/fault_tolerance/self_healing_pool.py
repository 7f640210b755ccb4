"""An actor that owns a pool of workers and replaces the pool when a worker dies. Its clients never notice.

    python examples/fault_tolerance/self_healing_pool.py

What happens:
  1. `Pool` is an actor in a process of its own. It owns worker processes and passes jobs on to them.
  2. Several times a worker is killed with SIGKILL while many jobs are under way.
  3. The failure goes to the owner, `Pool.__supervise__`: it starts a new pool, stops the old one and returns True.
     Handled there, the failure goes no further up: this script needs no hook.
  4. Jobs whose worker died are given to the new pool. Every job gets its answer.

A job may run twice. Jobs that must not need a record of what was done, outside the workers.
"""

from __future__ import annotations

import asyncio
import os
import signal

from monarch.actor import (
    Actor,
    MeshFailure,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
    shutdown_context,
    this_host,
)

WAIT = 60  # seconds; nothing here takes nearly that long, and nothing waits for ever
WORKERS = 3
ROUNDS, JOBS = 8, 60
KILL_IN = (2, 4, 6)  # rounds


class Worker(Actor):
    @endpoint
    def square(self, n: int) -> int:
        return n * n

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Pool(Actor):
    """Owns the workers. Its own endpoints overlap: many jobs are under way at a time."""

    def __init__(self) -> None:
        self.replacements: list[str] = []
        self.changed = asyncio.Condition()
        self._start()

    def _start(self) -> None:
        self.procs = this_host().spawn_procs({"workers": WORKERS}, name="workers")
        self.workers = self.procs.spawn("worker", Worker)

    @concurrent_endpoint
    async def square(self, n: int) -> int:
        while True:
            workers = self.workers
            try:
                return await workers.slice(workers=n % WORKERS).square.call_one(n)
            except SupervisionError:  # __supervise__ runs while we wait here
                async with self.changed:
                    await self.changed.wait_for(lambda: self.workers is not workers)

    @concurrent_endpoint
    async def worker_pids(self) -> list[int]:
        return list((await self.workers.pid.call()).values())

    @concurrent_endpoint
    async def history(self) -> list[str]:
        return self.replacements

    async def __supervise__(self, failure: MeshFailure) -> bool:
        if failure.mesh_name != self.workers.name:
            return True  # a second death in a pool that was replaced already
        self.replacements.append(f"rank {failure.crashed_ranks} of {failure.mesh_name}: {failure.cause}")
        old = self.procs
        self._start()
        async with self.changed:
            self.changed.notify_all()
        await old.stop("replaced after a failure")  # its healthy workers end too: their jobs come to the new pool
        return True


def main() -> None:
    pool = this_host().spawn_procs(name="supervisor").spawn("pool", Pool)
    answered = 0
    for r in range(ROUNDS):
        victim = pool.worker_pids.call_one().get(timeout=WAIT)[r % WORKERS] if r in KILL_IN else None
        jobs = range(r * JOBS, (r + 1) * JOBS)
        pending = [pool.square.call_one(n) for n in jobs]
        if victim is not None:
            print(f"round {r}: killing worker {r % WORKERS} (pid {victim}) with {JOBS} jobs under way")
            os.kill(victim, signal.SIGKILL)
        answers = [f.get(timeout=WAIT) for f in pending]
        assert answers == [n * n for n in jobs]
        answered += len(answers)
        print(f"round {r}: {len(answers)} right answers")
    for line in pool.history.call_one().get(timeout=WAIT):
        print(f"the pool replaced itself after {line}")
    print(f"all {answered} jobs answered")
    shutdown_context().get(timeout=WAIT)


if __name__ == "__main__":
    main()
