"""Runs a plain script on a rank, as `torchrun` would."""

from __future__ import annotations

import os
import runpy
import socket
import sys

from monarch.actor import Actor, current_rank, endpoint
from monarch.spmd.env import free_port, rank_variables


class SPMDActor(Actor):
    """One per rank: `main` sets the launcher's variables and runs a script or module as `__main__`."""

    @endpoint
    def get_host_port(self, use_ipaddr: str | None = None) -> tuple[str, int]:
        """(host, free port) for MASTER_ADDR and MASTER_PORT; `use_ipaddr` "ipv4" or "ipv6" gives a number."""
        host = socket.gethostname()
        if use_ipaddr is not None:
            family = socket.AF_INET6 if "6" in use_ipaddr else socket.AF_INET
            host = str(socket.getaddrinfo(host, None, family)[0][4][0])
        return host, free_port()

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: list[str]) -> bool:
        """Runs `script_args` (`[script, *args]` or `["-m", module, *args]`); True when it ended normally."""
        os.environ.update(rank_variables(current_rank()))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master_addr, str(master_port)
        before = sys.argv
        module = script_args[0] == "-m"
        sys.argv = list(script_args[1:] if module else script_args)
        try:
            if module:
                runpy.run_module(script_args[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script_args[0], run_name="__main__")
        except SystemExit as e:
            if e.code not in (None, 0):
                raise RuntimeError(f"rank {os.environ['RANK']}: {script_args} exited with status {e.code}") from e
        finally:
            sys.argv = before
        return True
