"""Shared fixtures: meshes that are stopped, faults that are recorded, and a check that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import monarch.actor
from monarch.actor import this_host
from monarch.runtime import client

WAIT = 30


def wait_until(fact, within=10.0):
    """Polls `fact` until it is true; fails after `within` seconds."""
    end = time.monotonic() + within
    while not fact():
        assert time.monotonic() < end, "did not become true in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def descendants(pid: int) -> set[int]:
    """Live processes below `pid`, except zygotes (one or two live as long as the client)."""
    parents: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as f:
                    head, _, tail = f.read().rpartition(")")
            except OSError:
                continue
            fields = tail.split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry))
                names[int(entry)] = head.partition("(")[2]
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            todo.append(child)
            if names[child] != "monarch-zygote" and "zygote" not in _command(child):
                found.add(child)
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as f:
            text = f.read()
    except OSError:
        return ""
    # forked workers share the zygote's command line; their name tells them apart
    with_name = ""
    try:
        with open(f"/proc/{pid}/comm") as f:
            with_name = f.read().strip()
    except OSError:
        return ""
    return text if with_name.startswith(("python", "monarch-zygote")) else ""


def left_behind(before: dict[str, set]) -> dict[str, set]:
    now = traces()
    return {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}


def sockets() -> list[str]:
    """Socket files of this client's processes."""
    node = client.peek()
    if node is None or node.agent is None or not os.path.isdir(node.agent.folder):
        return []
    return [name for name in os.listdir(node.agent.folder) if name != "agent"]


def traces() -> dict[str, set]:
    return {
        "processes": descendants(os.getpid()),
        "threads": {
            t.name for t in threading.enumerate() if not t.name.startswith(("monarch-r", "monarch-controllers", "Main"))
        },
        "socket files": set(sockets()),
        "shared memory": set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set(),
    }


@pytest.fixture(autouse=True)
def nothing_left():
    before = traces()
    yield
    end = time.monotonic() + 5
    while left_behind(before) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left_behind(before), f"left behind: {left_behind(before)}"


@pytest.fixture(autouse=True)
def faults(monkeypatch):
    """An unhandled failure ends the program by default; in tests it is recorded."""
    seen = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", seen.append)
    return seen


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


def run_script(body: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess:
    """Runs `body` as a fresh program."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        text=True,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **env},
    )
