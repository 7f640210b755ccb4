"""Orphans: what dies when a client or an owner dies, and what must not."""

import os
import pickle
import signal
import subprocess
import sys

import pytest
from owners import Keeper, Leaf, notes
from watching import fence, heard

from actors_for_tests import Echo
from conftest import WAIT, gone, wait_until
from monarch.actor import SupervisionError, attach_to_workers, this_host

PRELUDE = """
import os, pickle, sys, threading, time
from monarch.actor import *
class Leaf(Actor):
    @endpoint
    def pid(self): return os.getpid()
class Guest(Leaf):
    def __init__(self, path): self.path = path
    def __cleanup__(self, exc):
        with open(self.path, "a") as f: f.write("guest gone\\n")
class Nest(Actor):
    @endpoint
    def pids(self):
        self.inner = this_host().spawn_procs({"gpus": 2}).spawn("inner", Leaf)
        return [os.getpid(), *self.inner.pid.call().get(30).values()]
def attach():
    return attach_to_workers(ca="trust_all_connections", workers=[os.environ["WORKER"]])
"""
SERVE = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""
#: a client that starts processes on a daemon, nested ones too, tells their ids, and waits
REMOTE = """
hosts = attach()
nest = hosts.spawn_procs({"procs": 2}).spawn("nest", Nest)
print(*[p for pids in nest.pids.call().get(30).values() for p in pids], flush=True)
"""


class Client:
    """A program that prints something and then waits."""

    def __init__(self, body, then="time.sleep(60)", **env):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + body + then],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **env},
        )
        self.said = self.process.stdout.readline().split()

    def end(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        self.process.wait(WAIT)
        self.process.stdout.close()


@pytest.fixture
def client():
    made = []

    def start(*args, **kwargs):
        made.append(Client(*args, **kwargs))
        return made[-1]

    yield start
    for c in made:
        if c.process.poll() is None:
            c.end()
        c.process.stdout.close()


@pytest.fixture
def worker(tmp_path):
    """The address of a worker daemon on this machine."""
    address = f"ipc://{tmp_path}/worker"
    daemon = subprocess.Popen([sys.executable, "-c", SERVE, address])
    yield address
    daemon.kill()
    daemon.wait(10)


def answers(address):
    """A new client can use the daemon; returns the ids of its own processes, which are stopped again."""
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    p = hosts.spawn_procs({"gpus": 1})
    pids = p.spawn("e", Echo).pid.call().get(timeout=WAIT).values()
    p.stop().get(timeout=WAIT)
    return pids


# -- clients of a daemon


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "os._exit", "exception", "end"])
def test_a_client_of_a_daemon_takes_its_processes_along_and_the_daemon_stays(worker, client, how):
    then = {"os._exit": "os._exit(9)", "exception": "raise RuntimeError('gives up')", "end": ""}
    c = client(REMOTE, then.get(how, "time.sleep(60)"), WORKER=worker)
    pids = [int(p) for p in c.said]
    assert len(set(pids)) == 6
    if how.startswith("SIG"):
        c.end(getattr(signal, how))
    else:
        c.process.wait(WAIT)
    wait_until(lambda: all(map(gone, pids)), within=10)
    assert not set(answers(worker)) & set(pids)


def test_a_client_that_dies_right_after_spawning_leaves_nothing(worker, client):
    body = """
attach().spawn_procs({"procs": 3}).spawn("leaf", Leaf).pid.call().get(30)
procs = attach().spawn_procs({"procs": 2})
leaf = procs.spawn("leaf", Leaf)
print(*leaf.pid.call().get(30).values(), flush=True)
"""
    c = client(body, "os._exit(1)", WORKER=worker)
    pids = [int(p) for p in c.said]
    wait_until(lambda: all(map(gone, pids)), within=10)


def test_the_death_of_one_client_does_not_concern_another_on_the_same_daemon(worker, client):
    c = client(REMOTE, WORKER=worker)
    hosts = attach_to_workers(ca="trust_all_connections", workers=[worker])
    p = hosts.spawn_procs({"gpus": 2})
    try:
        m = p.spawn("m", Echo)
        mine = m.pid.call().get(timeout=WAIT).values()
        c.end()
        wait_until(lambda: all(gone(int(pid)) for pid in c.said))
        assert m.pid.call().get(timeout=WAIT).values() == mine
    finally:
        p.stop().get(timeout=WAIT)


