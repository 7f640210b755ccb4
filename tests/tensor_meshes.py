"""Meshes of processes for tensor programs, shared by the tests of one file."""

import pytest

from monarch.actor import this_host


def _spawned(dims):
    procs = this_host().spawn_procs(dims)
    procs.initialized.get(timeout=60)
    yield procs
    procs.stop().get(timeout=60)


@pytest.fixture(scope="module")
def pair():
    """Two processes, dim `gpus`."""
    yield from _spawned({"gpus": 2})


@pytest.fixture(scope="module")
def square():
    """2 x 2 processes, dims `host` and `gpu`."""
    yield from _spawned({"host": 2, "gpu": 2})
