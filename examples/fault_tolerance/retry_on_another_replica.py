"""A call fails because its replica was killed; the caller asks another one.

    python examples/fault_tolerance/retry_on_another_replica.py

What happens:
  1. Three replicas of one actor answer questions; calls go round them.
  2. Two of them are killed with SIGKILL while they work on a question, as an out-of-memory killer would do it.
  3. The pending call raises SupervisionError at once. The caller leaves that replica out and asks the next one.
  4. Every question is answered. The root's hook heard of both deaths and let the program go on.

Ask again only for work that may be done twice: a replica may die after it did the work and before it answered.
"""

from __future__ import annotations

import os
import queue
import signal

import monarch.actor
from monarch.actor import Actor, MeshFailure, SupervisionError, current_rank, endpoint, shutdown_context, this_host

WAIT = 60  # seconds; nothing here takes nearly that long, and nothing waits for ever
QUESTIONS = 12


class Replica(Actor):
    """Squares numbers. `doomed` maps a rank to the number of questions that it survives."""

    def __init__(self, doomed: dict[int, int]):
        self.rank = current_rank().rank
        self.left = doomed.get(self.rank, QUESTIONS)

    @endpoint
    def square(self, n: int) -> tuple[int, int]:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return n * n, self.rank


class RoundRobin:
    """Sends each question to the next replica; one that died is asked no more."""

    def __init__(self, replicas: Replica, size: int):
        self.living = [replicas.slice(replicas=i) for i in range(size)]

    def square(self, n: int) -> tuple[int, int]:
        while self.living:
            replica = self.living.pop(0)
            try:
                answer = replica.square.call_one(n).get(timeout=WAIT)
            except SupervisionError as e:
                print(f"question {n}: {str(e).splitlines()[-1].strip()}")
                print(f"question {n}: asking another replica, {len(self.living)} left")
                continue
            self.living.append(replica)
            return answer
        raise RuntimeError(f"question {n}: no replica is left")


def main() -> None:
    # This script owns the replicas, so their deaths come here too, whether or not a call noticed. The default hook
    # would end the script. This one only takes note.
    failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    monarch.actor.unhandled_fault_hook = failures.put

    procs = this_host().spawn_procs({"replicas": 3}, name="replicas")
    caller = RoundRobin(procs.spawn("replica", Replica, {1: 1, 2: 3}), 3)
    for n in range(QUESTIONS):
        result, rank = caller.square(n)
        print(f"question {n}: {result} (from replica {rank})")
        assert result == n * n
    heard = [failures.get(timeout=WAIT) for _ in range(2)]
    for failure in heard:
        print(f"the hook heard: rank {failure.crashed_ranks} of {failure.mesh_name}, signal {failure.signal}")
    print(f"all {QUESTIONS} questions answered, {len(heard)} replicas lost")
    shutdown_context().get(timeout=WAIT)


if __name__ == "__main__":
    main()