def test_without_an_orphan_timeout_processes_on_a_daemon_outlive_their_client(worker, client):
    body = """
leaf = attach().spawn_procs({"procs": 2}).spawn("leaf", Leaf)
print(*leaf.pid.call().get(30).values(), flush=True)
"""
    c = client(body, WORKER=worker, HYPERACTOR_MESH_ORPHAN_TIMEOUT="none")
    c.end()
    answers(worker)  # the daemon has had the time to do something wrong
    left = [int(pid) for pid in c.said if not gone(int(pid))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 2


@pytest.mark.parametrize("where", ["this host", "a daemon"])
def test_a_second_client_takes_along_its_actors_but_not_the_processes_it_was_lent(worker, client, tmp_path, where):
    path, lent = str(tmp_path / "notes"), str(tmp_path / "lent")
    if where == "a daemon":
        p = attach_to_workers(ca="trust_all_connections", workers=[worker]).spawn_procs({"gpus": 2})
    else:
        p = this_host().spawn_procs({"gpus": 2})
    try:
        mine = p.spawn("mine", Echo)
        pids = mine.pid.call().get(timeout=WAIT).values()
        with open(lent, "wb") as f:
            pickle.dump(p, f)
        body = f"""
lent = pickle.load(open({lent!r}, "rb"))
own = this_host().spawn_procs({{"gpus": 2}}).spawn("own", Leaf)
far = attach().spawn_procs({{"gpus": 1}}).spawn("far", Leaf)
guest = lent.spawn("guest", Guest, {path!r})
print(*[pid for mesh in (guest, own, far) for pid in mesh.pid.call().get(30).values()], flush=True)
"""
        c = client(body, WORKER=worker)
        told = [int(x) for x in c.said]
        assert told[:2] == pids
        c.end(signal.SIGTERM)
        wait_until(lambda: all(map(gone, told[2:])))
        wait_until(lambda: notes(path) == ["guest gone"] * 2)
        assert mine.pid.call().get(timeout=WAIT).values() == pids
    finally:
        p.stop().get(timeout=WAIT)


# -- owners that are actors


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_nested_processes_go_when_the_process_of_their_owner_dies(procs, faults, how):
    k = procs().spawn("k", Keeper)
    middle = k.grow.call_one(1, Keeper).get(timeout=WAIT)
    leaves = middle.grow.call_one(2).get(timeout=WAIT)
    pids = [middle.pid.call_one().get(timeout=WAIT), *leaves.pid.call().get(timeout=WAIT).values()]
    if how == "kill":
        os.kill(k.pid.call_one().get(timeout=WAIT), signal.SIGKILL)
    else:
        k.do.broadcast(lambda self: os._exit(0))
    wait_until(lambda: all(map(gone, pids)), within=5)
    with pytest.raises(SupervisionError):
        leaves.echo.call(1).get(timeout=WAIT)
    wait_until(lambda: faults)
    fence(procs, faults)
    assert [f.mesh_name for f in faults] == [k.name]


def test_an_owner_that_dies_right_after_spawning_leaves_nothing(procs, faults, tmp_path):
    path = str(tmp_path / "notes")

    def spawn_and_die(self, path):
        p = this_host().spawn_procs({"gpus": 2})
        pids = p.spawn("e", Echo).pid.call().get(timeout=WAIT).values()
        self.third = this_host().spawn_procs({"gpus": 2})  # these may be on their way
        with open(path, "a") as f:
            f.write("\n".join(map(str, pids)) + "\n")
        os._exit(1)

    for n in range(1, 6):
        procs().spawn("k", Keeper).do.broadcast(spawn_and_die, path)
        wait_until(lambda: len(notes(path)) == 2 * n)
        wait_until(lambda: all(gone(int(pid)) for pid in notes(path)), within=5)
        wait_until(lambda: len(faults) == n)
    # the others are processes of this test, and looked for at its end


def test_actors_on_lent_processes_go_with_the_process_of_their_owner_and_the_processes_stay(procs, faults, tmp_path):
    path = str(tmp_path / "notes")
    lent = procs(2)
    mine, k = lent.spawn("mine", Echo), procs().spawn("k", Keeper)

    def borrow(self, lent, path):
        self.guest = lent.spawn("guest", Leaf, path, "guest")
        self.guest.echo.call(1).get(timeout=WAIT)
        return self.guest, os.getpid()

    guest, pid = k.do.call_one(borrow, lent, path).get(timeout=WAIT)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: notes(path) == ["guest normal"] * 2)
    assert mine.echo.call(2).get(timeout=WAIT).values() == [2, 2]
    with pytest.raises(SupervisionError):
        guest.echo.call(1).get(timeout=WAIT)
    wait_until(lambda: [f.mesh_name for f in faults] == [k.name])


def test_an_owner_hears_of_the_death_of_a_nested_owner_only(procs, faults):
    k = procs().spawn("k", Keeper)
    middle = k.grow.call_one(1, Keeper).get(timeout=WAIT)
    leaf = middle.grow.call_one(2).get(timeout=WAIT)
    assert leaf.echo.call(1).get(timeout=WAIT).values() == [1, 1]
    os.kill(middle.pid.call_one().get(timeout=WAIT), signal.SIGKILL)
    assert {t.mesh.rpartition("-")[0] for t in heard(k)} <= {"child", "kept"}
    fence(procs, faults)
    assert all("Killed(sig=9)" in t.report for t in heard(k)) and not faults
