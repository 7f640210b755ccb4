"""A TLS stream that looks like a non-blocking socket.

OpenSSL's objects serve one thread at a time; here senders encrypt in their own threads while the runtime thread
decrypts, so every use is under a lock. What the socket does not take stays here, encrypted, until `flush`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence

from monarch.wire.frames import Bytes

_CHUNK = 1 << 18


class TlsSocket:
    """One end. `handshake` until it says True, then `send` and `recv` as on a socket; BlockingIOError likewise."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, listener: bool) -> None:
        self.raw = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._in, self._out, server_side=listener)
        self._left = b""  #: encrypted, not yet taken by the socket
        self._lock = threading.Lock()

    @property
    def family(self) -> int:
        return self.raw.family

    def getsockopt(self, level: int, option: int) -> int:
        return self.raw.getsockopt(level, option)

    @property
    def pending(self) -> bool:
        """Something waits for `flush`."""
        return bool(self._left)

    def handshake(self) -> bool:
        """Goes on with it; True when done. Raises OSError (ssl.SSLError) when the peer is refused, or refuses."""
        with self._lock:
            while True:
                try:
                    self._ssl.do_handshake()
                    return True
                except ssl.SSLWantReadError:
                    pass
                finally:  # also the alert that says why
                    with contextlib.suppress(OSError):
                        self._push()
                if not self._fill():
                    raise ConnectionResetError(104, "the peer hung up during the TLS handshake")

    def send(self, data: Bytes) -> int:
        """Takes up to 256 KiB of `data`; how much. BlockingIOError while earlier bytes have not left."""
        with self._lock:
            if self._left:
                self._push()
                if self._left:
                    raise BlockingIOError
            n = self._ssl.write(memoryview(data)[:_CHUNK])
            self._push()
            return n

    def sendmsg(self, parts: Sequence[Bytes]) -> int:
        first = next((p for p in parts if len(p)), b"")
        return self.send(first) if len(first) else 0

    def flush(self) -> None:
        with self._lock:
            self._push()

    def recv(self, n: int) -> bytes:
        with self._lock:
            while True:
                try:
                    return self._ssl.read(n)
                except ssl.SSLWantReadError:
                    if not self._fill():
                        return b""
                except ssl.SSLZeroReturnError:
                    return b""

    def recv_into(self, into: memoryview) -> int:
        with self._lock:
            while True:
                try:
                    n: int = self._ssl.read(len(into), into)  # type: ignore[assignment]
                    return n
                except ssl.SSLWantReadError:
                    if not self._fill():
                        return 0
                except ssl.SSLZeroReturnError:
                    return 0

    def _fill(self) -> bool:
        """More bytes from the socket; False at its end. Raises BlockingIOError when there are none now."""
        data = self.raw.recv(_CHUNK)
        if data:
            self._in.write(data)
        return bool(data)

    def _push(self) -> None:
        if self._out.pending:
            self._left = self._left + self._out.read() if self._left else self._out.read()
        if self._left:
            try:
                n = self.raw.send(self._left)
            except BlockingIOError:
                return
            self._left = self._left[n:]

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.raw.setsockopt(level, name, value)

    def close(self) -> None:
        self.raw.close()
