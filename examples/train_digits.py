"""Trains a small convolutional network on handwritten digits over several processes, and survives a death.

    python examples/train_digits.py --processes 4 --out demo.png

What happens:
  1. A mesh of trainer processes; each holds a copy of the model and its own share of the data.
  2. Each step is one call on the whole mesh: every trainer computes gradients, torch.distributed (gloo) averages them.
  3. An evaluator, in a process of its own, scores snapshots while training goes on.
  4. Half-way one trainer is killed with SIGKILL. The step's call raises SupervisionError; the job stops what is left of
     the old processes, starts fresh ones and continues from its last snapshot.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import monarch.actor
from monarch.actor import Actor, current_rank, endpoint, this_host

WAIT = 60  # seconds; nothing here takes nearly that long, and nothing waits for ever


def make_model() -> nn.Module:
    torch.manual_seed(0)  # every trainer starts from the same weights
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def load_data(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Four fifths of scikit-learn's 1,797 digits for training, every fifth one for evaluation."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    held_out = torch.arange(len(y)) % 5 == 0
    keep = ~held_out if train else held_out
    return x[keep], y[keep]


class Trainer(Actor):
    """One rank of data-parallel training. Endpoints run one at a time, in the order they were sent."""

    def __init__(self, master_port: int, batch: int):
        torch.set_num_threads(1)  # several ranks share this machine
        self.rank, self.size = current_rank().rank, current_rank().size("ranks")
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{master_port}", rank=self.rank, world_size=self.size
        )
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        x, y = load_data(train=True)
        self.x, self.y = x[self.rank :: self.size], y[self.rank :: self.size]  # my share
        self.batch = batch

    @endpoint
    def restore(self, snapshot: dict[str, object]) -> None:
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])

    @endpoint
    def step(self, number: int) -> float:
        """One step on my share of a batch; gradients are averaged over all trainers."""
        chosen = torch.randint(len(self.y), (self.batch,), generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(self.model(self.x[chosen]), self.y[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.model.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])  # one exchange instead of one per parameter
        dist.all_reduce(flat)  # when another trainer is dead, this raises or never returns
        flat /= self.size
        for g, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(mean.view_as(g))
        self.optimizer.step()
        return loss.item()

    @endpoint
    def snapshot(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Evaluator(Actor):
    """Scores snapshots on data that no trainer sees."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model()
        self.x, self.y = load_data(train=False)

    @endpoint
    def accuracy(self, snapshot: dict[str, object]) -> float:
        self.model.load_state_dict(snapshot["model"])
        with torch.no_grad():
            return (self.model(self.x).argmax(1) == self.y).float().mean().item()


@dataclass
class History:
    """What the picture shows; times in seconds since the start."""

    start: float = field(default_factory=time.monotonic)
    losses: list[tuple[float, float]] = field(default_factory=list)
    scores: list[tuple[float, float]] = field(default_factory=list)
    failed: float | None = None
    recovered: float | None = None

    def now(self) -> float:
        return time.monotonic() - self.start


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_trainers(processes: int, batch: int):
    """Fresh processes with a trainer on each, in a process group of their own, hence the new port each time."""
    procs = this_host().spawn_procs({"ranks": processes}, name="trainers")
    return procs, procs.spawn("trainer", Trainer, free_port(), batch)


