"""What the supervision tests share, on the side of the test."""

import contextlib
import time

from actors_for_tests import Echo
from conftest import WAIT, wait_until
from monarch.config import configured


@contextlib.contextmanager
def short_limits():
    """Stops do not wait long for what is busy."""
    with configured(cleanup_timeout="200ms", stop_actor_timeout="300ms"):
        yield


def heard(keeper, n=1, within=10.0):
    """What `keeper` was told, as soon as it is at least `n` failures."""
    out = []

    def enough():
        out[:] = keeper.told.call_one().get(timeout=WAIT)
        return len(out) >= n

    wait_until(enough, within)
    return out


def fence(procs, faults):
    """Returns when a failure that happens now has reached the hook: earlier ones have, too."""
    mesh = procs().spawn("fence", Echo)
    mesh.fail.broadcast("fence")
    wait_until(lambda: any(f.mesh_name == mesh.name for f in faults))
    faults[:] = [f for f in faults if f.mesh_name != mesh.name]


@contextlib.contextmanager
def less_than(seconds):
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s"
