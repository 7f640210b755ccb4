"""A trainer publishes weights, generators take them when they like; a plot of bytes moved and of staleness over time.

python examples/weight_sync.py [--generators 3] [--seconds 5] [--out weight_sync.png]
"""

import argparse
import random
import time

import torch

from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.weights import WeightSource, WeightSubscriber


def make_model():
    torch.set_num_threads(1)  # several processes share the cores
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))


class Trainer(WeightSource):
    """One step: a little training, and a new version."""

    def __init__(self):
        self.model = make_model()
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.publish_weights(self.model, slots=3)

    @endpoint
    def step(self):
        x = torch.randn(64, 512)
        loss = ((self.model(x) - x) ** 2).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return self.publish_weights(), float(loss.detach())


class Generator(Actor):
    """Generates at its own pace, and syncs before each piece of work."""

    def __init__(self, trainer):
        self.model = make_model()
        self.trainer = trainer
        self.weights = WeightSubscriber(trainer, self.model)
        self.random = random.Random(current_rank().rank)

    @endpoint
    def ready(self):
        self.weights.sync()
        self.model(torch.randn(32, 512))

    @endpoint
    def run(self, until):
        """Rows of (time, bytes so far, versions that its weights were behind when the work was done)."""
        rows = []
        while time.time() < until:
            self.weights.sync()
            with torch.no_grad():
                for _ in range(self.random.randint(1, 20)):
                    self.model(torch.randn(32, 512))
            newest = self.trainer.weight_version.call_one().get(timeout=30)
            rows.append((time.time(), self.weights.stats()["bytes"], newest - self.weights.version))
        return rows, self.weights.stats()


def plot(results, start, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    for i, (rows, _) in enumerate(results):
        times = [t - start for t, _, _ in rows]
        top.plot(times, [n / 1e6 for _, n, _ in rows], label=f"generator {i}")
        bottom.step(times, [s for _, _, s in rows], where="post")
    top.set_ylabel("MB fetched")
    top.legend()
    bottom.set_ylabel("versions behind")
    bottom.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--generators", type=int, default=3)
    args.add_argument("--seconds", type=float, default=5)
    args.add_argument("--out", default="weight_sync.png", help="the picture; empty: none (it needs matplotlib)")
    options = args.parse_args()
    procs = this_host().spawn_procs({"gpus": options.generators + 1})
    trainer = procs.slice(gpus=0).spawn("trainer", Trainer)
    generators = procs.slice(gpus=slice(1, None)).spawn("generators", Generator, trainer)
    trainer.step.call_one().get(timeout=60)
    generators.ready.call().get(timeout=60)
    start = time.time()
    running = generators.run.call(start + options.seconds)
    shown = start
    while time.time() < start + options.seconds:
        version, loss = trainer.step.call_one().get(timeout=30)
        if time.time() > shown + 0.5:
            shown = time.time()
            print(f"{shown - start:4.1f} s  version {version}  loss {loss:.4f}", flush=True)
    results = list(running.get(timeout=60).values())
    for i, (rows, stats) in enumerate(results):
        behind = sum(s for _, _, s in rows) / len(rows)
        print(
            f"generator {i}: {stats['syncs']} versions, {stats['bytes'] / 1e6:.0f} MB by {stats['path']!r}, "
            f"{stats['bytes'] / max(stats['seconds'], 1e-9) / 1e9:.1f} GB/s, {behind:.1f} versions behind on average"
        )
    procs.stop().get(timeout=60)
    if options.out:
        plot(results, start, options.out)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
