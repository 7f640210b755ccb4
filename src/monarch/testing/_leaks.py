"""What a piece of code left behind: processes, threads, socket files, shared memory."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

from monarch.runtime import client

#: threads that live as long as the client does
_LASTING = ("MainThread", "monarch-runtime", "monarch-root", "monarch-controllers")


class Traces(NamedTuple):
    """What exists at one moment. `processes` are pids below this process, without the framework's starters."""

    processes: frozenset[int]
    threads: frozenset[str]
    socket_files: frozenset[str]
    shared_memory: frozenset[str]

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        parts = []
        for kind, items in zip(self._fields, self, strict=True):
            if items:
                names = [_describe(i) if isinstance(i, int) else str(i) for i in items]
                parts.append(f"{kind.replace('_', ' ')}: {', '.join(sorted(names))}")
        return "; ".join(parts)


def traces() -> Traces:
    """What exists now. Processes and shared memory can be seen on Linux only."""
    return Traces(
        frozenset(_descendants(os.getpid())),
        frozenset(t.name for t in threading.enumerate() if t.name not in _LASTING),
        frozenset(_socket_files()),
        frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset(),
    )


def leftovers(before: Traces, within: float = 5.0) -> Traces:
    """What exists now and did not exist in `before`, after waiting up to `within` seconds for it to go away."""
    end = time.monotonic() + within
    while True:
        now = traces()
        left = Traces(
            now.processes - before.processes,
            now.threads - before.threads,
            now.socket_files - before.socket_files,
            now.shared_memory - before.shared_memory,
        )
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.02)


def _socket_files() -> list[str]:
    node = client.peek()
    if node is None or node.agent is None or not os.path.isdir(node.agent.folder):
        return []
    return [name for name in os.listdir(node.agent.folder) if name != "agent"]


def _descendants(pid: int) -> set[int]:
    """Live processes below `pid`, except zygotes (one or two live as long as the client)."""
    children: dict[int, list[int]] = {}
    if not os.path.isdir("/proc/self"):
        return set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = _stat(int(entry))
            if stat is not None and stat[1] != "Z":
                children.setdefault(stat[2], []).append(int(entry))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            todo.append(child)
            if not _is_zygote(child):
                found.add(child)
    return found


def _stat(pid: int) -> tuple[str, str, int] | None:
    """(name, state, parent) of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            head, _, tail = f.read().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    return head.partition("(")[2], fields[0], int(fields[1])


def _is_zygote(pid: int) -> bool:
    stat = _stat(pid)
    if stat is None or stat[0] == "monarch-zygote":
        return True
    try:
        with open(f"/proc/{pid}/cmdline") as f:
            command = f.read()
    except OSError:
        return True
    # a forked worker shares the zygote's command line; its name tells them apart
    return stat[0].startswith("python") and "runtime.zygote" in command


def _describe(pid: int) -> str:
    stat = _stat(pid)
    return f"{pid} ({stat[0]}, state {stat[1]})" if stat else str(pid)
