"""Who may talk to us: a mutual challenge before the first frame is parsed.

Both ends send a greeting of fixed size: magic, protocol version, mode, node id, pid, a random nonce. With a shared
secret each then proves that it knows it, by an HMAC over both greetings and its role, and checks the other's proof:
first the one that dialled, so that a stranger who connects gets nothing to try keys on.
Nothing is unpickled, and nothing of variable size is read, until that is done.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

#: magic, protocol version, mode (0 open, 1 secret), node, pid, nonce
GREETING = struct.Struct("<8sHHQI16s")
_MAGIC = b"MONARCH\n"
PROTOCOL = 2
OPEN, SECRET = 0, 1
PROOF_SIZE = 32


class AuthError(Exception):
    """The peer is a stranger, or speaks another protocol version."""


def greeting(node: int, secret: bytes | None) -> bytes:
    mode = OPEN if secret is None else SECRET
    return GREETING.pack(_MAGIC, PROTOCOL, mode, node, os.getpid(), os.urandom(16))


def read_greeting(data: bytes) -> tuple[int, int, int]:
    """(mode, node, pid) of a peer's greeting. Raises AuthError."""
    magic, version, mode, node, pid, _ = GREETING.unpack(data)
    if magic != _MAGIC:
        raise AuthError("the peer does not speak the monarch protocol")
    if version != PROTOCOL:
        raise AuthError(f"the peer speaks monarch protocol version {version}, this process version {PROTOCOL}")
    return mode, node, pid


def proof(secret: bytes, role: bytes, dialler: bytes, listener: bytes) -> bytes:
    return hmac.new(secret, role + dialler + listener, hashlib.sha256).digest()


def check(secret: bytes, role: bytes, dialler: bytes, listener: bytes, given: bytes) -> None:
    if not hmac.compare_digest(proof(secret, role, dialler, listener), given):
        raise AuthError("wrong secret")
