import os
import signal
import subprocess
import sys
import time

import pytest

from actors_for_tests import AsyncEcho, Echo
from conftest import WAIT, gone, run_script, wait_until
from monarch.actor import Actor, SupervisionError, endpoint, this_host


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda e: e.exit.call_one(3), "exited with non-zero code 3"),
        (lambda e: e.exit.call_one(0), "process exited cleanly"),
        (lambda e: e.segfault.call_one(), "Killed\\(sig=11"),
    ],
    ids=["os._exit", "os._exit(0)", "segfault"],
)
def test_a_dead_process_fails_its_callers_with_the_reason(procs, faults, how, text):
    e = procs(2).spawn("e", Echo)
    with pytest.raises(SupervisionError, match=text):
        how(e.slice(gpus=1)).get(timeout=WAIT)
    with pytest.raises(SupervisionError, match=text):
        e.echo.call(1).get(timeout=WAIT)
    assert e.slice(gpus=0).echo.call_one(1).get(timeout=WAIT) == 1
    wait_until(lambda: faults)
    assert faults[0].crashed_ranks == [1] and faults[0].mesh_name == e.name


def test_a_killed_process_fails_pending_calls_at_once(procs, faults):
    e = procs(2).spawn("e", Echo)
    pid = e.slice(gpus=1).pid.call_one().get(timeout=WAIT)
    pending = [e.nap.call(60), e.slice(gpus=1).nap.call_one(60)]
    stream = list(e.echo.stream(1))
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for f in pending:
        with pytest.raises(SupervisionError, match=r"Killed\(sig=9\) \(SIGKILL\)"):
            f.get(timeout=WAIT)
    assert time.monotonic() - began < 1.0
    del stream


def test_the_failure_text_is_for_people(procs, faults):
    with pytest.raises(SupervisionError) as info:
        procs(2, name="trainers").spawn("workers", Echo).exit.call(1).get(timeout=WAIT)
    text = str(info.value)
    assert "workers" in text and "Echo" in text and "trainers-" in text and len(text.splitlines()) < 15
    assert "pid" in text and not any(w in text for w in ("Envelope", "mailbox", "0x", "CRC"))


class Bad(Actor):
    def __init__(self):
        raise FileNotFoundError("no model file")

    @endpoint
    def f(self): ...


def test_every_call_after_a_failed_init_carries_the_cause(procs, faults):
    b = procs().spawn("b", Bad)
    for _ in range(2):
        with pytest.raises(SupervisionError, match="no model file"):
            b.f.call_one().get(timeout=WAIT)
    wait_until(lambda: len(faults) == 1)


@pytest.mark.parametrize("cls", [Echo, AsyncEcho])
def test_a_broadcast_that_raises_fails_the_actor_and_the_owner_hears(procs, faults, cls):
    e = procs().spawn("e", cls)
    e.fail.broadcast()
    with pytest.raises(SupervisionError, match="boom"):
        e.echo.call_one(1).get(timeout=WAIT)
    wait_until(lambda: faults)
    assert "boom" in faults[0].report()


def test_a_busy_process_is_not_dead(procs, faults):
    def spin(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))
        return "done"

    assert procs().spawn("e", Echo).apply.call_one(spin, 3).get(timeout=WAIT) == "done"
    assert not faults


def test_stop_means_gone_and_twice_is_fine(procs):
    p = procs(3)
    e = p.spawn("e", Echo)
    pids = e.pid.call().get(timeout=WAIT).values()
    p.stop().get(timeout=WAIT)
    assert all(map(gone, pids))
    p.stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="stopped"):
        e.echo.call(1).get(timeout=WAIT)
    with pytest.raises(RuntimeError, match="already been stopped"):
        p.spawn("late", Echo)


def test_stop_ends_a_process_that_is_busy(procs):
    p = procs()
    e = p.spawn("e", Echo)
    pid = e.pid.call_one().get(timeout=WAIT)
    e.nap.broadcast(600)
    p.stop().get(timeout=WAIT)
    assert gone(pid)


def test_stop_is_scoped(procs):
    a, b = procs(), procs()
    e = b.spawn("e", Echo)
    a.stop().get(timeout=WAIT)
    assert e.echo.call_one(2).get(timeout=WAIT) == 2


