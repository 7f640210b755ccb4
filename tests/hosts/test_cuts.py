"""Links between hosts that are cut: nothing is lost, repeated or reordered, and what stays away counts as lost."""

from __future__ import annotations

import os
import threading
import time

import pytest
from daemons import Daemon, Echo

from conftest import WAIT, wait_until
from monarch.actor import SupervisionError, attach_to_workers
from monarch.config import configured
from monarch.testing import Link

ANYBODY = "trust_all_connections"
KEY = "k" * 32


def hosts_behind(link):
    hosts = attach_to_workers(ca=ANYBODY, workers=[link.address])
    return hosts, hosts.spawn_procs().spawn("e", Echo)


def cut_often(link, times, over):
    """Severs the link `times` times, at moments spread by `over()`, the share of the work that is done."""
    for i in range(times):
        end = time.monotonic() + WAIT
        while over() < (i + 1) / (times + 1) and time.monotonic() < end:
            time.sleep(0.001)
        link.sever()


@pytest.mark.parametrize("key", ["", KEY], ids=["open", "secret"])
def test_100_000_messages_arrive_once_and_in_order_across_50_cuts(key):
    n, sent = (100_000 if not key else 20_000), [0]
    with configured(auth_key=key), Daemon(MONARCH_AUTH_KEY=key) as daemon, Link(daemon.address) as link:
        hosts, echo = hosts_behind(link)
        echo.pid.call_one().get(timeout=WAIT)
        cutter = threading.Thread(target=cut_often, args=(link, 50, lambda: sent[0] / n), name="cutter")
        cutter.start()
        for i in range(n):
            echo.note.broadcast(i)
            sent[0] = i
        cutter.join(WAIT)
        assert echo.noted.call_one().get(timeout=60) == list(range(n))
        hosts.shutdown().get(timeout=WAIT)
        assert daemon.process.wait(WAIT) == 0


def test_calls_and_large_payloads_both_ways_survive_cuts():
    with Daemon() as daemon, Link(daemon.address) as link:
        hosts, echo = hosts_behind(link)
        echo.pid.call_one().get(timeout=WAIT)
        blob = os.urandom(8 << 20)
        for i in range(12):
            pending = [echo.echo.call_one(blob), echo.echo.call_one(i)]
            time.sleep(0.003 * i)
            link.sever()
            assert pending[0].get(timeout=WAIT) == blob
            assert pending[1].get(timeout=WAIT) == i
        hosts.shutdown().get(timeout=WAIT)


def test_a_host_out_of_reach_longer_than_allowed_is_lost_and_nothing_blocks_on_it(faults):
    with configured(channel_reconnect_timeout="1s", channel_refused_timeout="30s"), Daemon() as daemon:
        with Link(daemon.address) as link:
            hosts, echo = hosts_behind(link)
            echo.pid.call_one().get(timeout=WAIT)
            began = time.monotonic()
            link.drop()
            with pytest.raises(SupervisionError, match="channel_reconnect_timeout"):
                echo.pid.call_one().get(timeout=WAIT)
            assert 0.8 < time.monotonic() - began < 4
            wait_until(lambda: faults)
            began = time.monotonic()
            hosts.shutdown().get(timeout=WAIT)
            assert time.monotonic() - began < 2


def test_a_daemon_that_died_is_lost_at_once(faults):
    with Daemon() as daemon:
        hosts = attach_to_workers(ca=ANYBODY, workers=[daemon.address])
        echo = hosts.spawn_procs().spawn("e", Echo)
        echo.pid.call_one().get(timeout=WAIT)
        began = time.monotonic()
        daemon.process.kill()
        with pytest.raises(SupervisionError, match="its host was lost"):
            echo.pid.call_one().get(timeout=WAIT)
        assert time.monotonic() - began < 4
        wait_until(lambda: faults)


def test_what_waits_for_a_cut_link_is_bounded():
    with configured(send_queue_limit=8 << 20), Daemon() as daemon, Link(daemon.address) as link:
        hosts, echo = hosts_behind(link)
        echo.pid.call_one().get(timeout=WAIT)
        link.cut()
        sent = [0]

        def send():
            for _ in range(40):
                echo.note.broadcast(bytes(1 << 20))
                sent[0] += 1

        sender = threading.Thread(target=send, name="sender")
        sender.start()
        wait_until(lambda: sent[0] >= 7)
        sender.join(0.5)
        assert sender.is_alive() and sent[0] < 20, "senders wait when the buffer is full"
        link.sever()
        link.mend()
        sender.join(WAIT)
        assert len(echo.noted.call_one().get(timeout=WAIT)) == 40
        hosts.shutdown().get(timeout=WAIT)
