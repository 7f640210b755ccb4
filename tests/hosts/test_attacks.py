"""Strangers at a worker's door: nothing they send is unpickled, and they cost the others nothing."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import struct
import time

import pytest
from certificates import Authority
from daemons import Daemon, Echo

from conftest import WAIT, wait_until
from monarch.actor import attach_to_workers
from monarch.config import configured
from monarch.wire import auth
from monarch.wire.frames import CONTROL, HEADER, MAGIC, URGENT, Frame

KEY = "k" * 32


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(params=["secret", "tls"])
def besieged(request, tmp_path):
    """A daemon, its port, and hosts that are attached to it rightfully."""
    if request.param == "tls":
        ours = Authority(tmp_path / "ours", "ours")
        member = ours.member()
        daemon, how, config = Daemon("tls", ours.ca, member), {"ca": ours.ca, "private_key": member}, {}
    else:
        daemon, how, config = Daemon(MONARCH_AUTH_KEY=KEY), {"ca": "trust_all_connections"}, {"auth_key": KEY}
    with daemon, configured(**config):
        hosts = attach_to_workers(workers=[daemon.address], **how)
        echo = hosts.spawn_procs().spawn("e", Echo)
        echo.echo.call_one(1).get(timeout=WAIT)
        yield daemon, echo
        hosts.shutdown().get(timeout=WAIT)


def knock(port):
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT)


def closed(sock):
    """The daemon hung up; everything it said until then is read."""
    sock.settimeout(15)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def frame(path):
    body = pickle.dumps(Bomb(path))
    made = Frame(CONTROL, 5, 6, 0, (b"", body), flags=URGENT)
    return made.head() + body


def test_nothing_a_stranger_sends_is_unpickled(besieged, tmp_path):
    daemon, echo = besieged
    mark = tmp_path / "unpickled"
    open_greeting, secret_greeting = auth.greeting(6, None), auth.greeting(6, b"wrong" * 8)
    gigantic = HEADER.pack(MAGIC, CONTROL, URGENT, 1, 0, 5, 6, 0, 0, 0) + struct.pack("<Q", 1 << 62)
    attacks = {
        "a frame": frame(mark),
        "garbage": os.urandom(100_000),
        "an open greeting and a frame": open_greeting + frame(mark),
        "a wrong proof and a frame": secret_greeting + bytes(32) + frame(mark),
        "another version": open_greeting[:8] + b"\xff\xff" + open_greeting[10:] + frame(mark),
        "a gigantic frame": secret_greeting + bytes(32) + gigantic,
        "a TLS record that never ends": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    }
    before = daemon.memory()
    for what, data in attacks.items():
        with knock(daemon.port) as sock:
            try:
                sock.sendall(data)
            except OSError:
                continue
            assert closed(sock), what
    assert not mark.exists()
    assert daemon.memory() - before < 32 << 20
    assert echo.echo.call_one(2).get(timeout=WAIT) == 2


def test_a_recorded_handshake_cannot_be_replayed(tmp_path):
    mark = tmp_path / "unpickled"
    with Daemon(MONARCH_AUTH_KEY=KEY) as daemon:
        mine = auth.greeting(6, KEY.encode())

        def shake(sock, proof):
            sock.sendall(mine)
            theirs = sock.recv(auth.GREETING.size, socket.MSG_WAITALL)
            proof = proof or auth.proof(KEY.encode(), b"dialler", mine, theirs)
            sock.sendall(proof)
            return proof

        with knock(daemon.port) as sock:
            recorded = shake(sock, None)
            assert len(sock.recv(32, socket.MSG_WAITALL)) == 32, "the right proof is answered"
        with knock(daemon.port) as sock:
            shake(sock, recorded)
            sock.sendall(frame(mark))
            assert closed(sock)
        with knock(daemon.port) as sock:  # a reflected greeting, and its own proof sent back
            theirs = sock.recv(auth.GREETING.size, socket.MSG_WAITALL)
            sock.sendall(theirs + recorded + frame(mark))
            assert closed(sock)
        assert not mark.exists()


def test_a_thousand_half_open_connections_cost_the_others_nothing(besieged):
    daemon, echo = besieged
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))

    def latency():
        times = []
        for i in range(200):
            began = time.perf_counter()
            assert echo.echo.call_one(i).get(timeout=WAIT) == i
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    held = []
    try:
        quiet, memory = latency(), daemon.memory()
        for i in range(1000):
            held.append(knock(daemon.port))
            held[-1].sendall(b"MONARCH\n"[: i % 8])
        besieged_by = latency()
        assert besieged_by < 5 * quiet + 0.002, (quiet, besieged_by)
        assert daemon.memory() - memory < 64 << 20
        fds = f"/proc/{daemon.process.pid}/fd"
        wait_until(lambda: len(os.listdir(fds)) < 400)
        assert echo.pid.call_one().get(timeout=WAIT)
    finally:
        for sock in held:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
