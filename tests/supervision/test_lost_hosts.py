"""Hosts that die or fall silent, and owners on hosts that do."""

from __future__ import annotations

import os
import time

import pytest

from conftest import WAIT, gone, wait_until
from monarch.actor import Actor, SupervisionError, endpoint, this_host
from monarch.config import configured
from monarch.testing import hold_gil, local_hosts, pids


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Owner(Actor):
    """Owns processes on a host that it was given, and actors on processes that it was given."""

    def __init__(self):
        self.failures = []

    @endpoint
    def own(self, host):
        self.procs = host.spawn_procs({"gpus": 2})
        self.workers = self.procs.spawn("nested", Worker)
        return list(self.workers.pid.call().get(timeout=WAIT).values())

    @endpoint
    def own_actors(self, procs):
        self.guests = procs.spawn("guest", Worker)
        return list(self.guests.pid.call().get(timeout=WAIT).values()), self.guests

    @endpoint
    def seen(self):
        return self.failures

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __supervise__(self, failure):
        self.failures.append((failure.mesh_name, failure.crashed_ranks, failure.report()))
        return True


def test_a_lost_host_is_a_failure_of_each_of_its_ranks(faults):
    with local_hosts(2) as hosts:
        procs = hosts.mesh.spawn_procs({"gpus": 2})
        worker = procs.spawn("w", Worker)
        found = worker.pid.call().get(timeout=WAIT)
        began = time.monotonic()
        pending = worker.slice(hosts=1).pid
        hosts.lose(1)
        wait_until(lambda: len(faults) == 2)
        assert time.monotonic() - began < 5
        assert sorted(f.crashed_ranks[0] for f in faults) == [2, 3]
        assert all("its host was lost" in f.report() for f in faults)
        with pytest.raises(SupervisionError, match="its host was lost"):
            pending.call().get(timeout=WAIT)
        with pytest.raises(SupervisionError, match="its host was lost"):
            worker.pid.call().get(timeout=WAIT)
        assert list(worker.slice(hosts=0).pid.call().get(timeout=WAIT).values()) == list(found.values())[:2]
        wait_until(lambda: all(gone(p) for p in list(found.values())[2:]))
        began = time.monotonic()
        procs.stop().get(timeout=WAIT)
        hosts.mesh.stop().get(timeout=WAIT)
        assert time.monotonic() - began < 5, "stopping waits for a dead host"


def test_processes_that_nobody_called_are_lost_too(faults):
    with local_hosts(1) as hosts:
        procs = hosts.mesh.spawn_procs({"gpus": 2}, name="quiet")
        procs.initialized.get(timeout=WAIT)
        hosts.lose(0)
        wait_until(lambda: len(faults) == 2)
        assert {f.mesh_name.rpartition("-")[0] for f in faults} == {"quiet"}


def test_a_silent_host_is_lost_after_its_time(faults):
    with configured(get_proc_state_max_idle="500ms"), local_hosts(2) as hosts:
        worker = hosts.mesh.spawn_procs().spawn("w", Worker)
        worker.pid.call().get(timeout=WAIT)
        hosts.silence(0)
        pending = worker.slice(hosts=0).pid.call_one()
        began = time.monotonic()
        with pytest.raises(SupervisionError, match="timeout waiting for a sign of life"):
            pending.get(timeout=WAIT)
        assert 0.3 < time.monotonic() - began < 5
        wait_until(lambda: len(faults) == 1)
        assert faults[0].crashed_ranks == [0]
        worker.slice(hosts=1).pid.call_one().get(timeout=WAIT)


def test_busy_hosts_are_not_silent(faults):
    with configured(get_proc_state_max_idle="300ms"), local_hosts(1) as hosts:
        procs = hosts.mesh.spawn_procs()
        worker = procs.spawn("w", Worker)
        worker.pid.call_one().get(timeout=WAIT)
        held = hold_gil(procs, 1.5)
        assert worker.pid.call_one().get(timeout=WAIT) == pids(procs)[0]
        held.get(timeout=WAIT)
        assert not faults


def test_a_client_that_was_held_up_does_not_blame_its_hosts(faults):
    import ctypes

    with configured(get_proc_state_max_idle="200ms"), local_hosts(1) as hosts:
        worker = hosts.mesh.spawn_procs().spawn("w", Worker)
        worker.pid.call_one().get(timeout=WAIT)
        for _ in range(3):
            ctypes.PyDLL(None).poll(None, 0, 400)  # the interpreter lock is held here
        assert worker.pid.call_one().get(timeout=WAIT)
        assert not faults


def test_slow_links_are_not_silent(faults):
    with configured(get_proc_state_max_idle="1s"), local_hosts(1) as hosts:
        worker = hosts.mesh.spawn_procs().spawn("w", Worker)
        worker.pid.call_one().get(timeout=WAIT)
        hosts.links[0].delay(0.3)
        for _ in range(4):
            worker.pid.call_one().get(timeout=WAIT)
        assert not faults


def test_an_owner_on_another_host_hears_of_its_processes(faults):
    with local_hosts(2) as hosts:
        owner = hosts.mesh.slice(hosts=0).spawn_procs().spawn("owner", Owner)
        nested = owner.own.call_one(hosts.mesh.slice(hosts=1)).get(timeout=WAIT)
        hosts.lose(1)
        wait_until(lambda: len(owner.seen.call_one().get(timeout=WAIT)) == 2)
        seen = owner.seen.call_one().get(timeout=WAIT)
        assert sorted(ranks[0] for _, ranks, _ in seen) == [0, 1]
        assert all(name.startswith("nested-") and "lost" in report for name, _, report in seen), seen
        wait_until(lambda: all(gone(p) for p in nested))
        assert not faults


@pytest.mark.parametrize("how", ["its process is killed", "its host is lost"])
def test_what_an_owner_owned_on_another_host_ends_with_it(faults, how):
    with local_hosts(2) as hosts:
        owner = hosts.mesh.slice(hosts=0).spawn_procs().spawn("owner", Owner)
        nested = owner.own.call_one(hosts.mesh.slice(hosts=1)).get(timeout=WAIT)
        foreign = hosts.mesh.slice(hosts=1).spawn_procs()
        mine, guests = owner.own_actors.call_one(foreign).get(timeout=WAIT)
        if how == "its host is lost":
            hosts.lose(0)
        else:
            os.kill(owner.pid.call_one().get(timeout=WAIT), 9)
        wait_until(lambda: all(gone(p) for p in nested))
        with pytest.raises(SupervisionError, match="stopped"):
            for _ in range(1000):
                guests.pid.call_one().get(timeout=WAIT)
        assert not gone(mine[0]), "somebody else's process must stay"
        assert foreign.spawn("still", Worker).pid.call_one().get(timeout=WAIT) == mine[0]


def test_spawning_on_a_lost_host_fails_at_once(faults):
    with local_hosts(1) as hosts:
        hosts.mesh.spawn_procs().spawn("w", Worker).pid.call_one().get(timeout=WAIT)
        hosts.lose(0)
        wait_until(lambda: faults)
        began = time.monotonic()
        with pytest.raises(Exception, match="lost"):
            hosts.mesh.spawn_procs().initialized.get(timeout=WAIT)
        assert time.monotonic() - began < 2
        assert this_host().spawn_procs({"gpus": 1}).stop().get(timeout=WAIT) is None
