"""The examples of one-sided transfers run as they are and reach what they promise."""

import pathlib
import re
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(name, *args):
    r = subprocess.run([sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=90)
    assert r.returncode == 0, r.stderr
    return r.stdout


def test_a_parameter_server_learns(nothing_left):
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", run("parameter_server.py")).groups()
    assert float(last) < float(first) / 100


def test_generators_follow_a_trainer(nothing_left):
    out = run("weight_sync.py", "--generators", "2", "--seconds", "1.5", "--out", "")
    found = re.findall(r"generator \d: (\d+) versions, (\d+) MB by 'vm'", out)
    assert len(found) == 2 and all(int(versions) > 3 for versions, _ in found)


def test_ping_pong_ends(nothing_left):
    assert re.search(r"200 rounds by 'vm': [\d.]+ us a stroke", run("ping_pong.py", "--rounds", "200"))
