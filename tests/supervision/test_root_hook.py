"""The root of the ownership tree: `unhandled_fault_hook`, how the program ends, and with which status."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from owners import Frail
from watching import fence

import monarch.actor
from conftest import WAIT, run_script, wait_until
from monarch.actor import SupervisionError, context

PRELUDE = """
import asyncio, atexit, os, queue, signal, subprocess, sys, threading, time
import monarch.actor
from monarch.actor import *
class A(Actor):
    @endpoint
    def fail(self, text="boom"): raise ValueError(text)
    @endpoint
    def die(self, code=3): os._exit(code)
    @endpoint
    def nap(self, seconds): time.sleep(seconds)
    @endpoint
    def later(self, seconds): time.sleep(seconds); raise ValueError("boom")
    @endpoint
    def ping(self): return "pong"
def new(): return this_host().spawn_procs().spawn("a", A)
"""


def program(body, **kwargs):
    return run_script(PRELUDE + textwrap.dedent(body), **kwargs)


# -- the hook


def test_the_hook_is_looked_up_at_the_time_of_each_fault(procs, faults):
    p = procs()
    first, second = p.spawn("first", Frail), p.spawn("second", Frail)
    first.ruin.broadcast()
    wait_until(lambda: faults)
    replaced = []
    monarch.actor.unhandled_fault_hook = replaced.append  # the fixture puts the old one back
    second.ruin.broadcast()
    wait_until(lambda: replaced)
    assert [f.mesh_name for f in faults + replaced] == [first.name, second.name]


def test_the_hook_runs_on_a_framework_thread_in_the_context_of_the_root(procs, faults):
    seen = []

    def hook(failure):
        again = procs_of_main.spawn("again", Frail)
        seen.append((threading.current_thread(), str(context().actor_instance), again.echo.call_one(1).get(WAIT)))

    procs_of_main = procs()
    monarch.actor.unhandled_fault_hook = hook
    procs().spawn("m", Frail).ruin.broadcast()
    wait_until(lambda: seen)
    thread, me, answer = seen[0]
    assert thread is not threading.main_thread() and me == "<root>" and answer == 1


def test_a_fault_that_was_caught_as_an_error_reaches_the_hook_too(procs, faults):
    m = procs().spawn("m", Frail)
    with pytest.raises(SupervisionError):
        m.ruin.call_one().get(timeout=WAIT)
    wait_until(lambda: faults)
    fence(procs, faults)
    assert [f.mesh_name for f in faults] == [m.name]


def test_a_slow_hook_gets_every_fault_once(procs, faults):
    seen, go = [], threading.Event()

    def hook(failure):
        go.wait(WAIT)
        seen.extend(failure.crashed_ranks)

    monarch.actor.unhandled_fault_hook = hook
    m = procs(4).spawn("m", Frail)
    m.ruin.broadcast()
    with pytest.raises(SupervisionError):
        m.echo.call(1).get(timeout=WAIT)
    go.set()
    wait_until(lambda: len(seen) == 4)
    monarch.actor.unhandled_fault_hook = faults.append
    fence(procs, faults)
    assert sorted(seen) == [0, 1, 2, 3] and not faults


# -- the exit status


@pytest.mark.parametrize(
    ("hook", "status"),
    [
        ("lambda f: sys.exit(7)", 7),
        ("lambda f: sys.exit('a text')", 1),
        ("lambda f: 1 / 0", 1),
        ("monarch.actor.unhandled_fault_hook", 1),
    ],
)
def test_the_program_ends_with_the_status_of_its_hook(hook, status):
    r = program(f"""
        monarch.actor.unhandled_fault_hook = {hook}
        new().fail.broadcast("the cause")
        time.sleep(20)
        print("never noticed")
    """)
    assert r.returncode == status and not r.stdout, r.stderr
    assert "Unhandled monarch error on the root actor, hostname=" in r.stderr and "the cause" in r.stderr
    assert ", PID=" in r.stderr and " at time " in r.stderr


def test_a_hook_that_returns_lets_the_program_live_and_end_with_0():
    r = program("""
        seen = []
        monarch.actor.unhandled_fault_hook = seen.append
        a, b = new(), new()
        a.die.broadcast()
        while not seen: time.sleep(0.01)
        print(b.ping.call_one().get(20), len(seen))
    """)
    assert r.returncode == 0 and r.stdout.split() == ["pong", "1"], r.stderr


# -- the main thread wakes from whatever it waits for

WAITS = {
    "time.sleep": "time.sleep(20)",
    "Event.wait": "threading.Event().wait(20)",
    "queue.get": "queue.Queue().get()",
    "an idle asyncio.run": "asyncio.run(idle())",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "Thread.join": "t = threading.Thread(target=time.sleep, args=(20,), daemon=True); t.start(); t.join()",
    "a subprocess": "subprocess.run(['sleep', '20'])",
    "a pipe": "os.read(os.pipe()[0], 1)",
    "Future.get": "b.nap.call_one(20).get()",
    "recv": "Channel.open()[1].recv().get()",
    "await": "asyncio.run(awaits(b.nap.call_one(20)))",
    "a computation": "compute()",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_an_unhandled_fault_ends_the_wait_of_the_main_thread_within_a_second(wait):
    r = program(f"""
        async def idle(): await asyncio.Event().wait()
        async def awaits(f): await f
        def compute():
            while True: sum(range(1000))
        a, b = new(), new()
        a.ping.call_one().get(20); b.ping.call_one().get(20)
        a.later.broadcast(0.1)
        began = time.monotonic()
        def hook(failure):
            global began
            began = time.monotonic()
            sys.exit(1)
        monarch.actor.unhandled_fault_hook = hook
        try:
            {wait}
        finally:
            print(time.monotonic() - began < 1, flush=True)
    """, HYPERACTOR_CLEANUP_TIMEOUT="200ms")  # fmt: skip
    assert r.stdout.split() == ["True"] and r.returncode == 1, r.stderr


def test_a_program_started_with_sigint_ignored_is_ended_too():
    r = subprocess.run(
        [sys.executable, "-c", PRELUDE + "new().fail.broadcast('the cause')\ntime.sleep(20)\nprint('never noticed')"],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert r.returncode == 1 and not r.stdout and "the cause" in r.stderr


def test_a_program_whose_client_was_made_by_another_thread_is_ended_too():
    r = program("""
        def first(): new().later.broadcast(0.2)
        t = threading.Thread(target=first); t.start(); t.join()
        time.sleep(3)
        print("never noticed")
    """)
    assert r.returncode == 1 and not r.stdout and "boom" in r.stderr


# -- a program that goes on


def test_a_caught_interrupt_leaves_supervision_in_force():
    r = program("""
        def hook(failure):
            print("hook", flush=True)
            sys.exit(5)
        monarch.actor.unhandled_fault_hook = hook
        a, b = new(), new()
        b.ping.call_one().get(20)
        for m in (a, b):
            try:
                m.fail.broadcast()
                time.sleep(20)
            except KeyboardInterrupt:
                print("caught", flush=True)
        try:
            print(new().ping.call_one().get(20))
        except Exception as e:
            print("refused")
    """)
    lines = r.stdout.split()
    assert lines[:2] == ["hook", "caught"]
    assert lines[2:] in (["hook", "caught", "pong"], ["hook", "caught", "refused"], ["refused"]), r.stderr


def test_a_program_that_caught_the_interrupt_chooses_its_status():
    r = program("""
        try:
            new().fail.broadcast()
            time.sleep(20)
        except KeyboardInterrupt:
            pass
        sys.exit(9)
    """)
    assert r.returncode == 9, r.stderr


# -- a program that is over


@pytest.mark.parametrize(
    "last",
    [
        "new().fail.broadcast()",
        "new().die.broadcast(3)",
        "new().die.broadcast(0)",
    ],
    ids=["raises", "exits", "exits with 0"],
)
def test_a_fault_on_its_way_when_the_script_ends_is_reported(last):
    r = program(last)
    assert r.returncode == 1 and "Unhandled monarch error on the root actor" in r.stderr


def test_a_fault_in_a_process_that_is_slow_to_start_is_awaited_at_the_end_of_the_script():
    r = program("""
        slowly = BootstrapCommand("/bin/sh", None, [
            "-c", 'sleep 1.5; exec "$0" -m monarch._src.actor.bootstrap_main', sys.executable
        ], {})
        this_host().spawn_procs(bootstrap_command=slowly).spawn("a", A).die.broadcast(0)
    """)
    assert r.returncode == 1 and "Unhandled monarch error on the root actor" in r.stderr


def test_a_fault_on_its_way_when_the_script_ends_is_given_to_the_hook():
    r = program("""
        monarch.actor.unhandled_fault_hook = lambda f: print("told", f.crashed_ranks, flush=True)
        new().die.broadcast()
    """)
    assert r.returncode == 0 and r.stdout == "told [0]\n", r.stderr


def test_the_status_of_a_hook_counts_when_the_script_is_over():
    r = program("""
        monarch.actor.unhandled_fault_hook = lambda f: sys.exit(6)
        new().fail.broadcast()
    """)
    assert r.returncode == 6, r.stderr


def test_a_script_that_raises_keeps_its_traceback_and_status():
    r = program("""
        new().fail.broadcast()
        raise LookupError("mine")
    """)
    assert r.returncode == 1 and "LookupError: mine" in r.stderr


def test_a_fault_while_another_thread_of_the_program_works_sets_the_status():
    r = program("""
        a = new()
        def work():
            a.later.broadcast(0.2)
            time.sleep(0.6)
        threading.Thread(target=work).start()
    """)
    assert r.returncode == 1 and "boom" in r.stderr


def test_a_script_without_faults_ends_quietly_with_0():
    r = program("""
        a, b = new(), new()
        print(a.ping.call_one().get(20))
        a.stop().get(20)
        b.ping.broadcast()
    """)
    assert (r.returncode, r.stdout, r.stderr) == (0, "pong\n", "")


def test_a_busy_actor_does_not_hold_up_the_exit_handlers():
    r = program("""
        a = new()
        a.ping.call_one().get(20)
        a.nap.broadcast(30)
        atexit.register(lambda began=time.monotonic(): print(time.monotonic() - began < 1))
    """, timeout=20, HYPERACTOR_CLEANUP_TIMEOUT="200ms")  # fmt: skip
    assert r.returncode == 0 and r.stdout == "True\n", r.stderr
