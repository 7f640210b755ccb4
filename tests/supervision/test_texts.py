"""The table of `docs/guide/fault_tolerance.md`, row by row: who is told, what a caller gets, what the text has."""

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from owners import Frail, Heedless, Keeper
from watching import fence

from conftest import WAIT, a_dead_port, wait_until
from monarch.actor import ActorError, Port, SupervisionError, endpoint
from monarch.config import configured
from monarch.testing import freeze, kill, local_hosts

GUIDE = Path(__file__).parents[2] / "docs/guide/fault_tolerance.md"
HEADER = "| what happened | the owner is told | a caller gets | the text has |"


def rows():
    """what happened -> (is the owner told, what the caller gets, fragments of the text)"""
    table = GUIDE.read_text().split(HEADER)[1].split("\n\n")[0].strip().splitlines()[1:]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table]
    return {what: (told, gets, re.findall("`([^`]+)`", text)) for what, told, gets, text in cells}


class Subject(Frail):
    """Breaks in every way of the table."""

    def __init__(self, bad=False):
        if bad:
            raise ValueError("boom")

    @endpoint
    def raises(self):
        raise ValueError("boom")

    @endpoint(explicit_response_port=True)
    def raises_with_a_port(self, port):
        raise ValueError("boom")

    @endpoint
    def ends(self, code):
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(code)

    @endpoint
    def send_to(self, port: Port):
        port.send("hello")


class Unclean(Subject):
    def __cleanup__(self, exc):
        raise ValueError("boom")


def one(procs, cls=Subject, *args):
    """The second of two ranks of a mesh called `trainer`."""
    return procs(2).spawn("trainer", cls, *args).slice(gpus=1)


def calls(method, *args):
    """A case: the method is called, and answers or not."""

    def case(procs):
        m = one(procs)
        with contextlib.suppress(Exception):
            getattr(m, method).call_one(*args).get(timeout=WAIT)
        return m

    return case


def broadcast(procs):
    m = one(procs)
    m.raises.broadcast()
    return m


def stopped(procs, cls=Subject):
    m = procs(2).spawn("trainer", cls)
    m.slice(gpus=1).echo.call_one(1).get(timeout=WAIT)
    m.stop().get(timeout=WAIT)
    return m.slice(gpus=1)


def killed(procs):
    m = one(procs)
    kill(m)
    return m


def frozen(procs):
    m = one(procs)
    m.echo.call_one(1).get(timeout=WAIT)
    freeze(m)
    return m


def childs_death(procs, cls, *args):
    m = one(procs, cls, *args)
    kill(m.grow.call_one(1).get(timeout=WAIT))
    return m


def undeliverable(procs):
    port = a_dead_port(procs)
    m = one(procs)
    m.send_to.broadcast(port)
    return m


CASES = {
    "an endpoint raises, and somebody waits for its answer": one,
    "an endpoint raises in a `broadcast`": broadcast,
    "an endpoint with `explicit_response_port` raises": calls("raises_with_a_port"),
    "an endpoint calls `sys.exit(4)`, or raises another `BaseException`": calls("apply", sys.exit, 4),
    "`__init__` raises": lambda procs: one(procs, Subject, True),
    '`context().actor_instance.abort("disk full")`': calls("end", "abort", "disk full"),
    '`context().actor_instance.stop("done")`': calls("end", "stop", "done"),
    "the owner calls `mesh.stop()`": stopped,
    "the process exits with code 3": calls("ends", 3),
    "the process exits with code 0 on its own": calls("ends", 0),
    "the process is killed (SIGKILL, out of memory)": killed,
    "the process crashes in native code": calls("segfault"),
    "the process is frozen (SIGSTOP) for `get_actor_state_max_idle`": frozen,
    "an owned mesh fails and the actor does not handle it": lambda procs: childs_death(procs, Heedless),
    "`__supervise__` raises": lambda procs: childs_death(procs, Keeper, ValueError("boom")),
    "`__cleanup__` raises": lambda procs: stopped(procs, Unclean),
    "a message that the actor sent cannot be delivered": undeliverable,
}
HOST_LOST = "its host is lost: connection closed, or silent for `get_proc_state_max_idle`"


def test_each_row_of_the_guide_is_tested_here():
    assert set(rows()) == {*CASES, HOST_LOST}


def names_it(text):
    """The text names the actor with its class and rank, the process, its pid and its host."""
    assert "'gpus': 1/2" in text and re.search(r"<root>\.<\w+\.\w+ trainer\{", text), text
    assert re.search(r"process \S+-\d+, pid \d+, on " + re.escape(socket.gethostname()), text), text


@pytest.fixture
def impatient():
    with configured(get_actor_state_max_idle="300ms"):
        yield


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", CASES)
def test_a_failure_is_told_as_the_guide_says(procs, faults, what):
    told, gets, fragments = rows()[what]
    mesh = CASES[what](procs)
    if gets == "`ActorError`":
        with pytest.raises(ActorError, match="ValueError: boom") as info:
            mesh.raises.call_one().get(timeout=WAIT)
        assert 'raise ValueError("boom")' in str(info.value) and "trainer.raises" in str(info.value)
        assert mesh.echo.call_one(1).get(timeout=WAIT) == 1
    if told.startswith("yes"):
        wait_until(lambda: any(1 in f.crashed_ranks for f in faults))
        failure = next(f for f in faults if 1 in f.crashed_ranks)
        report = failure.report()
        names_it(report)
        assert all(f in report for f in fragments), report
        assert "and all its descendants have failed" in report
        assert re.match(
            r"MeshFailure\(mesh_name=trainer-\w+, crashed_ranks=\[1\], event=Supervision event: actor ", str(failure)
        )
        assert failure.mesh_name.startswith("trainer-") and failure.cause.splitlines()[-1] in report
    else:
        fence(procs, faults)
        assert not faults
    if gets == "`SupervisionError`":
        with pytest.raises(SupervisionError) as info:
            mesh.pid.call_one().get(timeout=WAIT)
        text = str(info.value)
        assert text.startswith("Endpoint call trainer.pid() failed, "), text
        assert "'gpus': 1/2" in text and all(f in text for f in fragments), text
        if told.startswith("yes"):
            names_it(text)


def test_a_lost_host_is_told_as_the_guide_says(faults):
    told, gets, fragments = rows()[HOST_LOST]
    with local_hosts(1) as hosts:
        m = hosts.mesh.spawn_procs({"gpus": 2}).spawn("trainer", Subject)
        m.echo.call(1).get(timeout=WAIT)
        hosts.lose(0)
        wait_until(lambda: len(faults) == 2)
        with pytest.raises(SupervisionError) as info:
            m.slice(gpus=1, hosts=0).echo.call_one(1).get(timeout=WAIT)
    assert told == "yes, for each rank" and gets == "`SupervisionError`"
    for text in (faults[0].report(), faults[1].report(), str(info.value)):
        assert all(f in text for f in fragments) and "trainer" in text and "'gpus': " in text
        assert "tcp://" in text, f"which host? {text}"
