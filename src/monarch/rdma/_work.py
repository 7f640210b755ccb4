"""Threads for transfers too long for the caller's thread: started when needed, gone when idle for a moment."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

from monarch.config import store

#: seconds after which a thread without work ends
_IDLE = 0.5

_cond = threading.Condition()
_jobs: collections.deque[Callable[[], None]] = collections.deque()
_threads = _idle = 0


def submit(job: Callable[[], None]) -> None:
    """Runs `job`, which must not raise, on one of at most `rdma_runtime_worker_threads` threads; in order."""
    global _threads
    with _cond:
        _jobs.append(job)
        if _idle >= len(_jobs):
            _cond.notify()
            return
        if _threads >= max(1, int(store.effective("rdma_runtime_worker_threads"))):
            return
        _threads += 1
    threading.Thread(target=_run, name="monarch-rdma", daemon=True).start()


def _run() -> None:
    global _threads, _idle
    while True:
        with _cond:
            while not _jobs:
                _idle += 1
                woken = _cond.wait(_IDLE)
                _idle -= 1
                if not woken and not _jobs:
                    _threads -= 1
                    return
            job = _jobs.popleft()
        job()
        del job


def _after_fork() -> None:
    global _cond, _threads, _idle
    _cond = threading.Condition()
    _jobs.clear()
    _threads = _idle = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
