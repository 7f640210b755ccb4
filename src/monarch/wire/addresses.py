"""Address strings and the sockets behind them; and the private folder that unix sockets live in."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from typing import NamedTuple

FORMATS = "tcp://HOST:PORT, tls://HOST:PORT, ipc://PATH or ipc://@NAME"


class Address(NamedTuple):
    """Where to dial. `scheme` is tcp, tls or ipc; `host` is the path for ipc."""

    scheme: str
    host: str
    port: int = 0
    bind: str = ""  #: where to listen when that differs from what is dialled (`tcp://DIAL@tcp://BIND`)

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = self.port if self.port >= 0 else f"fd{-self.port - 1}"  # an inherited listening socket
        text = f"{self.scheme}://{host}:{port}"
        return f"{text}@{self.bind}" if self.bind else text


def parse(text: str) -> Address:
    """Parses an address string; ValueError names it and the formats that are understood."""
    if not isinstance(text, str):
        raise TypeError(f"address must be a string such as {FORMATS}, not {type(text).__name__}")
    dial, at, bind = text.partition("@tcp://") if "@tcp://" in text else text.partition("@tls://")
    if at and "://" in dial:
        return parse(dial)._replace(bind=at[1:] + bind)
    identity = re.match(r"[^@/:]+@(?=[a-z]+://)", text)
    if identity:
        text = text[identity.end() :]
    scheme, sep, rest = text.partition("://")
    if sep and scheme in ("ipc", "unix") and rest:
        return Address("ipc", rest)
    if sep and scheme in ("tcp", "tls"):
        match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d+)", rest)
        if match and int(match[3]) < 65536:
            return Address(scheme, match[1] or match[2], int(match[3]))
        inherited = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):fd(\d+)", rest)
        if inherited:
            return Address(scheme, inherited[1] or inherited[2], -int(inherited[3]) - 1)
    raise ValueError(f"bad address {text!r}: expected {FORMATS}")


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket, and the address to give to others (with the real port)."""
    where = parse(address.bind) if address.bind else address
    if where.scheme == "ipc":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + where.host[1:] if where.host.startswith("@") else where.host)
        sock.listen(1024)
        return sock, address
    if where.host == "*":
        raise NotImplementedError(f"{where}: a wildcard cannot be advertised; use tcp://DIAL@tcp://0.0.0.0:PORT")
    if where.port < 0:  # adopt an inherited socket
        sock = socket.socket(fileno=-where.port - 1)
    else:
        try:
            family, kind, proto, _, sockaddr = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        except OSError as e:
            raise RuntimeError(f"cannot resolve {where.host!r} of {where}: {e}; pass an explicit address") from e
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(sockaddr)
        except OSError as e:
            sock.close()
            raise OSError(e.errno, f"cannot listen on {where}: {e.strerror}") from e
    sock.listen(1024)
    if address.bind:
        return sock, address
    return sock, address._replace(port=sock.getsockname()[1])


def dial(address: Address, timeout: float) -> socket.socket:
    """A connected socket. Raises OSError (or TimeoutError) when nobody answers within `timeout` seconds."""
    if address.scheme == "ipc":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect("\0" + address.host[1:] if address.host.startswith("@") else address.host)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout=timeout)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """No Nagle delay, and keepalive so that a silent peer is noticed."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def keep_alive(sock: socket.socket, seconds: float) -> None:
    """A TCP connection to a machine that is silent for `seconds` is closed, by the kernels alone: no interpreter has
    to run at either end. 0 leaves the kernel's defaults (hours). Nothing for other sockets."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not seconds:
        return
    step = max(1, int(seconds / 5))
    options = {"TCP_KEEPIDLE": step, "TCP_KEEPALIVE": step, "TCP_KEEPINTVL": step, "TCP_KEEPCNT": 4}
    for name, value in {**options, "TCP_USER_TIMEOUT": int(seconds * 1000)}.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def private_folder() -> str:
    """Makes a folder that only this user can enter, for one host agent's sockets (paths must stay under 108 bytes)."""
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp"
    _sweep(base)
    return tempfile.mkdtemp(prefix=f"monarch-{os.getpid()}-", dir=base)  # mkdtemp makes it 0700


def _sweep(base: str) -> None:
    """Removes folders of this user whose agent and zygote were killed together, so that nobody could clean up."""
    for name in os.listdir(base):
        match = re.fullmatch(r"monarch-(\d+)-\w+", name)
        if match is None:
            continue
        path = os.path.join(base, name)
        try:
            if os.stat(path).st_uid == os.getuid():
                os.kill(int(match[1]), 0)
        except ProcessLookupError:
            remove_folder(path)
        except OSError:
            continue


def remove_folder(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def same_user(sock: socket.socket) -> bool:
    """For unix sockets on Linux: the peer runs as this user (or root)."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    import struct

    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (os.getuid(), 0)


def of_peer(sock: socket.socket) -> str:
    """Where the other end of a connected TCP socket is, as an address; "" for other sockets, and before it is."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return ""
    return str(Address("tcp", host, port))
