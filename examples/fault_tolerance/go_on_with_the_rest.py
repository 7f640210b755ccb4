"""Ranks of a mesh die; the slices without them keep working.

    python examples/fault_tolerance/go_on_with_the_rest.py

What happens:
  1. Six ranks add up a range of numbers, each its share.
  2. A rank is killed. A call on the whole mesh raises SupervisionError from now on: it could not be answered in full.
  3. The hook says which rank died. The work is dealt out anew, over slices of the living ranks, and goes on.
  4. Other actors can still be spawned on the living processes.
"""

from __future__ import annotations

import queue

import monarch.actor
from monarch.actor import (
    Actor,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    shutdown_context,
    this_host,
)
from monarch.testing import kill

WAIT = 60  # seconds; nothing here takes nearly that long, and nothing waits for ever
RANKS = 6
NUMBERS = 100_000


class Adder(Actor):
    @endpoint
    def add(self, shares: list[range]) -> int:
        """The sum of one share; which one is decided by the rank in the slice that was called."""
        return sum(shares[current_rank().rank])


def runs(living: list[int]) -> list[slice]:
    """Living ranks as few slices: [0, 1, 3, 4, 5] -> 0:2, 3:6."""
    out: list[slice] = []
    for rank in living:
        if out and out[-1].stop == rank:
            out[-1] = slice(out[-1].start, rank + 1)
        else:
            out.append(slice(rank, rank + 1))
    return out


def total(adders: Adder, living: list[int]) -> int:
    """The sum of all numbers, whoever is left to add them: one call for each run of living ranks."""
    shares = [range(i, NUMBERS, len(living)) for i in range(len(living))]
    pending = []
    for run in runs(living):
        mine, shares = shares[: run.stop - run.start], shares[run.stop - run.start :]
        pending.append(adders.slice(ranks=run).add.call(mine))
    return sum(sum(future.get(timeout=WAIT).values()) for future in pending)


def lose(procs: ProcMesh, rank: int, failures: queue.SimpleQueue[MeshFailure]) -> int:
    """Kills a rank; returns the one that the hook named."""
    kill(procs.slice(ranks=rank))
    failure = failures.get(timeout=WAIT)
    print(f"the hook heard: {failure.cause}")
    (dead,) = failure.crashed_ranks
    return dead


def main() -> None:
    failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    monarch.actor.unhandled_fault_hook = failures.put  # the default hook would end this script at the first death

    procs = this_host().spawn_procs({"ranks": RANKS}, name="adders")
    adders = procs.spawn("adder", Adder)
    living = list(range(RANKS))
    right = sum(range(NUMBERS))
    for victim in (2, 5, None):
        assert total(adders, living) == right
        print(f"{len(living)} ranks {living} added up {NUMBERS} numbers: {right}")
        if victim is not None:
            living.remove(lose(procs, victim, failures))
            try:
                adders.add.call([range(0)] * RANKS).get(timeout=WAIT)
            except SupervisionError as e:
                print(f"a call on all {RANKS} ranks raises: {str(e).splitlines()[0]}")
    late = procs.slice(ranks=slice(3, 5)).spawn("late", Adder)
    print(f"new actors on ranks 3 and 4: {list(late.add.call([range(3), range(4)]).get(timeout=WAIT).values())}")
    print(f"done with ranks {living}")
    shutdown_context().get(timeout=WAIT)


if __name__ == "__main__":
    main()
