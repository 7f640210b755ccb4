"""Undeliverable messages, forks inside endpoints, dispatch order, spans, sources."""

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from actors_for_tests import Echo
from conftest import WAIT, run_script, wait_until
from monarch.actor import Actor, ActorError, Channel, Port, SupervisionError, concurrent_endpoint, context, endpoint
from monarch.runtime.ports import Port as PortClass


class Sender(Actor):
    @endpoint
    def send_to(self, port):
        port.send("hello")

    @endpoint
    def ping(self):
        return "pong"


class Forgiving(Sender):
    def __init__(self, told: Port):
        self.told = told

    def _handle_undeliverable_message(self, envelope):
        here = threading.current_thread().name, str(context().actor_instance)
        self.told.send((*here, envelope.sender(), envelope.error_msg()))
        return True


class ForgivingAsync(Actor):
    def __init__(self, told: Port):
        self.told = told
        self.go = asyncio.Event()

    @endpoint
    async def send_to(self, port):
        port.send("hello")

    @endpoint
    async def ping(self):
        self.go.set()
        return "pong"

    async def _handle_undeliverable_message(self, envelope):
        await self.go.wait()  # a slow handler does not hold up messages
        self.told.send(("async", str(context().actor_instance), envelope.sender(), envelope.error_msg()))
        return True


@pytest.mark.parametrize("cls", [Forgiving, ForgivingAsync])
def test_an_undeliverable_message_is_given_to_its_sender(procs, faults, dead_port, cls):
    told, inbox = Channel.open()
    s = procs().spawn("s", cls, told)
    s.send_to.call_one(dead_port).get(timeout=WAIT)
    assert s.ping.call_one().get(timeout=WAIT) == "pong"
    thread, display, sender, error = inbox.recv().get(timeout=WAIT)
    assert thread in ("monarch-actor-driver", "async") and display == sender and "stopped" in error
    assert not faults


def test_an_undeliverable_message_that_nobody_handles_fails_its_sender(procs, faults, dead_port):
    s = procs().spawn("s", Sender)
    s.send_to.broadcast(dead_port)
    wait_until(lambda: faults)
    assert "undeliverable message" in faults[0].report() and faults[0].mesh_name == s.name
    with pytest.raises(SupervisionError, match="undeliverable"):
        s.ping.call_one().get(timeout=WAIT)


def test_a_port_can_be_told_not_to_bounce(procs, faults, dead_port):
    dead_port.return_undeliverable = False
    s = procs().spawn("s", Sender)
    s.send_to.call_one(dead_port).get(timeout=WAIT)
    assert s.ping.call_one().get(timeout=WAIT) == "pong" and not faults


def test_a_message_of_the_script_that_bounces_is_a_fault_without_a_mesh(faults, dead_port):
    dead_port.send("hello")
    wait_until(lambda: faults)
    assert faults[0].mesh_name == "<none>" and "undeliverable message" in faults[0].report()


# -- forks


def fork_and(how):
    pid = os.fork()
    if pid == 0:
        if how == "loop":
            asyncio.run(asyncio.sleep(0))
        if how == "exec":
            os.execv(sys.executable, [sys.executable, "-c", "pass"])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class AsyncForker(Actor):
    @endpoint
    async def fork(self, how):
        return fork_and(how)


class SyncForker(Actor):
    @endpoint
    def fork(self, how):
        return fork_and(how)


@pytest.mark.parametrize("cls", [SyncForker, AsyncForker])
@pytest.mark.parametrize("how", ["exit", "loop", "exec"])
def test_an_endpoint_may_fork(procs, cls, how):
    f = procs().spawn("f", cls)
    assert [f.fork.call_one(how).get(timeout=WAIT) for _ in range(5)] == [0] * 5


