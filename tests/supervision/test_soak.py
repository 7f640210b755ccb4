"""The chaos run, for a minute. `make soak MINUTES=10` runs it for longer."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

SOAK = pathlib.Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_minute_of_chaos_loses_nothing():
    r = subprocess.run([sys.executable, str(SOAK), "--minutes", "1"], capture_output=True, text=True, timeout=170)
    print(r.stdout)
    assert r.returncode == 0, r.stdout
    deaths = int(re.search(r"deaths: (\d+)", r.stdout)[1])
    heard, lost = map(int, re.search(r"heard by the supervisor: (\d+); lost: (\d+)", r.stdout).groups())
    assert deaths > 100 and heard == deaths and lost == 0
