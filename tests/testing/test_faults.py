"""The public test kit: each fault does what it says, on real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from conftest import gone, wait_until
from monarch.actor import Actor, SupervisionError, endpoint
from monarch.config import configured
from monarch.testing import (
    IsolatedError,
    Link,
    freeze,
    hold_gil,
    isolated,
    kill,
    leftovers,
    pids,
    thaw,
    traces,
)

WAIT = 30


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"


def test_pids_are_those_of_the_ranks(procs):
    mesh = procs(3)
    worker = mesh.spawn("w", Worker)
    assert pids(worker) == list(worker.pid.call().get(timeout=WAIT).values())
    assert pids(mesh.slice(gpus=1)) == pids(worker)[1:2]


def test_kill_means_dead_and_known_to_be(procs, faults):
    worker = procs(2).spawn("w", Worker)
    victim = pids(worker)[1]
    kill(worker.slice(gpus=1))
    assert gone(victim)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
        worker.slice(gpus=1).pid.call_one().get(timeout=0.5)
    assert worker.slice(gpus=0).pid.call_one().get(timeout=WAIT) == pids(worker)[0]
    assert pids(worker)[1] == 0
    wait_until(lambda: len(faults) == 1)


def test_kill_takes_another_signal(procs, faults):
    worker = procs().spawn("w", Worker)
    kill(worker, signal.SIGSEGV)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=11"):
        worker.pid.call_one().get(timeout=WAIT)


def test_a_frozen_process_goes_on_when_it_is_thawed(procs, faults):
    worker = procs().spawn("w", Worker)
    worker.pid.call_one().get(timeout=WAIT)
    freeze(worker)
    answer = worker.pid.call_one()
    with pytest.raises(TimeoutError):
        answer.get(timeout=0.2)
    thaw(worker)
    assert answer.get(timeout=WAIT) == pids(worker)[0] and not faults


def test_freeze_and_thaw_return_when_they_have_taken_effect(procs, faults):
    worker = procs().spawn("w", Worker)
    (pid,) = pids(worker)

    def state():
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0]

    for _ in range(20):
        freeze(worker)
        freeze(worker)
        assert state() == "T"
        thaw(worker)
        thaw(worker)
        assert state() != "T"
    assert worker.pid.call_one().get(timeout=WAIT) == pid and not faults


def test_a_process_that_stays_frozen_counts_as_dead(procs, faults):
    with configured(get_actor_state_max_idle="300ms"):
        worker = procs().spawn("patient", Worker)
        (victim,) = pids(worker)
        freeze(worker)
        began = time.monotonic()
        with pytest.raises(SupervisionError, match=r"(?s)patient.*timeout waiting for process.*frozen"):
            worker.pid.call_one().get(timeout=WAIT)
        assert 0.25 < time.monotonic() - began < 5
        wait_until(lambda: len(faults) == 1)
        assert "timeout waiting for" in faults[0].report() and faults[0].mesh_name.startswith("patient-")
        wait_until(lambda: gone(victim))


def test_a_held_interpreter_lock_stops_python_and_counts_as_alive(procs, faults):
    with configured(get_actor_state_max_idle="200ms", get_proc_state_max_idle="200ms"):
        worker = procs().spawn("w", Worker)
        worker.pid.call_one().get(timeout=WAIT)
        held = hold_gil(worker, 1.0)
        began = time.monotonic()
        calls = [worker.pid.call_one() for _ in range(600)]
        assert {c.get(timeout=WAIT) for c in calls} == set(pids(worker))
        assert time.monotonic() - began > 0.8
        held.get(timeout=WAIT)
        assert not faults


def test_faults_say_what_they_take():
    with pytest.raises(TypeError, match="expected an actor mesh or a proc mesh"):
        kill("worker 3")
    with pytest.raises(ValueError, match="must not be negative"):
        hold_gil(None, -1)


class Echo:
    """A TCP server that returns what it gets."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, name="echo")
        self.thread.start()

    def run(self):
        threads = []
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self.serve, args=(sock,), name="echo-one"))
            threads[-1].start()
        for thread in threads:
            thread.join(WAIT)

    @staticmethod
    def serve(sock):
        with sock:
            while data := sock.recv(65536):
                sock.sendall(data)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(WAIT)


def dial(link):
    host, _, port = link.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def test_a_link_passes_everything_on_and_can_be_cut_and_mended():
    with Echo() as echo, Link(echo.address) as link, dial(link) as sock:
        big = os.urandom(3_000_000)
        sender = threading.Thread(target=sock.sendall, args=(big,), name="sender")
        sender.start()
        got = b""
        while len(got) < len(big):
            got += sock.recv(1 << 20)
        sender.join(WAIT)
        assert got == big
        link.cut()
        sock.sendall(b"into the void")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(100)
        link.mend()
        sock.settimeout(WAIT)
        assert sock.recv(100) == b"into the void"


def test_a_link_delays():
    with Echo() as echo, Link(echo.address) as link, dial(link) as sock:
        link.delay(0.1)
        began = time.monotonic()
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        assert 0.2 <= time.monotonic() - began < 5


def test_a_dropped_link_closes_and_refuses_until_it_is_mended():
    with Echo() as echo, Link(echo.address) as link:
        with dial(link) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            link.drop()
            assert sock.recv(1) == b""
        with dial(link) as sock:
            assert sock.recv(1) == b""
        link.mend()
        with dial(link) as sock:
            sock.sendall(b"y")
            assert sock.recv(1) == b"y"


def test_links_are_for_tcp():
    with pytest.raises(ValueError, match="not a tcp"):
        Link("ipc:///tmp/x")


@isolated(timeout=30)
def add(a, b):
    return a + b, os.getpid()


def test_an_isolated_function_runs_elsewhere_and_returns():
    total, pid = add(2, 3)
    assert total == 5 and pid != os.getpid() and gone(pid)


@isolated(timeout=30)
def give_up(code):
    print("last words", file=sys.stderr)
    os._exit(code)


def test_an_isolated_function_may_end_its_interpreter():
    with pytest.raises(IsolatedError, match="last words") as caught:
        give_up(7)
    assert caught.value.returncode == 7


@isolated(timeout=0.5)
def never():
    threading.Event().wait(60)


def test_an_isolated_function_has_a_limit():
    with pytest.raises(TimeoutError, match="never"):
        never()


def test_leftovers_are_what_is_new():
    before = traces()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over", args=(WAIT,))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    thread.start()
    left = leftovers(before, within=0)
    assert left.threads == {"left-over"} and left.processes == {child.pid}
    assert "left-over" in str(left) and str(child.pid) in str(left)
    release.set()
    child.communicate(b"\n")
    thread.join(WAIT)
    assert not leftovers(before)


LEAKY = """
import threading, time
import pytest

stop = threading.Event()

def test_leaves_a_thread():
    threading.Thread(target=stop.wait, args=(30,), name="forgotten").start()

@pytest.mark.leaves_traces
def test_says_so():
    threading.Thread(target=stop.wait, args=(30,), name="meant").start()

def test_leaves_nothing():
    pass

def test_ends_them():
    stop.set()
"""


def test_the_plugin_fails_tests_that_leave_something(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["monarch.testing.plugin"]\n')
    (tmp_path / "test_leaky.py").write_text(textwrap.dedent(LEAKY))
    r = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--monarch-leak-wait", "0.2", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert "4 passed, 1 error" in r.stdout, r.stdout
    assert "test_leaves_a_thread" in r.stdout and "left something behind: threads: forgotten" in r.stdout
