"""The client's end, in programs of their own; and controllers, which live as long as the client."""

import pytest

from conftest import gone, run_script, wait_until

PRELUDE = """
import asyncio, math, os, pickle, sys, threading, time
from monarch.actor import *
from monarch.actor import shutdown_context
class A(Actor):
    @endpoint
    def pid(self): return os.getpid()
    @endpoint
    def f(self): return 1
"""


def program(body, **env):
    import textwrap

    r = run_script(PRELUDE + textwrap.dedent(body), **env)
    assert r.returncode == 0, r.stderr
    return r.stdout.split("\n")[:-1]


def test_invalid_timeouts_claim_nothing():
    out = program("""
        context()
        for t in (-1, math.nan, math.inf, -math.inf, 2.0**64):
            try: shutdown_context(t)
            except ValueError: print("refused")
        print(this_host().spawn_procs().spawn("a", A).f.call_one().get(30))
    """)
    assert out == ["refused"] * 5 + ["1"]


def test_a_shutdown_that_nobody_observes_happens():
    pid = program("""
        a = this_host().spawn_procs().spawn("a", A)
        pid = a.pid.call_one().get(30)
        shutdown_context()
        end = time.monotonic() + 20
        def alive():
            try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
            except OSError: return False
        while alive(): assert time.monotonic() < end; time.sleep(0.01)
        print(pid)
    """)[0]
    assert gone(int(pid))


def test_calls_after_the_end_fail_and_new_processes_are_refused():
    out = program("""
        a = this_host().spawn_procs().spawn("a", A)
        host = this_host()
        a.f.call_one().get(30)
        shutdown_context().get(30)
        print(shutdown_context().get(1))
        try: a.f.call_one().get(10)
        except SupervisionError: print("dead")
        try: host.spawn_procs().initialized.get(10)
        except RuntimeError as e: print("refused")
    """)
    assert out == ["None", "dead", "refused"]


def test_two_racing_callers_shut_down_once():
    out = program("""
        pids = this_host().spawn_procs({"g": 2}).spawn("a", A).pid.call().get(30).values()
        done = []
        ts = [threading.Thread(target=lambda: done.append(shutdown_context().get(30))) for _ in range(2)]
        [t.start() for t in ts]; [t.join(30) for t in ts]
        print(done)
        shutdown_context().get(30)
        print(*pids)
    """)
    assert out[0] == "[None, None]"
    for pid in out[1].split():
        wait_until(lambda pid=pid: gone(int(pid)))


def test_without_a_client_nothing_happens_and_a_later_client_works():
    out = program("""
        from monarch.runtime import client
        print(shutdown_context().get(5), client.exists())
        print(this_host().spawn_procs().spawn("a", A).f.call_one().get(30))
    """)
    assert out == ["None False", "1"]


def test_inside_a_worker_it_does_nothing():
    out = program("""
        class W(Actor):
            @endpoint
            def end(self): return shutdown_context().get(5)
            @endpoint
            def f(self): return "alive"
        w = this_host().spawn_procs().spawn("w", W)
        print(w.end.call_one().get(30), w.f.call_one().get(30))
    """)
    assert out == ["None alive"]


def test_threads_racing_for_the_first_context_share_a_client():
    out = program("""
        seen, barrier = [], threading.Barrier(8)
        def first(): barrier.wait(); seen.append(id(context().actor_instance))
        ts = [threading.Thread(target=first) for _ in range(8)]
        [t.start() for t in ts]; [t.join(30) for t in ts]
        print(len(seen), len(set(seen)))
    """)
    assert out == ["8 1"]


def test_module_globals_are_finalised_when_a_process_stops(tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "keeps_a_global.py").write_text(
        "from monarch.actor import Actor, endpoint\n"
        "class Global:\n"
        "    def __init__(self, path): self.path = path\n"
        "    def __del__(self): open(self.path, 'w').write('finalised')\n"
        "kept = None\n"
        "class G(Actor):\n"
        "    @endpoint\n"
        "    def keep(self, path):\n"
        "        global kept\n"
        "        kept = Global(path)\n"
    )
    program(
        f"""
        from keeps_a_global import G
        p = this_host().spawn_procs()
        p.spawn("g", G).keep.call_one({str(mark)!r}).get(30)
        p.stop().get(30)
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert mark.read_text() == "finalised"


# -- controllers

CONTROLLER = """
class C(Actor):
    def __init__(self, tag): self.tag = tag
    @endpoint
    def get(self): return self.tag, os.getpid()
class Asks(Actor):
    @endpoint
    def ask(self): return get_or_spawn_controller("c", C, "from an actor").get(30).get.call_one().get(30)
    @endpoint
    def ask_below(self):
        p = this_host().spawn_procs()
        answer = p.spawn("asks", Asks).ask.call_one().get(30)
        p.stop().get(30)
        return answer
"""


def with_controllers(body):
    import textwrap

    return program(CONTROLLER + textwrap.dedent(body))


def test_later_calls_ignore_class_and_arguments():
    out = with_controllers("""
        a = get_or_spawn_controller("c", C, "first").get(30)
        b = get_or_spawn_controller("c", A).get(30)
        print(a.get.call_one().get(30) == b.get.call_one().get(30) == ("first", os.getpid()), len(a.extent))
    """)
    assert out == ["True 0"]


def test_a_controller_spawned_by_an_actor_lives_in_the_client():
    out = with_controllers("""
        asks = this_host().spawn_procs().spawn("asks", Asks)
        print(asks.ask.call_one().get(30) == ("from an actor", os.getpid()))
        print(asks.ask_below.call_one().get(60) == ("from an actor", os.getpid()))
        print(get_or_spawn_controller("c", C, "late").get(30).get.call_one().get(30)[0])
    """)
    assert out == ["True", "True", "from an actor"]


def test_a_controller_is_reached_through_an_unpickled_mesh():
    out = with_controllers("""
        p = pickle.loads(pickle.dumps(this_host().spawn_procs({"g": 2})))
        print(set(p.spawn("asks", Asks).ask.call().get(30).values()) == {("from an actor", os.getpid())})
    """)
    assert out == ["True"]


@pytest.mark.parametrize(("args", "error"), [("int", "ValueError"), ("C", "TypeError"), ("C, 1, 2", "TypeError")])
def test_a_controller_that_cannot_be_is_an_actor_error(args, error):
    out = with_controllers(f"""
        try: get_or_spawn_controller("c", {args}).get(30)
        except ActorError as e: print(type(e.exception).__name__)
        print(get_or_spawn_controller("c", C, "good").get(30).get.call_one().get(30)[0])
    """)
    assert out == [error, "good"]
