"""Two actors hit one number back and forth in each other's memory; the only message is the first.

python examples/ping_pong.py [--rounds 10000]
"""

import argparse
import time

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer


class Player(Actor):
    """Owns one cell; the number in it is the ball."""

    def __init__(self):
        self.cell = bytearray(8)
        self.handle = RDMABuffer(self.cell)

    @endpoint
    def court(self):
        return self.handle

    @endpoint
    def play(self, opponent, first, rounds):
        """Seconds that it took. Whoever sees a new number in his cell sends it back, one higher."""
        mine = memoryview(self.cell).cast("q")
        ball = bytearray(8)
        number = memoryview(ball).cast("q")
        start = time.perf_counter()
        end = start + 60
        seen = 0
        while seen < 2 * rounds:
            if first and not seen:
                number[0] = 1
            else:
                while mine[0] <= seen:
                    if time.perf_counter() > end:
                        raise TimeoutError(f"the ball did not come back after {seen}")
                number[0] = mine[0] + 1
            seen = number[0]
            opponent.write_from(ball).get(timeout=10)
        return time.perf_counter() - start


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--rounds", type=int, default=10_000)
    rounds = args.parse_args().rounds
    procs = this_host().spawn_procs({"gpus": 2})
    a, b = (procs.slice(gpus=i).spawn(f"player_{i}", Player) for i in range(2))
    courts = [p.court.call_one().get(timeout=30) for p in (a, b)]
    games = [a.play.call_one(courts[1], True, rounds), b.play.call_one(courts[0], False, rounds)]
    seconds = max(g.get(timeout=90) for g in games)
    print(f"{rounds} rounds by {courts[0].path()!r}: {seconds / rounds / 2 * 1e6:.1f} us a stroke")
    procs.stop().get(timeout=60)


if __name__ == "__main__":
    main()
