"""Faults that users of other implementations reported, as checks. The numbers are those of the reports."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from actors_for_tests import Echo
from conftest import WAIT, gone, run_script, wait_until
from monarch.actor import Actor, ActorError, SupervisionError, endpoint, this_host, this_proc

ROOT = Path(__file__).resolve().parent.parent


def test_d12_import_needs_no_environment():
    r = subprocess.run([sys.executable, "-c", "import monarch.actor"], env={"PATH": ""}, capture_output=True, timeout=9)
    assert r.returncode == 0, r.stderr


def test_d12_a_program_needs_no_environment():
    body = (
        "from monarch.actor import *\n"
        "class A(Actor):\n    @endpoint\n    def f(self): return 1\n"
        "print(this_host().spawn_procs().spawn('a', A).f.call_one().get(30))"
    )
    r = subprocess.run([sys.executable, "-c", body], env={"PATH": ""}, capture_output=True, text=True, timeout=60)
    assert (r.stdout, r.stderr) == ("1\n", "")


def test_d13_no_native_code_of_ours():
    assert not [p for p in (ROOT / "src").rglob("*") if p.suffix in (".so", ".c", ".cpp", ".rs", ".pyx", ".pyd")]


class Versions(Actor):
    @endpoint
    def version(self):
        return sys.executable, sys.version_info[:3]


def test_d14_workers_use_this_interpreter(procs):
    here = sys.executable, sys.version_info[:3]
    assert procs().spawn("v", Versions).version.call_one().get(timeout=WAIT) == here


def test_d15_building_needs_no_compiler():
    text = (ROOT / "pyproject.toml").read_text()
    requires = ast.literal_eval(text.partition("[build-system]")[2].partition("requires = ")[2].partition("\n")[0])
    assert [r.partition(">")[0].partition("=")[0] for r in requires] == ["setuptools"]


def test_d16_import_touches_no_gpu_library():
    r = run_script(
        "import sys, monarch.actor; print('torch' in sys.modules, any('cuda' in l for l in open('/proc/self/maps')))"
    )
    assert r.stdout.split() == ["False", "False"]


def test_d20_the_first_round_trip_is_quick():
    body = """
        import time; t = time.monotonic()
        from monarch.actor import Actor, endpoint, this_host
        class A(Actor):
            @endpoint
            def f(self): return 1
        this_host().spawn_procs({"procs": 1}).spawn("a", A).f.call_one().get(); print(time.monotonic() - t)
    """
    assert min(float(run_script(body).stdout) for _ in range(3)) < 1.5


def test_d24_a_failing_broadcast_ends_a_program_that_waits_for_nothing():
    r = run_script("""
        import os, time
        from monarch.actor import Actor, endpoint, this_host
        class A(Actor):
            @endpoint
            def die(self): os._exit(3)
        this_host().spawn_procs({"procs": 1}).spawn("a", A).die.broadcast(); time.sleep(20); print("never noticed")
    """)
    assert r.returncode != 0 and "never noticed" not in r.stdout


def test_d26_imports_of_a_script_travel_as_imports():
    r = run_script("""
        import threading
        from monarch.actor import Actor, endpoint, this_host
        LOCK = threading.Lock
        class A(Actor):
            @endpoint
            def f(self):
                with LOCK(): return 1
        print(this_host().spawn_procs({"procs": 1}).spawn("a", A).f.call_one().get())
    """)
    assert r.stdout.strip() == "1", r.stderr


def test_d26_an_unpicklable_global_of_a_script_is_an_error_at_spawn():
    r = run_script("""
        import threading
        from monarch.actor import Actor, endpoint, this_host
        LOCK = threading.Lock()
        class A(Actor):
            @endpoint
            def f(self):
                with LOCK: return 1
        try: this_host().spawn_procs({"procs": 1}).spawn("a", A)
        except TypeError as e: print("TypeError", "lock" in str(e))
    """)
    assert r.stdout.strip() == "TypeError True", r.stderr


def test_d26_classes_of_a_script_keep_their_identity():
    r = run_script("""
        from monarch.actor import Actor, ActorError, endpoint, this_host
        class Mine(Exception): ...
        class A(Actor):
            @endpoint
            def f(self): raise Mine("x")
        try: this_host().spawn_procs({"procs": 1}).spawn("a", A).f.call_one().get()
        except ActorError as e: print(isinstance(e.exception, Mine))
    """)
    assert r.stdout.strip() == "True", r.stderr


SERVE = """
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address={address!r}, ca="trust_all_connections")
"""


@pytest.fixture
def worker(tmp_path):
    """The address of a worker daemon on this machine."""
    address = f"ipc://{tmp_path}/worker"
    daemon = subprocess.Popen([sys.executable, "-c", SERVE.format(address=address)])
    yield address
    daemon.kill()
    daemon.wait(10)


def test_d29_hosts_are_emptied_and_kept(worker):
    r = run_script(
        """
        import os
        from monarch.actor import Actor, attach_to_workers, endpoint
        class E(Actor):
            @endpoint
            def pid(self): return os.getpid()
        def attach(): return attach_to_workers(ca="trust_all_connections", workers=[os.environ["WORKER"]])
        def gone(pid):
            try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
            except OSError: return True
        hosts = attach()
        pid = hosts.spawn_procs({"procs": 1}).spawn("e", E).pid.call_one().get(30)
        hosts.stop().get(30); print(gone(pid)); hosts.stop().get(30)
        again = attach()
        pid = again.spawn_procs({"procs": 1}).spawn("e", E).pid.call_one().get(30)
        again.shutdown().get(30); print(gone(pid))
        """,
        WORKER=worker,
    )
    assert r.stdout.split() == ["True", "True"], r.stderr


def test_d29_this_host_is_a_reference_that_cannot_be_stopped():
    with pytest.raises(RuntimeError, match="reference"):
        this_host().stop()


class Named(Actor):
    def __init__(self, name, log):
        self.label, self.log = name, log

    @endpoint
    def grow(self):
        self.child = this_host().spawn_procs({"procs": 1}).spawn("k", Named, self.label + "c", self.log)
        self.child.hi.call_one().get(timeout=WAIT)

    @endpoint
    def hi(self): ...

    def __cleanup__(self, exc):
        with open(self.log, "a") as f:
            f.write(f"{self.label}:{exc} ")


def test_d33_cleanup_runs_once_and_children_first(procs, tmp_path):
    log = str(tmp_path / "log")
    p = procs()
    n = p.spawn("n", Named, "p", log)
    n.grow.call_one().get(timeout=WAIT)
    p.stop().get(timeout=WAIT)
    assert open(log).read().split() == ["pc:None", "p:None"]


def test_d38_a_stopped_worker_runs_atexit_and_flushes(tmp_path):
    r = run_script(f"""
        from monarch.actor import Actor, endpoint, this_host
        class A(Actor):
            @endpoint
            def arm(self):
                import atexit, sys
                atexit.register(lambda: open({str(tmp_path / "mark")!r}, "w").write("x"))
                sys.stdout.write("unflushed")
        p = this_host().spawn_procs({{"procs": 1}}); p.spawn("a", A).arm.call_one().get(30); p.stop().get(30)
    """)
    assert (tmp_path / "mark").exists() and "unflushed" in r.stdout


def test_d40_a_killed_process_is_reported_within_a_second(procs, faults):
    e = procs().spawn("e", Echo)
    pid = e.pid.call_one().get(timeout=WAIT)
    pending = e.nap.call_one(60)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        pending.get(timeout=10)
    with pytest.raises(SupervisionError):
        e.echo.call_one(1).get(timeout=10)
    assert time.monotonic() - began < 1.0
    wait_until(lambda: len(faults) == 1)


class Blocks(Actor):
    @endpoint
    async def ask(self):
        other = this_proc().spawn("o", Echo)
        try:
            return other.echo.call_one(1).get(timeout=5)
        except RuntimeError as e:
            return "await" in str(e)


def test_d42_get_inside_a_loop_never_hangs(procs):
    assert procs().spawn("a", Blocks).ask.call_one().get(timeout=20) in (1, True)


def test_d45_threads_and_descriptors_do_not_grow_with_calls(procs):
    e = procs().spawn("e", Echo)
    for i in range(200):
        e.echo.call_one(i).get(timeout=WAIT)
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for i in range(2000):
        e.echo.call_one(i).get(timeout=WAIT)
    assert threading.active_count() <= threads + 1 and len(os.listdir("/proc/self/fd")) <= fds + 2


def test_d45_meshes_that_come_and_go_leave_no_descriptors(procs):
    def once():
        p = this_host().spawn_procs({"gpus": 2})
        p.spawn("e", Echo).echo.call(1).get(timeout=WAIT)
        p.stop().get(timeout=WAIT)

    for _ in range(3):
        once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        once()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


def test_d46_every_future_has_both_faces(procs):
    p = procs(2)
    e = p.spawn("e", Echo)

    async def awaited():
        return await e.echo.call_one(1) if len(e) == 1 else [(await e.echo.call(1)).values(), await e.echo.choose(2)]

    assert asyncio.run(awaited()) == [e.echo.call(1).get(timeout=WAIT).values(), e.echo.choose(2).get(timeout=WAIT)]

    async def lifetime():
        return [await p.initialized, await e.initialized, await e.stop(), await p.stop()]

    assert asyncio.run(lifetime()) == [True, None, None, None]


def test_d49_lines_of_one_rank_are_never_folded():
    r = run_script("""
        import asyncio
        from monarch.actor import Actor, endpoint, this_host
        from monarch.config import configure
        configure(enable_log_forwarding=True)
        class A(Actor):
            @endpoint
            def f(self): print("foo"); print("foo")
        async def main():
            p = this_host().spawn_procs({"procs": 1})
            await p.logging_option(stream_to_client=True, aggregate_window_sec=1)
            await p.spawn("a", A).f.call()
            await p.stop()
        asyncio.run(main())
    """)
    assert (r.stdout + r.stderr).count("foo") == 2


class Logs(Actor):
    @endpoint
    def records(self):
        import logging

        seen = []

        class Keep(logging.Handler):
            def emit(self, record):
                seen.append((record.actor, record.rank, record.getMessage()))

        logger = logging.getLogger("test_user_reports.x")
        logger.addHandler(Keep())
        logger.warning("hi %s", "there")
        return seen


def test_d52_log_records_know_their_actor(procs):
    ((actor, rank, text),) = procs(2).spawn("l", Logs).slice(gpus=1).records.call_one().get(timeout=WAIT)
    assert (actor, rank) == ("l", 1) and text.endswith("hi there")


class Payload:
    pickled = 0

    def __reduce__(self):
        Payload.pickled += 1
        return str, ("x",)


def test_d72_a_payload_is_serialised_once_however_many_ranks(procs):
    Payload.pickled = 0
    assert procs(4).spawn("e", Echo).echo.call(Payload()).get(timeout=WAIT).values() == ["x"] * 4
    assert Payload.pickled == 1


def test_d21_the_failure_text_names_class_mesh_and_rank(procs, faults):
    m = procs(2).spawn("trainers", Echo)
    with pytest.raises(SupervisionError) as info:
        m.slice(gpus=1).exit.call_one(3).get(timeout=WAIT)
    text = str(info.value)
    assert "trainers" in text and "Echo" in text and "'gpus': 1/2" in text and len(text.splitlines()) < 15
    assert not any(word in text for word in ("Envelope", "mailbox", "0x", "CRC", "Frame"))
    wait_until(lambda: len(faults) == 1)


def test_d39_a_stop_touches_only_its_own_processes(procs):
    a, b = procs(2), procs(2)
    pids = b.spawn("e", Echo).pid.call().get(timeout=WAIT).values()
    a.stop().get(timeout=WAIT)
    assert not any(map(gone, pids))


def test_d23_bad_calls_are_three_different_errors(procs):
    e = procs().spawn("e", Echo)
    with pytest.raises(AttributeError, match="ecoh"):
        e.ecoh  # noqa: B018
    with pytest.raises(TypeError):
        e.echo.call_one(1, 2)
    with pytest.raises(ActorError):
        e.fail.call_one("x").get(timeout=WAIT)
