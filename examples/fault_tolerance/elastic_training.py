"""Data-parallel training that loses workers, goes on with the others, and takes in replacements.

    python examples/fault_tolerance/elastic_training.py

What happens:
  1. A coordinator owns four workers, each a process of its own. Every worker keeps a copy of the model.
  2. Each step, every worker computes gradients on its share of a batch; the coordinator averages them and sends the
     mean to all. All copies change in the same way.
  3. Workers are killed with SIGKILL in the middle of a step. Their calls fail, the mean of that step is taken over
     the others, and training goes on with fewer workers. Nothing starts over.
  4. `Coordinator.__supervise__` hears of each death and starts a replacement. It gets the current weights and the
     optimizer's state between two steps, and takes part from then on.

Learns scikit-learn's handwritten digits; without scikit-learn, patterns that it makes up.
"""

from __future__ import annotations

import asyncio
import os
import signal

import torch
from torch import nn

from monarch.actor import Actor, MeshFailure, SupervisionError, endpoint, shutdown_context, this_host

WAIT = 120  # seconds; nothing here takes nearly that long, and nothing waits for ever
WORKERS, EPOCHS, STEPS, BATCH = 4, 8, 24, 64
KILL = {2: 1, 4: 2}  # epoch -> how many workers are killed in the middle of it
WAIT_BEFORE = (4, 6)  # epochs that begin when all replacements are there
TARGET = 0.9


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def load_data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Four fifths for training, one fifth for evaluation."""
    try:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    except ImportError:
        random = torch.Generator().manual_seed(0)
        y = torch.arange(1800) % 10
        x = torch.rand(10, 64, generator=random)[y] + 0.5 * torch.randn(1800, 64, generator=random)
    held_out = torch.arange(len(y)) // 10 % 5 == 0
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


class Replica:
    """A copy of the model and its optimizer. Copies that start equal and apply equal gradients stay equal."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # several processes share this machine
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, gradient: torch.Tensor) -> None:
        parameters = list(self.model.parameters())
        for p, g in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p).clone()
        self.optimizer.step()


class Worker(Actor):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.replica = Replica()
        self.x, self.y = x, y

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def load(self, state: dict[str, object]) -> None:
        self.replica.load(state)

    @endpoint
    def gradients(self, step: int, part: int, parts: int) -> tuple[torch.Tensor, float]:
        """Of one part of the batch of this step, and the loss. Every worker draws the same batch."""
        batch = torch.randint(len(self.y), (BATCH,), generator=torch.Generator().manual_seed(step))[part::parts]
        loss = nn.functional.cross_entropy(self.replica.model(self.x[batch]), self.y[batch])
        self.replica.optimizer.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.replica.model.parameters()]), loss.item()

    @endpoint
    def apply(self, gradient: torch.Tensor) -> None:
        self.replica.step(gradient)


