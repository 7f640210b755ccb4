"""A trainer whose weights all hold the number of their version, and generators that check what they were given."""

import os
import signal
import threading
import time

import torch

from monarch.actor import Actor, endpoint
from monarch.config import configure
from monarch.rdma import RDMABuffer
from monarch.weights import WeightPublisher, WeightSink, WeightSource, WeightSubscriber, broadcast, push


def model(n=4, side=64):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(n)))


def fill(m, value):
    with torch.no_grad():
        for p in m.parameters():
            p.fill_(value)


def values(m):
    """All different values that the parameters hold."""
    return sorted(set(torch.cat([p.detach().flatten() for p in m.parameters()]).unique().tolist()))


class Trainer(WeightSource):
    def __init__(self, n=4, side=64, **options):
        self.model = model(n, side)
        self.version = options.get("start_version", 0)
        fill(self.model, float(self.version))
        self.publish_weights(self.model, **options)

    @endpoint
    def step(self, times=1):
        """Publishes so often; returns (version, seconds of the slowest publish)."""
        slowest = 0.0
        for _ in range(times):
            self.version += 1
            fill(self.model, float(self.version))
            start = time.perf_counter()
            self.publish_weights()
            slowest = max(slowest, time.perf_counter() - start)
        return self.version, slowest

    @endpoint
    def step_until(self, seconds, at_least):
        """Publishes without a break, at least so often and so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.version < at_least:
            self.version += 1
            fill(self.model, float(self.version))
            self.publish_weights()
        return self.version

    @endpoint
    def begin_and_freeze(self):
        """As if killed in the middle of a publish: the next slot is half written, and says so."""
        p = self._weight_publisher
        i = p._next_slot()
        p._page.begin(i)
        p._slots[i][: p._slots[i].numel() // 2].fill_(255)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def push_to(self, mesh):
        return push(self._weight_publisher, mesh)

    @endpoint
    def broadcast_to(self, mesh, fanout):
        return broadcast(self._weight_publisher, mesh, fanout)

    @endpoint
    def slots(self):
        return self._weight_publisher.slots

    @endpoint
    def close(self):
        self._weight_publisher.close()


class Generator(WeightSink):
    def __init__(self, n=4, side=64):
        self.model = model(n, side)
        fill(self.model, -1.0)
        self.receive_weights(self.model)

    @endpoint
    def subscribe(self, source, **options):
        self.subscriber = WeightSubscriber(source, self.model, **options)

    @endpoint
    def sync(self, min_version=None, timeout=20):
        """(version, the values that the model holds now)."""
        return self.subscriber.sync(min_version, timeout), values(self.model)

    @endpoint
    def state(self):
        return self.received_version, values(self.model)

    @endpoint
    def sync_up_to(self, version, timeout=50):
        """Syncs without a break until `version` is there; each time all parameters must hold the version's number.

        Returns (versions applied, stats).
        """
        end = time.monotonic() + timeout
        seen = []
        while not seen or seen[-1] < version:
            assert time.monotonic() < end, f"at version {seen[-1:]} of {version}"
            v = self.subscriber.sync(timeout=5)
            if v is None:
                continue
            assert values(self.model) == [float(v)], f"torn: version {v} holds {values(self.model)}"
            assert not seen or v > seen[-1]
            seen.append(v)
        return len(seen), self.subscriber.stats()

    @endpoint
    def read_until_killed(self):
        """Reads on a thread, for ever."""

        def run():
            while True:
                self.subscriber._version = -1
                self.subscriber.sync()

        threading.Thread(target=run, daemon=True).start()
        return os.getpid()

    @endpoint
    def take_lease_and_stop(self):
        """A reader that dies between taking a lease and giving it back."""
        self.subscriber.sync()
        s = self.subscriber
        end = time.monotonic() + 10
        s._look(end)
        s._take_lease(s._head.current, end)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def watch(self, port):
        self.subscriber.watch(port.send)

    @endpoint
    def stop_watching(self):
        self.subscriber.close()

    @endpoint
    def stats(self):
        return self.subscriber.stats()

    @endpoint
    def fastest_sync(self, rounds):
        """Seconds of the fastest of so many syncs."""
        best = 1e9
        for _ in range(rounds):
            self.subscriber._version = -1
            start = time.perf_counter()
            self.subscriber.sync()
            best = min(best, time.perf_counter() - start)
        return best


class AsyncTrainer(WeightSource):
    """All its own endpoints are async; those of the mixin follow."""

    def __init__(self):
        self.model = model(1, 8)
        fill(self.model, 0.0)
        self.publish_weights(self.model)

    @endpoint
    async def step(self):
        fill(self.model, 1.0)
        return self.publish_weights()


class AsyncGenerator(WeightSink):
    def __init__(self):
        self.model = model(1, 8)
        self.receive_weights(self.model)

    @endpoint
    async def follow(self, source):
        s = WeightSubscriber(source, self.model)
        return await s.sync_async(), values(self.model), await s.sync_async(min_version=1), values(self.model)


class Late(WeightSource):
    """Has not published yet."""

    @endpoint
    def nothing(self):
        pass


def publisher_of(value=0.0, **options):
    """A publisher in this process, and its model."""
    m = model(2, 8)
    fill(m, value)
    return WeightPublisher(m, **options), m


def cut(whole, shard):
    """The shard of a whole tensor."""
    for d, (start, n) in enumerate(zip(shard.offset, shard.local_shape, strict=True)):
        whole = whole.narrow(d, start, n)
    return whole


class Holder(Actor):
    """Holds shards of a tensor that everybody can make from a seed."""

    def __init__(self):
        self.keep = []

    @endpoint
    def refuse_vm(self):
        configure(rdma_disable_vm_access=True)

    def shard(self, seed, s, dtype):
        g = torch.Generator().manual_seed(seed)
        whole = torch.randint(-100, 100, s.global_shape, generator=g).to(dtype)
        return cut(whole, s)

    @endpoint
    def hold(self, seed, s, dtype):
        self.keep.append(self.shard(seed, s, dtype).contiguous().flatten())
        return RDMABuffer(self.keep[-1])

    @endpoint
    def pull(self, plan, handles, r, seed, dtype):
        target = torch.zeros(r.local_shape, dtype=dtype)
        n = plan.execute(handles, {"w": target}, rank=r.rank)
        assert torch.equal(target, self.shard(seed, r, dtype)), f"rank {r.rank} differs"
        return n
