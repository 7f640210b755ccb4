"""Runs the actor benchmark on this interpreter and on a peer's, in turn, and prints a table of ratios.

    python benchmarks/compare.py --bench ../shared/bench/actor_bench.py --peer /path/to/peer/bin/python --rounds 3

Rounds alternate, so that both meet the same noise; each figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys

import monarch


def run(python: str, bench: str, quick: bool) -> dict[str, float]:
    command = [python, bench] + (["--quick"] if quick else [])
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout
    return json.loads(out[out.index("{") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the benchmark program")
    parser.add_argument("--peer", help="interpreter of the peer; without it only ours is run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # What pip does for an installed package; an editable one would be compiled again at each import where the
    # environment says PYTHONDONTWRITEBYTECODE, and the figure of the import would be that of the compiler.
    compileall.compile_dir(os.path.dirname(monarch.__file__), quiet=1)
    ours: list[dict[str, float]] = []
    peer: list[dict[str, float]] = []
    for i in range(args.rounds):
        ours.append(run(sys.executable, args.bench, args.quick))
        if args.peer:
            peer.append(run(args.peer, args.bench, args.quick))
        print(f"round {i + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    print("| metric | ours | peer | ratio |\n|---|---|---|---|")
    for name in ours[0]:
        mine = statistics.median(r[name] for r in ours if name in r)
        theirs = [r[name] for r in peer if name in r]
        if not theirs:
            print(f"| {name} | {mine:.3g} | | |")
            continue
        other = statistics.median(theirs)
        ratio = mine / other if name.endswith("GBps") else other / mine
        print(f"| {name} | {mine:.4g} | {other:.4g} | {ratio:.1f}x |")


if __name__ == "__main__":
    main()
