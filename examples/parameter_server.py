"""A parameter server: workers read the weights and write their gradients one-sided; only handles travel in messages.

python examples/parameter_server.py [--workers 2] [--steps 20]
"""

import argparse

import torch

from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.rdma import RDMABuffer

DIM = 64


class Server(Actor):
    """Owns the weights, and a place for each worker's gradient."""

    def __init__(self, workers):
        self.weights = torch.zeros(DIM)
        self.gradients = [torch.zeros(DIM) for _ in range(workers)]
        self.handle = RDMABuffer(self.weights)
        self.inboxes = [RDMABuffer(g) for g in self.gradients]

    @endpoint
    def join(self, rank):
        return self.handle, self.inboxes[rank]

    @endpoint
    def update(self, lr):
        self.weights -= lr * sum(self.gradients) / len(self.gradients)


class Worker(Actor):
    """Fits a linear model to its share of the data."""

    def __init__(self, server):
        self.rank = current_rank().rank
        self.weights_handle, self.inbox = server.join.call_one(self.rank).get(timeout=60)
        g = torch.Generator().manual_seed(self.rank)
        self.x = torch.randn(256, DIM, generator=g)
        self.y = self.x @ torch.linspace(-1, 1, DIM)
        self.weights = torch.zeros(DIM)

    @endpoint
    def step(self):
        self.weights_handle.read_into(self.weights).get(timeout=60)
        error = self.x @ self.weights - self.y
        self.inbox.write_from(self.x.T @ error / len(error)).get(timeout=60)
        return float((error**2).mean())


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--workers", type=int, default=2)
    args.add_argument("--steps", type=int, default=20)
    options = args.parse_args()
    procs = this_host().spawn_procs({"gpus": options.workers + 1})
    server = procs.slice(gpus=0).spawn("server", Server, options.workers)
    workers = procs.slice(gpus=slice(1, None)).spawn("workers", Worker, server)
    first = last = 0.0
    for step in range(options.steps):
        losses = list(workers.step.call().get(timeout=60).values())
        server.update.call_one(0.3).get(timeout=60)
        last = sum(losses) / len(losses)
        first = first or last
        print(f"step {step:3}  loss {last:.5f}", flush=True)
    procs.stop().get(timeout=60)
    print(f"loss {first:.3f} -> {last:.5f}")


if __name__ == "__main__":
    main()
