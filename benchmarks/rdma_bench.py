"""One-sided transfers between two processes of a host, against the same program on another implementation.

    python benchmarks/rdma_bench.py [--peer PYTHON] [--sizes 8,4096,1048576,67108864] [--json]

Uses only the public API that both have. Prints microseconds for a transfer and GB/s; `memcpy` is the floor, a copy of
as many bytes within one process. "busy" is measured while the owner computes in pure Python.
"""

import argparse
import json
import subprocess
import sys
import threading
import time

import torch

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer

SIZES = "8,4096,1048576,67108864,1073741824"


class Owner(Actor):
    def __init__(self):
        self.keep = []
        self.busy = False

    @endpoint
    async def register(self, nbytes):
        t = torch.ones(nbytes, dtype=torch.uint8)
        start = time.perf_counter()
        b = RDMABuffer(t)
        self.keep.append((t, b))
        return b, time.perf_counter() - start

    @endpoint
    async def release(self):
        for _, b in self.keep:
            await b.drop()
        self.keep.clear()

    @endpoint
    async def compute(self, on):
        self.busy = on

        def run():
            while self.busy:
                sum(range(1000))

        if on:
            threading.Thread(target=run, daemon=True).start()


class Reader(Actor):
    @endpoint
    async def measure(self, buffer, nbytes, write, rounds):
        """Seconds of the median transfer."""
        mine = torch.zeros(nbytes, dtype=torch.uint8)
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            await (buffer.write_from(mine) if write else buffer.read_into(mine))
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[rounds // 2]

    @endpoint
    async def action(self, buffers, nbytes, rounds):
        """Seconds of the median action that reads all buffers."""
        mine = [torch.zeros(nbytes, dtype=torch.uint8) for _ in buffers]
        action = RDMAAction()
        for b, m in zip(buffers, mine):
            action.read_remote(m, b)
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            await action.submit()
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[rounds // 2]


def memcpy(nbytes, rounds):
    a, b = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        b.copy_(a)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[rounds // 2]


def run(sizes):
    """{name: seconds}."""
    out = {}
    procs = this_host().spawn_procs(per_host={"gpus": 5})
    owner = procs.slice(gpus=0).spawn("owner", Owner)
    readers = procs.slice(gpus=slice(1, 5)).spawn("reader", Reader)
    one = readers.slice(gpus=0)
    for n in sizes:
        rounds = max(3, min(200, (1 << 28) // max(n, 1)))
        buffer, registered = owner.register.call_one(n).get()
        out[f"register {n}"] = registered
        out[f"memcpy {n}"] = memcpy(n, rounds)
        out[f"read {n}"] = one.measure.call_one(buffer, n, False, rounds).get()
        out[f"write {n}"] = one.measure.call_one(buffer, n, True, rounds).get()
        if n <= 64 << 20:
            four = [t for _, t in readers.measure.call(buffer, n, False, rounds).get().items()]
            out[f"read by 4 {n}"] = max(four)
            owner.compute.call_one(True).get()
            out[f"read busy {n}"] = one.measure.call_one(buffer, n, False, rounds).get()
            owner.compute.call_one(False).get()
        owner.release.call_one().get()
    for name, n in (("action 32 x 8", 8), ("action 32 x 131072", 131072)):
        buffers = [owner.register.call_one(n).get()[0] for _ in range(32)]
        out[name] = one.action.call_one(buffers, n, 50).get()
        owner.release.call_one().get()
    procs.stop().get()
    return out


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--peer", help="the other implementation's Python")
    args.add_argument("--sizes", default=SIZES, help="bytes, with commas between")
    args.add_argument("--json", action="store_true", help="print the seconds as JSON and nothing else")
    options = args.parse_args()
    ours = run([int(n) for n in options.sizes.split(",")])
    if options.json:
        print("RESULT " + json.dumps(ours))
        return
    theirs = {}
    if options.peer:
        command = [options.peer, __file__, "--json", "--sizes", options.sizes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        if not lines:
            sys.exit(f"the other implementation failed:\n{done.stdout}\n{done.stderr}")
        theirs = json.loads(lines[0][7:])
    print(f"{'':<24}{'ours us':>12}{'GB/s':>8}" + (f"{'other us':>14}{'ratio':>8}" if theirs else ""))
    for name, t in ours.items():
        moved = int(name.split()[-1]) * (32 if name.startswith("action") else 1)
        speed = f"{moved / t / 1e9:8.2f}" if moved > 4096 and not name.startswith("register") else " " * 8
        other = f"{theirs[name] * 1e6:14.1f}{theirs[name] / t:8.1f}" if name in theirs else ""
        print(f"{name:<24}{t * 1e6:12.1f}{speed}{other}")


if __name__ == "__main__":
    main()
