"""The conformance programs that lie beside the repository, when they are there."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent.parent.parent / "shared" / "conformance" / "run.py"


@pytest.mark.skipif(not RUN.exists(), reason="the conformance programs are not beside this checkout")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("area", ["actors", "meshes", "procs", "supervision"])
def test_programs_print_their_transcripts(area):
    r = subprocess.run([sys.executable, str(RUN), area, "--timeout", "60"], capture_output=True, text=True, timeout=390)
    assert r.returncode == 0, r.stdout + r.stderr