def test_a_forked_child_may_not_use_its_parents_client(procs):
    e = procs().spawn("e", Echo)
    assert e.echo.call_one(1).get(timeout=WAIT) == 1
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            e.echo.call_one(1)
            os.write(w, b"used it")
        except RuntimeError as error:
            os.write(w, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(w)
    text = os.read(r, 1000).decode()
    os.close(r)
    assert "forked child" in text
    assert e.echo.call_one(2).get(timeout=WAIT) == 2


# -- dispatch


class Burst(Actor):
    def __init__(self):
        self.log = []

    @endpoint
    async def block(self, port):
        gate, inbox = Channel.open()
        port.send(gate)
        await inbox.recv()

        async def tick():
            while len(self.log) < 400:
                self.log.append("tick")
                await asyncio.sleep(0)

        self.ticker = asyncio.create_task(tick())

    @concurrent_endpoint
    async def mark(self, i):
        self.log.append(i)

    @endpoint
    async def read(self):
        return self.log


def test_a_backlog_lets_the_loop_run_and_keeps_order(procs):
    b = procs().spawn("b", Burst)
    port, inbox = Channel.open()
    b.block.broadcast(port)
    gate = inbox.recv().get(timeout=WAIT)
    for i in range(256):
        b.mark.broadcast(i)
    gate.send(None)
    wait_until(lambda: sum(x != "tick" for x in b.read.call_one().get(timeout=WAIT)) == 256)
    log = b.read.call_one().get(timeout=WAIT)
    assert [x for x in log if x != "tick"] == list(range(256))
    longest = run = 0
    for x in log[log.index("tick") :]:
        run = 0 if x == "tick" else run + 1
        longest = max(longest, run)
    assert longest <= 64


# -- spans and sources


def test_endpoints_run_in_spans_when_somebody_watches(procs):
    def watch():
        import contextlib
        import types

        names = []

        class Tracer:
            @contextlib.contextmanager
            def start_as_current_span(self, name):
                names.append(name)
                yield

        sys.modules["opentelemetry.trace"] = types.SimpleNamespace(get_tracer=lambda name: Tracer())
        sys.spans_seen = names

    e = procs().spawn("e", Echo)
    e.apply.call_one(watch).get(timeout=WAIT)
    e.echo.call_one(1).get(timeout=WAIT)
    assert e.apply.call_one(lambda: sys.spans_seen).get(timeout=WAIT) == ["echo", "apply"]


def test_a_traceback_shows_lines_of_code_that_is_on_no_disk():
    r = run_script(
        """
        import linecache
        source = '''
        from monarch.actor import Actor, endpoint
        class A(Actor):
            @endpoint
            def f(self):
                raise ValueError("here")  # the telling line
        '''
        import textwrap
        source = textwrap.dedent(source)
        linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
        exec(compile(source, "<cell 1>", "exec"))
        from monarch.actor import ActorError, this_host
        try:
            this_host().spawn_procs().spawn("a", A).f.call_one().get(30)
        except ActorError as e:
            print(e.exception_formatted)
        """
    )
    assert "# the telling line" in r.stdout, r.stdout + r.stderr


def test_exception_details_survive_the_journey(procs):
    def fail():
        e = KeyError("lost")
        e.code = 7
        if hasattr(e, "add_note"):
            e.add_note("a note for you")
        raise e

    with pytest.raises(ActorError) as info:
        procs().spawn("e", Echo).apply.call_one(fail).get(timeout=WAIT)
    assert info.value.exception.code == 7 and info.value.exception.args == ("lost",)
    if sys.version_info >= (3, 11):
        assert "a note for you" in str(info.value)


def test_ports_pickle_plainly(procs):
    port, inbox = Channel.open()
    copy = pickle.loads(pickle.dumps(port))
    assert isinstance(copy, PortClass)
    copy.send(3)
    assert inbox.recv().get(timeout=WAIT) == 3
    with pytest.raises(TypeError, match="Port"):
        pickle.dumps(inbox)


def test_the_tensor_engine_of_an_actor_can_be_replaced(procs):
    from monarch._src.actor.mock import get_tensor_engine_factory, patch_tensor_engine

    with patch_tensor_engine(Echo, lambda mesh: "simulated") as factory:
        assert get_tensor_engine_factory(Echo) is factory and factory(None) == "simulated"
    assert get_tensor_engine_factory(Echo) is None


# -- returns_future, beyond the conformance program


def test_a_timeout_of_the_owner_cancels_the_body_and_drives_its_cleanup():
    from monarch.actor import returns_future

    seen = []

    @returns_future
    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    f = slow()
    with pytest.raises(TimeoutError):
        f.get(timeout=0.05)
    assert seen == ["cleaned up"]
    with pytest.raises(TimeoutError):
        f.get()


def test_a_body_runs_once_for_many_observers():
    from monarch.actor import returns_future

    runs = []

    @returns_future
    async def body():
        runs.append(1)
        await asyncio.sleep(0.05)
        return object()

    f = body()
    out = []
    threads = [threading.Thread(target=lambda: out.append(f.get(timeout=WAIT))) for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
    assert len(out) == 5 and len(set(map(id, out))) == 1 and runs == [1]


def test_get_inside_the_driven_body_is_refused():
    from monarch._src.actor.sync_state import fake_sync_state
    from monarch.actor import returns_future
    from monarch.runtime.errors import WouldBlockRuntime

    @returns_future
    async def selfish():
        with fake_sync_state():
            return mine[0].get(timeout=5)

    mine = [selfish()]
    with pytest.raises(WouldBlockRuntime):
        mine[0].get(timeout=10)


def test_ctrl_c_in_get_ends_the_program_at_once(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            from monarch.actor import Actor, endpoint, this_host
            class A(Actor):
                @endpoint
                def nap(self): time.sleep(60)
            a = this_host().spawn_procs().spawn("a", A)
            f = a.nap.call_one()
            try:
                print("ready", flush=True)
                f.get()
            except KeyboardInterrupt:
                try:
                    f.get(timeout=0.1)  # the future is still usable
                except TimeoutError:
                    print("usable", flush=True)
            """
        )
    )
    p = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "ready\n"
    import signal

    began = time.monotonic()
    p.send_signal(signal.SIGINT)
    assert p.communicate(timeout=WAIT)[0] == "usable\n" and p.returncode == 0
    assert time.monotonic() - began < 6
