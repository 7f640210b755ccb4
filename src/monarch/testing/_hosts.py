"""Several hosts on one machine: worker daemons behind links, to be lost."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from typing import Any

from monarch.actor._hosts import HostMesh, attach_to_workers
from monarch.testing._faults import WAIT
from monarch.testing._links import Link

_DAEMON = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class LocalHosts:
    """`n` hosts on loopback. Use as a context manager: the hosts and all that runs on them end with it.

    mesh        the attached HostMesh, dim `hosts`
    links       the Link to each host
    lose(i)     host i is gone: its daemon and processes are killed, connections close
    silence(i)  host i does not answer any more, and no connection closes
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"local_hosts: n must be at least 1, got {n}")
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.links: list[Link] = []
        try:
            for _ in range(n):
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    port, fd = listener.getsockname()[1], listener.fileno()
                    command = [sys.executable, "-c", _DAEMON, f"tcp://127.0.0.1:fd{fd}"]
                    self.daemons.append(subprocess.Popen(command, pass_fds=[fd], start_new_session=True))
                self.links.append(Link(f"tcp://127.0.0.1:{port}"))
            self.mesh: HostMesh = attach_to_workers(
                ca="trust_all_connections", workers=[link.address for link in self.links]
            )
            self.mesh.initialized.get(timeout=WAIT)
        except BaseException:
            self.close()
            raise

    def lose(self, index: int) -> None:
        """The daemon is killed; what it started dies with it. Returns when the daemon is dead."""
        self.daemons[index].kill()
        self.daemons[index].wait(WAIT)

    def silence(self, index: int) -> None:
        """Nothing passes between here and that host any more; both sides still run."""
        self.links[index].cut()

    def close(self) -> None:
        """Ends all hosts, politely where they answer. Idempotent."""
        mesh: Any = getattr(self, "mesh", None)
        if mesh is not None and not mesh._down:
            for link in self.links:
                link.mend()
            with contextlib.suppress(Exception):
                mesh.shutdown().get(timeout=5)
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(2 if mesh is not None else 0)
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGKILL)
                daemon.wait(WAIT)
        for link in self.links:
            link.close()

    def __enter__(self) -> LocalHosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def local_hosts(n: int = 2) -> LocalHosts:
    """Starts `n` worker daemons on loopback, each behind a `Link`, and attaches to them. ValueError for n < 1."""
    return LocalHosts(n)
