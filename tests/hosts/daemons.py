"""Worker daemons on loopback, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from monarch.actor import Actor, endpoint

SERVE = """
import sys
from monarch.actor import run_worker_loop_forever
address, ca, key = sys.argv[1:4]
run_worker_loop_forever(address=address, ca=ca, private_key=key or None)
"""


class Echo(Actor):
    def __init__(self):
        self.seen = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def note(self, x) -> None:
        self.seen.append(x)

    @endpoint
    def noted(self):
        return self.seen


class Daemon:
    """A worker daemon; `address` is where it serves."""

    def __init__(self, scheme="tcp", ca="trust_all_connections", key="", **env):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port, fd = listener.getsockname()[1], listener.fileno()
            command = [sys.executable, "-c", SERVE, f"{scheme}://127.0.0.1:fd{fd}", str(ca), str(key)]
            self.process = subprocess.Popen(
                command, pass_fds=[fd], start_new_session=True, env={**os.environ, **env}, stderr=subprocess.PIPE
            )
        self.address = f"{scheme}://127.0.0.1:{self.port}"

    def close(self):
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(OSError):
            self.process.stderr.close()

    def memory(self):
        """Bytes of resident memory."""
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
