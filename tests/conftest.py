"""Shared fixtures: meshes that are stopped, faults that are recorded, and a check that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import monarch.actor
from actors_for_tests import PortMaker
from monarch.actor import this_host
from monarch.runtime import client

pytest_plugins = ["monarch.testing.plugin", "tensor_meshes"]

WAIT = 30

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: children would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(fact, within=10.0):
    """Polls `fact` until it is true; fails after `within` seconds."""
    end = time.monotonic() + within
    while not fact():
        assert time.monotonic() < end, "did not become true in time"
        time.sleep(0.01)


def ask(endpoint, *args, **kwargs):
    """The answer of the only actor of a mesh."""
    return endpoint.call_one(*args, **kwargs).get(timeout=WAIT)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(autouse=True)
def faults(monkeypatch):
    """An unhandled failure ends the program by default; in tests it is recorded."""
    seen = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", seen.append)
    yield seen
    node = client.peek()
    if node is not None and client.ROOT_ACTOR in node.cells:  # what is on its way still finds this hook
        wait_until(lambda: not client.root().handling)


@pytest.fixture
def procs(nothing_left):
    """`procs(n)`: a mesh of n processes, dim `gpus`; stopped at the end."""
    made = []

    def spawn(n=1, **kwargs):
        made.append(this_host().spawn_procs({"gpus": n}, **kwargs))
        return made[-1]

    yield spawn
    for mesh in made:
        mesh.stop().get(timeout=WAIT)


def a_dead_port(procs):
    """A port whose receiver's process is gone."""
    p = procs()
    port = p.spawn("maker", PortMaker).make.call_one().get(timeout=WAIT)
    p.stop().get(timeout=WAIT)
    return port


@pytest.fixture
def dead_port(procs):
    return a_dead_port(procs)


def run_script(body: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess:
    """Runs `body` as a fresh program."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        text=True,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **env},
    )