def test_exit_handlers_and_finalisers_run_in_workers(procs, tmp_path):
    mark, dropped = str(tmp_path / "atexit"), str(tmp_path / "del")

    def arm():
        import atexit
        import sys
        import types

        class Last:
            def __del__(self):
                open(dropped, "w").close()

        module = types.ModuleType("has_a_global")
        module.last = Last()
        sys.modules["has_a_global"] = module
        atexit.register(lambda: open(mark, "w").close())

    p = procs()
    p.spawn("e", Echo).apply.call_one(arm).get(timeout=WAIT)
    p.stop().get(timeout=WAIT)
    assert os.path.exists(mark) and os.path.exists(dropped)


CLIENT = """
import os, sys, time
from monarch.actor import Actor, endpoint, this_host
class Leaf(Actor):
    @endpoint
    def pid(self): return os.getpid()
class Nest(Actor):
    @endpoint
    def pids(self):
        self.inner = this_host().spawn_procs({"gpus": 2}).spawn("inner", Leaf)
        return [os.getpid(), *self.inner.pid.call().get().values()]
nest = this_host().spawn_procs().spawn("nest", Nest)
from monarch.runtime.client import current_node
print(current_node().agent.folder, *nest.pids.call_one().get(), flush=True)
how = sys.argv[1]
if how == "raise": raise RuntimeError("gives up")
if how == "_exit": os._exit(8)
if how == "wait": time.sleep(60)
"""


@pytest.mark.parametrize("how", ["end", "raise", "_exit", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_survives_the_client(how):
    argument = "wait" if how.startswith("SIG") else how
    p = subprocess.Popen(
        [sys.executable, "-c", CLIENT, argument], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    folder, *pids = p.stdout.readline().split()
    if how.startswith("SIG"):
        p.send_signal(getattr(signal, how))
    p.wait(WAIT)
    p.stdout.close()
    wait_until(lambda: all(gone(int(pid)) for pid in pids), within=5)
    wait_until(lambda: not os.path.exists(folder), within=5)


def test_the_default_hook_ends_a_sleeping_client():
    r = run_script(
        """
        import os, time
        from monarch.actor import Actor, endpoint, this_host
        class A(Actor):
            @endpoint
            def die(self): os._exit(3)
        this_host().spawn_procs({"procs": 1}).spawn("a", A).die.broadcast(); time.sleep(20); print("never noticed")
        """
    )
    assert r.returncode == 1 and "never noticed" not in r.stdout and "non-zero code 3" in r.stderr


def test_an_environment_for_each_process_is_there_from_the_start(procs):
    def at_start(name):
        return [x for x in open("/proc/self/environ").read().split("\0") if x.startswith(name)]

    p = this_host().spawn_procs({"procs": 2}, env=lambda point: {"MY_RANK": str(point["procs"])})
    try:
        got = p.spawn("e", Echo).apply.call(at_start, "MY_RANK").get(timeout=WAIT).values()
        assert got == [["MY_RANK=0"], ["MY_RANK=1"]]
    finally:
        p.stop().get(timeout=WAIT)


def test_a_command_that_cannot_start_is_reported(faults):
    from monarch.actor import BootstrapCommand

    p = this_host().spawn_procs(bootstrap_command=BootstrapCommand("/no/such/program", None, [], {}))
    with pytest.raises(ValueError, match=r"(?s)error creating proc \(host rank 0\).*code 127.*/no/such/program"):
        p.initialized.get(timeout=WAIT)
    p.stop().get(timeout=WAIT)


def test_a_bootstrap_that_fails_unnoticed_is_a_failure_of_the_owner(faults):
    def failing():
        raise LookupError("setup went wrong")

    p = this_host().spawn_procs({"gpus": 2}, bootstrap=failing, name="unlucky")
    wait_until(lambda: faults)
    assert "setup went wrong" in faults[0].report() and faults[0].mesh_name.startswith("unlucky-")
    p.stop().get(timeout=WAIT)
    assert len(faults) == 1


def test_a_command_callable_that_raises_is_reported_too(faults):
    def per_rank(point):
        raise KeyError("no such rank")

    p = this_host().spawn_procs({"gpus": 2}, bootstrap_command=per_rank)
    with pytest.raises(ValueError, match="per-rank bootstrap callable raised: KeyError"):
        p.initialized.get(timeout=WAIT)
    p.stop().get(timeout=WAIT)
    assert not faults  # it was seen