class Coordinator(Actor):
    """Owns the workers and keeps a copy of the model itself: while it lives, no weights are lost."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.training, self.evaluation = load_data()
        self.workers: dict[str, tuple[Worker, int]] = {}  # those that take part: mesh name -> (worker, pid)
        self.arrived: dict[str, tuple[Worker, int]] = {}  # those that are ready to
        self.arrival = asyncio.Event()
        self.hiring: set[asyncio.Task[None]] = set()
        self.news: list[str] = []
        for _ in range(WORKERS):
            self._hire()

    def _hire(self) -> None:
        task = asyncio.get_running_loop().create_task(self._start_worker())
        self.hiring.add(task)
        task.add_done_callback(self.hiring.discard)

    async def _start_worker(self) -> None:
        worker = this_host().spawn_procs(name="worker").spawn("worker", Worker, *self.training)
        try:
            self.arrived[worker.name] = worker, await worker.pid.call_one()
            self.arrival.set()
        except SupervisionError:  # died while it started: __supervise__ hears of it too, and hires the next one
            pass

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.workers.pop(failure.mesh_name, None)
        self.arrived.pop(failure.mesh_name, None)
        self.news.append(f"lost {failure.mesh_name}: {failure.cause}")
        self._hire()
        return True

    @endpoint
    async def full_strength(self) -> list[int]:
        """Waits until all replacements have started; the pids of all workers."""
        while len(self.workers) + len(self.arrived) < WORKERS:
            await self._next_arrival()
        self._take_in()
        return [pid for _, pid in self.workers.values()]

    async def _next_arrival(self) -> None:
        self.arrival.clear()
        await self.arrival.wait()

    def _take_in(self) -> None:
        """Between two steps. Messages to a worker keep their order: it has these weights before its first step."""
        for name, (worker, pid) in self.arrived.items():
            worker.load.broadcast(self.replica.state())
            self.workers[name] = worker, pid
            self.news.append(f"took in {name} (pid {pid}) with the current weights")
        self.arrived.clear()

    @endpoint
    async def step(self, number: int) -> tuple[float, int, list[str]]:
        """One step with whoever is there: (loss, workers that took part, what happened meanwhile)."""
        self._take_in()
        while not self.workers:  # all of them died at once: the step waits for the next one
            await self._next_arrival()
            self._take_in()
        crew = [worker for worker, _ in self.workers.values()]
        answers = await asyncio.gather(
            *[worker.gradients.call_one(number, i, len(crew)) for i, worker in enumerate(crew)], return_exceptions=True
        )
        good = []
        for answer in answers:
            if not isinstance(answer, BaseException):
                good.append(answer)
            elif not isinstance(answer, SupervisionError):
                raise answer  # an error in the model, say; not a death
        if good:  # when nobody is left to answer, this batch is skipped
            mean = torch.stack([gradient for gradient, _ in good]).mean(0)
            for worker, _ in self.workers.values():
                worker.apply.broadcast(mean)
            self.replica.step(mean)
        news, self.news = self.news, []
        loss = sum(loss for _, loss in good) / len(good) if good else float("nan")
        return loss, len(good), news

    @endpoint
    async def accuracy(self) -> float:
        x, y = self.evaluation
        with torch.no_grad():
            return (self.replica.model(x).argmax(1) == y).float().mean().item()

    @endpoint
    async def copies_agree(self) -> bool:
        """All workers compute the same gradients: they have the same weights."""
        answers = [await worker.gradients.call_one(0, 0, 1) for worker, _ in self.workers.values()]
        return all(torch.equal(gradient, answers[0][0]) for gradient, _ in answers)


def main() -> None:
    # No hook here: the coordinator owns the workers and handles their deaths, so none comes up to this script.
    coordinator = this_host().spawn_procs(name="coordinator").spawn("coordinator", Coordinator)
    pids = coordinator.full_strength.call_one().get(timeout=WAIT)
    score = 0.0
    for epoch in range(EPOCHS):
        if epoch in WAIT_BEFORE:  # only so that the output is alike on all machines: training need not wait
            pids = coordinator.full_strength.call_one().get(timeout=WAIT)
        losses, sizes = [], []
        for step in range(STEPS):
            pending = coordinator.step.call_one(epoch * STEPS + step)
            if step == STEPS // 2:
                for pid in pids[: KILL.get(epoch, 0)]:
                    print(f"epoch {epoch} step {step}: killing the worker with pid {pid}")
                    os.kill(pid, signal.SIGKILL)
            loss, size, news = pending.get(timeout=WAIT)
            losses.append(loss)
            sizes.append(size)
            for line in news:
                print(f"epoch {epoch} step {step}: {line}")
        score = coordinator.accuracy.call_one().get(timeout=WAIT)
        crew = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, accuracy {score:.1%}, workers {crew}")
    pids = coordinator.full_strength.call_one().get(timeout=WAIT)
    assert len(pids) == WORKERS
    assert coordinator.copies_agree.call_one().get(timeout=WAIT)
    assert score > TARGET, f"accuracy {score:.1%}"
    print(f"final accuracy {score:.1%} with {len(pids)} workers after {sum(KILL.values())} deaths")
    shutdown_context().get(timeout=WAIT)


if __name__ == "__main__":
    main()
