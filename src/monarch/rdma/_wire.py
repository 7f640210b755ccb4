"""The data path between hosts: what goes over its sockets, and who may open one.

After a mutual challenge with a key that travelled over the (authenticated) control path, the initiator sends requests
of fixed size; nothing is pickled and no address travels: a registration is named by its slot and id, and the serving
side checks both against the owner's table.

    read    request                 ->  chunks: header (status OK, bytes), bytes; or header (status, bytes), text
    gather  request, and the length and stride of the runs  ->  as for read
    write   request, all the bytes  ->  one header
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable

from monarch.rdma._peer import Cancelled, Dropped, Gone, Refused

#: operation, slot, owner node, buffer id, offset, bytes
REQUEST = struct.Struct("<BxxxIQQQQ")
#: status, bytes that follow
HEADER = struct.Struct("<BxxxI")
#: bytes of a run, bytes from one to the next
RUNS = struct.Struct("<QQ")
READ, WRITE, GATHER = 1, 2, 3
OK, DROPPED, GONE, DENIED, FAILED = range(5)
#: bytes per chunk: small enough to stay in a cache between the two copies, large enough that calls cost little
CHUNK = 1 << 20
#: a longer run is read as what it is, a plain range
LONGEST_RUN = CHUNK
#: seconds a socket waits before its user looks at whether the transfer was given up
POLL = 0.25
HANDSHAKE = 5.0

_HELLO = struct.Struct("<8sQ16s")
_MAGIC = b"MONRDMA1"

_STATUS: dict[type[Exception], int] = {Dropped: DROPPED, Gone: GONE, PermissionError: DENIED}


class Lost(Exception):
    """The connection ended."""


def status_of(e: Exception) -> tuple[int, bytes]:
    """How an error is said on the wire."""
    for kind, status in _STATUS.items():
        if isinstance(e, kind):
            return status, str(e).encode()[:2000]
    return FAILED, f"{type(e).__name__}: {e}".encode()[:2000]


def raise_status(status: int, text: str) -> None:
    """The error behind a status other than OK."""
    if status == DROPPED:
        raise Dropped(text)
    if status == GONE:
        raise Gone(*([text] if text else []))
    if status == DENIED:
        raise PermissionError(text)
    raise OSError(text)


def receive(sock: socket.socket, view: memoryview, cancelled: Callable[[], bool]) -> None:
    """Fills `view`. Raises Lost, Cancelled."""
    at, n = 0, len(view)
    while at < n:
        try:
            got = sock.recv_into(view[at:] if at else view)
        except TimeoutError:
            if cancelled():
                raise Cancelled from None
            continue
        except OSError as e:
            raise Lost(str(e)) from None
        if not got:
            raise Lost("the connection was closed")
        at += got


def send(sock: socket.socket, parts: list[bytes | memoryview], cancelled: Callable[[], bool]) -> None:
    """Sends all parts. Raises Lost, Cancelled."""
    left = [memoryview(p) for p in parts if len(p)]
    while left:
        try:
            sent = sock.sendmsg(left)
        except TimeoutError:
            if cancelled():
                raise Cancelled from None
            continue
        except OSError as e:
            raise Lost(str(e)) from None
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)


def _proof(key: bytes, role: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.new(key, role + theirs + ours, hashlib.sha256).digest()


def greet(sock: socket.socket, key_id: int, key: bytes) -> None:
    """The dialling side of the challenge. Raises Refused when the other does not know the key, Lost."""
    sock.settimeout(HANDSHAKE)
    mine = os.urandom(16)
    send(sock, [_HELLO.pack(_MAGIC, key_id, mine)], _at_once)
    answer = memoryview(bytearray(48))
    receive(sock, answer, _at_once)
    theirs = bytes(answer[:16])
    if not hmac.compare_digest(_proof(key, b"server", mine, theirs), answer[16:]):
        raise Refused("who answered the data connection is not the owner's host")
    send(sock, [_proof(key, b"client", mine, theirs)], _at_once)
    sock.settimeout(POLL)


def admit(sock: socket.socket, key_of: Callable[[int], bytes | None]) -> bool:
    """The accepting side; False when the dialler is a stranger."""
    sock.settimeout(HANDSHAKE)
    hello = memoryview(bytearray(_HELLO.size))
    receive(sock, hello, _at_once)
    magic, key_id, theirs = _HELLO.unpack(hello)
    key = key_of(key_id)
    if magic != _MAGIC or key is None:
        return False
    mine = os.urandom(16)
    send(sock, [mine + _proof(key, b"server", theirs, mine)], _at_once)
    answer = memoryview(bytearray(32))
    receive(sock, answer, _at_once)
    return hmac.compare_digest(_proof(key, b"client", theirs, mine), answer)


def _at_once() -> bool:
    return True
