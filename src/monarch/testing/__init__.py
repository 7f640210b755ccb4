"""Failures on purpose, for the tests of programs built on this framework.

    kill(mesh)            its processes die (SIGKILL, or another signal)
    freeze(mesh), thaw    its processes stop running, and go on
    hold_gil(mesh, s)     its processes hold the interpreter lock in native code, as a stuck extension would
    Link(address)         a stretch of network to a host, to cut, delay and mend
    local_hosts(n)        n hosts on this machine, each of which can be lost
    leftovers, traces     what a piece of code left behind
    isolated              a decorator: the function runs in a fresh interpreter

`monarch.testing.plugin` is a pytest plugin that fails tests which leave something behind.
"""

from monarch.testing._faults import freeze, hold_gil, kill, pids, thaw
from monarch.testing._hosts import LocalHosts, local_hosts
from monarch.testing._isolated import IsolatedError, isolated
from monarch.testing._leaks import Traces, leftovers, traces
from monarch.testing._links import Link

__all__ = [
    "IsolatedError",
    "Link",
    "LocalHosts",
    "Traces",
    "freeze",
    "hold_gil",
    "isolated",
    "kill",
    "leftovers",
    "local_hosts",
    "pids",
    "thaw",
    "traces",
]
