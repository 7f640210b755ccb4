"""The frame: one message between two processes, as a fixed header, a table of lengths, and parts.

A frame is `header | lengths | meta | payload | buffers...`. The header says who it is for and how long everything
is, so a relay forwards a frame without looking inside. Lengths are checked against a limit before memory is
allocated for them: a bad frame costs its connection and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Union

Bytes = Union[bytes, bytearray, memoryview]

#: magic, kind, flags, number of parts, rank, destination node, origin node, key, reply port, sender actor
HEADER = struct.Struct("<HBBII5Q")
HEADER_SIZE = HEADER.size
MAGIC = 0x4D6E
#: A frame has at most this many parts (meta, payload and out-of-band buffers).
MAX_PARTS = 65_536
_HEAD_OF_TWO = struct.Struct(HEADER.format + "2Q")
_LENGTHS = [struct.Struct(f"<{n}Q") for n in range(9)]

# Kinds of frames.
HELLO, CALL, REPLY, CONTROL, RELEASE, CAST, ACK = range(7)

# Flags.
SHM = 1  #: the parts lie in a shared-memory segment; the only part on the wire is its ticket
ERROR = 2  #: the payload of a reply is an exception
DEAD = 4  #: a reply that says: the addressee will never answer
URGENT = 8  #: control: does not wait for the bootstrap callable; reply: bounces to its sender when undeliverable
RANKED = 16  #: the reply carries the rank of its sender


class FrameError(Exception):
    """The bytes on a connection are not a valid frame; the connection is closed."""


class Frame:
    """One message. `parts` are meta (may be empty), payload, and out-of-band buffers."""

    __slots__ = ("dest", "flags", "key", "kind", "lease", "origin", "parts", "rank", "reply", "sender")

    def __init__(
        self,
        kind: int,
        dest: int,
        origin: int,
        key: int = 0,
        parts: Sequence[Bytes] = (),
        *,
        flags: int = 0,
        rank: int = 0,
        reply: int = 0,
        sender: int = 0,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.rank = rank
        self.dest = dest
        self.origin = origin
        self.key = key
        self.reply = reply
        self.sender = sender
        self.parts = parts
        self.lease: object = None  #: keeps a shared-memory segment from being reused while set

    @property
    def nbytes(self) -> int:
        parts = self.parts
        if len(parts) == 2:
            return HEADER_SIZE + 16 + len(parts[0]) + len(parts[1])
        return HEADER_SIZE + 8 * len(parts) + sum(map(len, parts))

    def head(self) -> bytes:
        """Header and table of lengths: everything on the wire before the parts."""
        parts = self.parts
        n = len(parts)
        if n == 2:
            return _HEAD_OF_TWO.pack(
                MAGIC, self.kind, self.flags, 2, self.rank, self.dest, self.origin, self.key, self.reply, self.sender,
                len(parts[0]), len(parts[1]),
            )  # fmt: skip
        lengths = _LENGTHS[n] if n < 9 else struct.Struct(f"<{n}Q")
        return HEADER.pack(
            MAGIC, self.kind, self.flags, n, self.rank, self.dest, self.origin, self.key, self.reply, self.sender
        ) + lengths.pack(*map(len, parts))

    def __repr__(self) -> str:
        names = ["HELLO", "CALL", "REPLY", "CONTROL", "RELEASE", "CAST", "ACK"]
        kind = names[self.kind] if self.kind < len(names) else str(self.kind)
        return f"<{kind} {self.origin:x}->{self.dest:x} key={self.key:x} {[len(p) for p in self.parts]}>"


class FrameParser:
    """Turns a byte stream into frames. `feed` what arrived; iterate what is complete.

    A large frame gets its memory once, when its lengths are known and within `limit`; `want` then tells the
    connection where to receive straight into.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buf = bytearray()
        self._pos = 0
        self._big: Frame | None = None
        self._big_lengths: tuple[int, ...] = ()
        self._big_store: bytearray = bytearray()
        self._big_have = 0

    def want(self) -> memoryview | None:
        """Where the next bytes of a large frame belong, or None: use `feed`."""
        if self._big is None:
            return None
        return memoryview(self._big_store)[self._big_have :]

    def received_into(self, n: int) -> Frame | None:
        """`n` bytes were written to `want()`; returns the frame if that completed it."""
        self._big_have += n
        if self._big_have < len(self._big_store):
            return None
        frame, self._big = self._big, None
        assert frame is not None
        frame.parts = _cut(memoryview(self._big_store), self._big_lengths)
        self._big_store = bytearray()
        return frame

    def feed(self, data: Bytes) -> Iterator[Frame]:
        """Yields each frame completed by `data`. Raises FrameError on bytes that are no frame."""
        if self._big is not None:
            room = self.want()
            assert room is not None
            n = min(len(room), len(data))
            room[:n] = data[:n]
            room.release()
            done = self.received_into(n)
            if done is not None:
                yield done
            data = memoryview(data)[n:]
        buf: Bytes
        if self._buf or type(data) is not bytes:
            self._buf += data
            buf = self._buf
        else:
            buf = data  # nothing is left over from before: no need to copy
        pos, end = 0, len(buf)
        while end - pos >= HEADER_SIZE:
            magic, kind, flags, n, rank, dest, origin, key, reply, sender = HEADER.unpack_from(buf, pos)
            if magic != MAGIC:
                raise FrameError(f"not a frame (magic {magic:#06x})")
            if n > MAX_PARTS:
                raise FrameError(f"frame with {n} parts")
            start = pos + HEADER_SIZE + 8 * n
            if end < start:
                break
            table = _LENGTHS[n] if n < 9 else struct.Struct(f"<{n}Q")
            lengths = table.unpack_from(buf, pos + HEADER_SIZE)
            size = sum(lengths)
            if size > self.limit:
                raise FrameError(f"rejecting oversize frame: len={size} > max={self.limit} (CODEC_MAX_FRAME_LENGTH)")
            frame = Frame(kind, dest, origin, key, flags=flags, rank=rank, reply=reply, sender=sender)
            if end - start >= size:
                if n == 2:  # the common case, without a loop
                    middle = start + lengths[0]
                    last = start + size
                    if buf is data:
                        frame.parts = (buf[start:middle], buf[middle:last])
                    else:
                        frame.parts = (bytes(buf[start:middle]), bytes(buf[middle:last]))
                else:
                    frame.parts = _cut(memoryview(bytearray(buf[start : start + size])), lengths) if n else ()
                pos = start + size
                yield frame
                continue
            if size >= 1 << 16:
                self._big_store = bytearray(size)
                have = end - start
                self._big_store[:have] = buf[start:end]
                self._big, self._big_lengths, self._big_have = frame, lengths, have
                pos = end
            break
        if buf is self._buf:
            if pos:
                del self._buf[:pos]
        elif pos < end:
            self._buf += memoryview(buf)[pos:]


def _cut(data: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    parts, at = [], 0
    for n in lengths:
        parts.append(data[at : at + n])
        at += n
    return parts
