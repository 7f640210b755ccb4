"""The zygote: a small single-threaded process that starts worker processes by forking, and watches them.

    agent --- socket ---> zygote --- fork ---> worker, worker, ...

It has imported the runtime (and torch, once the client uses it), so that a worker costs milliseconds and shares
those pages. It is the parent of every worker of its host: it learns from the kernel, at once, when one dies or is
frozen (stopped by a signal), and pushes that to the agent. It passes on what workers write to stderr and remembers
the last lines, which explain a death. When the agent's end of the socket closes, however that came about, it kills
what it started.
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


class Errors:
    """The read end of one worker's stderr: passed on, and its last lines kept."""

    CHUNK = select.PIPE_BUF  # a pipe that is writable takes this much without blocking
    LINES, WIDTH = 12, 300  # when `tail_log_lines` is 0

    def __init__(self, fd: int, lines: int) -> None:
        os.set_blocking(fd, False)
        self.fd, self.lines = fd, lines or self.LINES
        self._kept = b""

    def pass_on(self) -> bool:
        """Moves one chunk to our own stderr; False at the end."""
        try:
            data = os.read(self.fd, self.CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self._kept = (self._kept + data)[-self.lines * self.WIDTH :]
            with contextlib.suppress(OSError):
                os.write(2, data)
        return bool(data)

    def waiting(self) -> bool:
        return bool(select.select([self.fd], [], [], 0)[0])

    def tail(self) -> str:
        """The last lines, without empty ones; from the beginning of a report of a crash, when there is one."""
        text = self._kept.decode(errors="replace")
        crash = text.rfind("Fatal Python error: ")
        lines = [line.rstrip()[: self.WIDTH] for line in text[max(crash, 0) :].splitlines()]
        lines = [line for line in lines if line]
        return "\n".join(lines[: self.lines] if crash >= 0 else lines[-self.lines :])


def writable(fd: int) -> bool:
    try:
        return bool(select.select([], [fd], [], 0)[1])
    except (OSError, ValueError):
        return True  # closed: what is written there is lost, and nobody waits


class Born:
    """What the forked child goes on to be: the agent's socket and its orders."""

    def __init__(self, fd: int, orders: dict[str, Any]) -> None:
        self.fd = fd
        self.orders = orders


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, int] = {}  # pid -> node
        self.errors: dict[int, Errors] = {}  # by descriptor
        self.errors_of: dict[int, Errors] = {}  # by pid
        self.blocked = False  # our stderr takes nothing: what workers write stays in their pipes meanwhile
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
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.wake_r, select.POLLIN)
        while True:
            ready = {fd for fd, _ in self.poll.poll()}
            self.pass_errors_on(ready)
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
            for i, (fd, own) in enumerate(zip(fds, each, strict=True)):
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.dup2(write, 2)
                    os.close(write)
                    os.close(read)
                    for other in fds[i + 1 :]:  # we closed the earlier ones
                        os.close(other)
                    self.become_child()
                    return Born(fd, {**shared, **own})
                with contextlib.suppress(OSError):  # the child does it too: whoever comes first, before any kill
                    os.setpgid(pid, pid)
                os.close(write)
                errors = self.errors[read] = self.errors_of[pid] = Errors(read, shared["tail_log_lines"])
                if not self.blocked:
                    self.poll.register(errors.fd, select.POLLIN)
                self.children[pid] = own["node"]
                pids.append((own["node"], pid))
                os.close(fd)
            self.tell("forked", pids)
        elif op == "kill":
            by_node = {node: pid for pid, node in self.children.items()}
            for node, number in args[0]:
                pid = by_node.get(node, 0)
                if pid:
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

    def pass_errors_on(self, ready: set[int]) -> None:
        """What workers wrote to stderr goes to ours, as long as that takes it."""
        if self.blocked:
            if 2 in ready:
                self.blocked = False
                self.poll.unregister(2)
                for fd in self.errors:
                    self.poll.register(fd, select.POLLIN)
            return
        for fd in ready & self.errors.keys():
            if not writable(2):
                self.blocked = True
                self.poll.register(2, select.POLLOUT)
                for each in self.errors:
                    self.poll.unregister(each)
                return
            if not self.errors[fd].pass_on():
                self.forget_errors(fd)

    def forget_errors(self, fd: int) -> None:
        del self.errors[fd]
        if not self.blocked:
            self.poll.unregister(fd)
        os.close(fd)

    def last_words(self, pid: int) -> str:
        """The end of what a dead worker wrote; passes on what is still in the pipe, if that does not block."""
        errors = self.errors_of.pop(pid, None)
        if errors is None:
            return ""
        for _ in range(64):
            if errors.fd not in self.errors or not errors.waiting() or not writable(2):
                break
            if not errors.pass_on():
                self.forget_errors(errors.fd)
        return errors.tail()

    def reap(self) -> None:
        """Reports each child that ended or was frozen, and ends what is left of a dead one's process group."""
        ended, frozen = [], []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if pid in self.children:
                    frozen.append((self.children[pid], os.WIFSTOPPED(status)))
                continue
            node = self.children.pop(pid, None)
            if node is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                ended.append((node, pid, status, self.last_words(pid)))
        if frozen:
            self.tell("frozen", frozen)
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
            self.last_words(pid)
        if self.folder:
            import shutil

            shutil.rmtree(self.folder, ignore_errors=True)

    def become_child(self) -> None:
        self.control.close()
        for fd in self.errors:
            os.close(fd)
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