def train(args: argparse.Namespace, history: History) -> float:
    evaluator = this_host().spawn_procs(name="evaluator").spawn("evaluator", Evaluator)
    procs, trainers = start_trainers(args.processes, args.batch)
    saved, saved_step = trainers.slice(ranks=0).snapshot.call_one().get(timeout=WAIT), 0
    score, score_time = None, 0.0  # an evaluation under way, if any, and when its snapshot was taken
    victim_step = args.steps // 2
    bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True)
    step = 0
    while step < args.steps:
        if step == victim_step and history.failed is None:
            pid = trainers.slice(ranks=args.processes - 1).pid.call_one().get(timeout=WAIT)
            history.failed = history.now()
            bar.write(f"step {step}: killing trainer {args.processes - 1} (pid {pid}) with SIGKILL")
            os.kill(pid, signal.SIGKILL)
        try:
            losses = trainers.step.call(step).get(timeout=WAIT)
        except Exception as e:  # SupervisionError: a trainer is dead and will never answer
            if history.failed is None or history.recovered is not None:
                raise  # not the death arranged above: a real error, which trying again would only hide
            bar.write(f"step {step}: {type(e).__name__}: {str(e).splitlines()[0]}")
            procs.stop().get(timeout=WAIT)  # the others wait in all_reduce for the dead one: end them too
            procs, trainers = start_trainers(args.processes, args.batch)
            trainers.restore.call(saved).get(timeout=WAIT)
            step = saved_step
            bar.n = step
            history.recovered = history.now()
            history.losses.append((history.recovered, float("nan")))  # a gap in the picture's line
            bar.write(f"continuing from step {step} on fresh processes")
            continue
        step += 1
        bar.update()
        history.losses.append((history.now(), sum(losses.values()) / len(losses)))
        if step % args.snapshot_every == 0:
            saved, saved_step = trainers.slice(ranks=0).snapshot.call_one().get(timeout=WAIT), step
            if score is not None:
                history.scores.append((score_time, score.get(timeout=WAIT)))
            score_time = history.now()
            score = evaluator.accuracy.call_one(saved)  # not waited for: training goes on meanwhile
            bar.set_postfix(
                loss=f"{history.losses[-1][1]:.3f}", accuracy=f"{history.scores[-1][1]:.1%}" if history.scores else "-"
            )
    bar.close()
    if score is not None:
        history.scores.append((score_time, score.get(timeout=WAIT)))
    final = evaluator.accuracy.call_one(trainers.slice(ranks=0).snapshot.call_one().get(timeout=WAIT)).get(timeout=WAIT)
    history.scores.append((history.now(), final))
    procs.stop().get(timeout=WAIT)
    return final


def draw(history: History, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, left = plt.subplots(figsize=(9, 5))
    left.plot(*zip(*history.losses, strict=True), color="tab:blue", linewidth=1, label="training loss")
    left.set_xlabel("seconds since the start")
    left.set_ylabel("training loss, mean over trainers")
    right = left.twinx()
    right.plot(*zip(*history.scores, strict=True), "o-", color="tab:green", label="accuracy on held-out digits")
    right.set_ylabel("accuracy")
    right.set_ylim(0, 1.02)
    for when, color, text in (
        (history.failed, "tab:red", "trainer killed"),
        (history.recovered, "tab:orange", "recovered from snapshot"),
    ):
        if when is not None:
            left.axvline(when, color=color, linestyle="--", label=text)
    lines = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    left.legend(lines, [line.get_label() for line in lines], loc="center right")
    figure.suptitle("Data-parallel training that loses a process and goes on")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="trainer processes (default 4)")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--batch", type=int, default=32, help="examples per trainer and step (default 32)")
    parser.add_argument("--snapshot-every", type=int, default=40, help="steps between snapshots (default 40)")
    parser.add_argument("--out", default="demo.png", help="where the picture goes (default demo.png)")
    args = parser.parse_args()
    if args.processes < 1 or args.steps < 2:
        parser.error("--processes must be at least 1 and --steps at least 2")

    # A dead process is a failure of something this script owns. By default that ends the script, so that no failure
    # goes unnoticed. This script deals with it where its call raises, so it only takes note here.
    failures: list[monarch.actor.MeshFailure] = []
    monarch.actor.unhandled_fault_hook = failures.append

    history = History()
    final = train(args, history)
    draw(history, args.out)
    print(f"{len(failures)} failure(s) reported: {', '.join(f'{f.mesh_name} {f.crashed_ranks}' for f in failures)}")
    print(f"final accuracy {final:.1%} after {history.now():.0f} s; picture in {args.out}")
    return 0 if final > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
