"""The zygote: a small single-threaded process that starts worker processes by forking, and watches them.

    agent --- socket ---> zygote --- fork ---> worker, worker, ...

It has imported the runtime (and torch, once the client uses it), so that a worker costs milliseconds and shares
those pages. It is the parent of every worker of its host: it learns of each death from the kernel, at once, and
pushes it to the agent. When the agent's end of the socket closes, however that came about, it kills what it started.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from typing import Any

_LENGTH = struct.Struct("<I")


def send_message(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """One length-prefixed pickle, with descriptors attached."""
    data = pickle.dumps(message, 5)
    data = _LENGTH.pack(len(data)) + data
    sent = socket.send_fds(sock, [data], fds) if fds else 0
    if sent < len(data):
        sock.sendall(data[sent:])


def receive_message(sock: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its descriptors; None at the end."""
    data, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 250)
    while data and len(data) < _LENGTH.size:
        data += sock.recv(_LENGTH.size - len(data))
    if not data:
        return None
    left = _LENGTH.unpack(data)[0]
    chunks = []
    while left:
        chunk = sock.recv(min(left, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        left -= len(chunk)
    return pickle.loads(b"".join(chunks)), fds


class Born:
    """What the forked child goes on to be: the agent's socket and its orders."""

    def __init__(self, fd: int, orders: dict[str, Any]) -> None:
        self.fd = fd
        self.orders = orders


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, int] = {}  # pid -> node
        self.folder = ""
        self.wake_r, self.wake_w = os.pipe()
        for fd in (self.wake_r, self.wake_w):
            os.set_blocking(fd, False)

    def run(self) -> Born | None:
        """Serves until the agent is gone (returns None), or returns in a forked child what to become."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake_r, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self.wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_r, 4096)
                self.reap()
            if self.control.fileno() in ready:
                try:
                    got = receive_message(self.control)
                except OSError:
                    got = None
                if got is None:
                    self.end()
                    return None
                born = self.obey(*got)
                if born is not None:
                    return born

    def obey(self, message: tuple[Any, ...], fds: list[int]) -> Born | None:
        op, *args = message
        if op == "fork":
            shared, each = args
            pids = []
            for fd, own in zip(fds, each, strict=True):
                pid = os.fork()
                if pid == 0:
                    for other in fds:
                        if other != fd:
                            with contextlib.suppress(OSError):  # the parent closed the earlier ones
                                os.close(other)
                    self.become_child()
                    return Born(fd, {**shared, **own})
                self.children[pid] = own["node"]
                pids.append((own["node"], pid))
                os.close(fd)
            self.tell("forked", pids)
        elif op == "kill":
            for pid, number in args[0]:
                if pid in self.children:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)
        elif op == "preload":
            for module in args[0]:
                with contextlib.suppress(Exception):
                    __import__(module)
            freeze()
            self.tell("warm", [])
        elif op == "folder":
            self.folder = args[0]
        return None

    def tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            send_message(self.control, message)

    def reap(self) -> None:
        """Reports each child that ended, and ends what is left of its process group."""
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            node = self.children.pop(pid, None)
            if node is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                ended.append((node, pid, status))
        if ended:
            self.tell("exit", ended)

    def end(self) -> None:
        """The agent is gone: nothing may stay behind."""
        for pid in self.children:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        for pid in list(self.children):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self.folder:
            import shutil

            shutil.rmtree(self.folder, ignore_errors=True)

    def become_child(self) -> None:
        self.control.close()
        os.close(self.wake_r)
        signal.set_wakeup_fd(-1)
        os.close(self.wake_w)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)


def freeze() -> None:
    """Moves what exists to the collector's permanent generation: workers then share its pages for longer."""
    import gc

    gc.collect()
    gc.freeze()


def main() -> None:
    """`python -m monarch.runtime.zygote FD`: serves the agent at the other end of descriptor FD."""
    control = socket.socket(fileno=int(sys.argv[1]))
    import monarch.runtime.child as child

    child.set_title("monarch-zygote")
    freeze()
    born = Zygote(control).run()
    if born is not None:
        child.run_forked(born.fd, born.orders)


if __name__ == "__main__":
    main()
