import contextlib
import os
import queue
import socket
import threading
import time

import pytest

from monarch.wire import auth
from monarch.wire.connection import Connection, ConnectionClosed, Limits
from monarch.wire.frames import CALL, Frame
from monarch.wire.poller import Poller
from monarch.wire.segments import AVAILABLE, MappedSegments, SegmentPool


class End:
    """One end of a connection, with a poller of its own."""

    def __init__(self, sock, node, **options):
        self.frames, self.closed, self.ready = queue.Queue(), queue.Queue(), threading.Event()
        self.poller = Poller()
        options.setdefault("limits", Limits(1 << 30, 1 << 20, 0.5))
        limits = options.pop("limits")
        self.conn = Connection(
            self.poller, sock, node, limits, lambda c, f: self.frames.put(f), lambda c, r: self.closed.put(r),
            on_ready=lambda c: self.ready.set(), **options,
        )  # fmt: skip
        self.poller.start("test-poller")

    def end(self):
        self.poller.post(lambda: self.conn.close("test over"))
        self.poller.stop()
        self.poller.thread.join(5)


def unix_pair():
    return socket.socketpair()


def tcp_pair():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        a = socket.create_connection(listening.getsockname())
        b, _ = listening.accept()
    return a, b


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"])
def pair(request):
    return request.param()


@pytest.fixture
def ends():
    made = []
    yield made
    for end in made:
        end.end()


@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["open", "secret"])
def test_frames_arrive_in_order(pair, ends, secret):
    a, b = End(pair[0], 1, dialled=True, secret=secret), End(pair[1], 2, secret=secret)
    ends += [a, b]
    for i in range(2000):
        a.conn.send(Frame(CALL, 2, 1, i, (b"m", b"x" * (i % 50))))
    assert [b.frames.get(timeout=10).key for _ in range(2000)] == list(range(2000))
    assert (a.conn.peer, b.conn.peer) == (2, 1)


def test_a_large_payload_arrives_whole(pair, ends):
    a, b = End(pair[0], 1, dialled=True), End(pair[1], 2)
    ends += [a, b]
    blob = os.urandom(20 << 20)
    a.conn.send(Frame(CALL, 2, 1, 7, (b"", blob)))
    assert bytes(b.frames.get(timeout=10).parts[1]) == blob


def test_senders_wait_when_nobody_reads(pair, ends):
    limits = Limits(1 << 30, 1 << 20)
    a = End(pair[0], 1, handshake=False, limits=limits)
    ends.append(a)
    sent = []

    def flood():
        try:
            for i in range(1000):
                a.conn.send(Frame(CALL, 2, 1, i, (b"", bytes(1 << 18))))
                sent.append(i)
        except ConnectionClosed:
            pass

    thread = threading.Thread(target=flood)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and a.conn._queued <= (2 << 20)  # bounded, and the sender waits
    pair[1].close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_wrong_secret_is_refused_before_any_frame(pair, ends):
    a, b = End(pair[0], 1, dialled=True, secret=b"a" * 32), End(pair[1], 2, secret=b"b" * 32)
    ends += [a, b]
    with contextlib.suppress(ConnectionClosed):  # it may be refused before or after this
        a.conn.send(Frame(CALL, 2, 1, 7, (b"", b"payload")))
    b.closed.get(timeout=5)
    assert b.frames.empty()


def test_a_peer_without_the_secret_is_refused(pair, ends):
    a, b = End(pair[0], 1, dialled=True), End(pair[1], 2, secret=b"b" * 32)
    ends += [a, b]
    assert "secret" in b.closed.get(timeout=5)
    assert b.frames.empty()


def test_another_protocol_is_refused(pair, ends):
    b = End(pair[1], 2)
    ends.append(b)
    pair[0].sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(64))
    assert "protocol" in b.closed.get(timeout=5)
    pair[0].close()


def test_a_silent_handshake_times_out(pair, ends):
    b = End(pair[1], 2)
    ends.append(b)
    began = time.monotonic()
    assert b.closed.get(timeout=5) == "handshake timed out"
    assert time.monotonic() - began < 3
    pair[0].close()


def test_garbage_after_the_handshake_closes_that_connection_only(pair, ends):
    b = End(pair[1], 2)
    ends.append(b)
    pair[0].sendall(auth.greeting(1, None) + b"\xff" * 200)
    assert "not a frame" in b.closed.get(timeout=5)
    pair[0].close()


@pytest.mark.skipif(not AVAILABLE, reason="no anonymous memory files here")
def test_segments_are_pooled_and_returned():
    pool, mapped, back = SegmentPool(1 << 24), MappedSegments(), []
    ticket = pool.pack([b"abc", bytes(100_000)], [5])
    views = mapped.open(ticket, back.append)
    assert bytes(views[0]) == b"abc" and len(views[1]) == 100_000 and pool.in_use() == 1
    del views
    assert len(back) == 1
    pool.give_back(back[0], 5)
    assert pool.in_use() == 0
    again = pool.pack([bytes(100_000)], [5, 6])
    assert again[:20] == ticket[:20]  # the same segment
    pool.borrower_gone(5)
    assert pool.in_use() == 1
    pool.borrower_gone(6)
    assert pool.in_use() == 0
    pool.close()


@pytest.mark.skipif(not AVAILABLE, reason="no anonymous memory files here")
def test_a_full_pool_says_so():
    pool = SegmentPool(1 << 17)
    assert pool.pack([bytes(100_000)], [5]) is not None
    assert pool.pack([bytes(100_000)], [5]) is None
    pool.close()


def test_a_stranger_who_drips_bytes_is_sent_away_in_time(ends):
    a, b = tcp_pair()
    ends.append(End(b, 2, secret=b"s" * 32))  # half a second for the handshake
    began = time.monotonic()
    with a:
        for byte in auth.greeting(6, b"x" * 32)[:-1]:
            with contextlib.suppress(OSError):
                a.sendall(bytes([byte]))
            if not ends[0].closed.empty():
                break
            time.sleep(0.05)
        assert ends[0].closed.get(timeout=10) == "handshake timed out"
    assert time.monotonic() - began < 3
