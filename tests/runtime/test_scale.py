"""Many processes and actors on one machine."""

import threading

import pytest

from actors_for_tests import Echo
from conftest import gone
from monarch.actor import this_host


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_200_processes_with_1000_actors_start_answer_and_stop():
    procs = this_host().spawn_procs({"procs": 200})
    meshes = [procs.spawn(f"m{i}", Echo) for i in range(5)]
    for mesh in meshes:
        assert sum(mesh.echo.call(1).get(timeout=120).values()) == 200
    pids = meshes[0].pid.call().get(timeout=60).values()
    assert len(set(pids)) == 200
    procs.stop().get(timeout=120)
    assert all(map(gone, pids))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_100000_calls_grow_neither_memory_nor_threads(procs):
    e = procs().spawn("e", Echo)

    def rss():
        with open("/proc/self/status") as f:
            return int(next(line for line in f if line.startswith("VmRSS")).split()[1])

    def burst(n):
        for i in range(0, n, 100):
            for f in [e.echo.call_one(i) for _ in range(100)]:
                f.get(timeout=30)

    burst(5000)
    memory, threads = rss(), threading.active_count()
    burst(100_000)
    assert rss() - memory < 8 << 10  # KiB
    assert threading.active_count() <= threads


def test_an_idle_mesh_burns_no_cpu(procs):
    import time

    e = procs(2).spawn("e", Echo)
    for i in range(500):  # fast waits, so that everybody expects the next message soon
        e.slice(gpus=0).echo.call_one(i).get(timeout=30)
    before, mine = e.apply.call(time.process_time).get(timeout=30).values(), time.process_time()
    e.slice(gpus=1).apply.call_one(time.sleep, 2).get(timeout=30)
    after = e.apply.call(time.process_time).get(timeout=30).values()
    assert max(a - b for a, b in zip(after, before, strict=True)) < 0.05
    assert time.process_time() - mine < 0.1
