"""The examples of failure and recovery run as they are, end by themselves, and leave no process behind."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import uuid

import pytest

from conftest import wait_until

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "fault_tolerance"


def marked(mark: str) -> list[str]:
    """Pids of processes that were started with `mark` in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if mark.encode() in f.read():
                    found.append(pid)
        except OSError:
            pass
    return found


def run(name: str, timeout: float = 60) -> str:
    mark = uuid.uuid4().hex
    r = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "TEST_MARK": mark},
    )
    assert r.returncode == 0, r.stdout + r.stderr
    wait_until(lambda: not marked(mark))
    return r.stdout


def test_a_call_is_tried_on_another_replica():
    out = run("retry_on_another_replica.py")
    assert out.count("asking another replica") == 2 and out.count("Killed(sig=9)") == 2
    assert "all 12 questions answered, 2 replicas lost" in out


def test_a_pool_replaces_itself():
    out = run("self_healing_pool.py")
    assert out.count("killing worker") == 3 and out.count("the pool replaced itself after rank") == 3
    assert "all 480 jobs answered" in out


def test_the_rest_of_a_mesh_goes_on():
    out = run("go_on_with_the_rest.py")
    assert out.count("added up 100000 numbers: 4999950000") == 3
    assert "done with ranks [0, 1, 3, 4]" in out


@pytest.mark.slow
def test_training_loses_workers_and_gets_new_ones():
    pytest.importorskip("torch")
    out = run("elastic_training.py", timeout=110)
    assert out.count("killing the worker") == 3 and out.count(": lost worker-") == 3
    assert out.count(": took in worker-") == 7
    assert re.search(r"epoch 3: .* workers 3\n", out) and re.search(r"epoch 5: .* workers 2\n", out)
    score = re.search(r"final accuracy ([\d.]+)% with 4 workers after 3 deaths", out)
    assert score and float(score[1]) > 90
