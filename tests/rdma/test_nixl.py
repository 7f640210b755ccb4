"""The adapter of nixl, through its way within one host, which needs no NIC."""

import importlib.util
import os
import signal

import pytest
from actors_with_memory import Owner

from conftest import ask, wait_until
from monarch.actor import this_host
from monarch.config import configured
from monarch.rdma import RDMABufferDroppedError, RDMAOwnerDiedError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install --no-deps nixl nixl-cu12"
)
WAIT = 30


@pytest.fixture
def owner(nothing_left):
    with configured(rdma_disable_vm_access=True, rdma_nixl="on"):
        mesh = this_host().spawn_procs({"gpus": 1})
        yield mesh.spawn("owner", Owner)
        mesh.stop().get(timeout=WAIT)


def test_reads_and_writes(owner):
    b, big = ask(owner.view, "m", b"0123456789"), ask(owner.zeros, "z", 5 << 20)
    assert b.path() == "nixl"
    out = bytearray(4)
    b.read_into(out, offset=3, nbytes=4).get(timeout=WAIT)
    assert out == b"3456"
    b.write_from(bytearray(b"ab"), offset=8).get(timeout=WAIT)
    assert ask(owner.content, "m") == b"01234567ab"
    data = bytearray(os.urandom(5 << 20))
    big.write_from(data).get(timeout=WAIT)
    back = bytearray(5 << 20)
    big.read_into(back).get(timeout=WAIT)
    assert back == data


def test_drops_and_deaths(owner, faults):
    a, b = ask(owner.view, "a", b"x" * 64), ask(owner.view, "b", b"y" * 64)
    for buffer in (a, b):
        buffer.read_into(bytearray(64)).get(timeout=WAIT)
    ask(owner.drop, "a")
    with pytest.raises(RDMABufferDroppedError, match="it was dropped"):
        a.read_into(bytearray(64)).get(timeout=WAIT)
    os.kill(b._handle.pid, signal.SIGKILL)
    wait_until(lambda: faults)
    with pytest.raises(RDMAOwnerDiedError):
        b.read_into(bytearray(64)).get(timeout=WAIT)
