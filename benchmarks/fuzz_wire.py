"""Feeds mutated handshakes and frames to the parsers for a fixed time: `fuzz_wire.py --seconds 60 [--seed N]`.

Whatever comes, a parser yields frames within the limits or raises FrameError or AuthError, and keeps little memory.
"""

from __future__ import annotations

import argparse
import random
import socket
import time
import tracemalloc

from monarch.wire import auth
from monarch.wire.connection import Connection, Limits
from monarch.wire.frames import CALL, Frame, FrameError, FrameParser
from monarch.wire.poller import Poller

LIMIT = 1 << 20
SECRET = b"s" * 32


def mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        how = rng.randrange(4)
        at = rng.randrange(len(out) + 1)
        if how == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif how == 1:
            del out[at : at + rng.randint(1, 16)]
        elif how == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 16))
        elif at + 8 <= len(out):
            out[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), (1 << rng.randrange(64)).to_bytes(8, "little")])
    return bytes(out)


def frames(rng: random.Random) -> bytes:
    out = b""
    for _ in range(rng.randint(1, 4)):
        parts = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(12))]
        f = Frame(rng.randrange(8), rng.getrandbits(63), rng.getrandbits(63), rng.getrandbits(63), parts)
        out += f.head() + b"".join(parts)
    return out


def try_parser(rng: random.Random) -> None:
    parser, data = FrameParser(LIMIT), mutate(rng, frames(rng))
    at = 0
    try:
        while at < len(data):
            n = rng.randint(1, 300)
            into = parser.want()
            if into is not None:
                piece = data[at : at + min(n, len(into))]
                into[: len(piece)] = piece
                into.release()
                parser.received_into(len(piece))
                at += len(piece)
                continue
            for frame in parser.feed(data[at : at + n]):
                assert sum(map(len, frame.parts)) <= LIMIT
            at += n
    except FrameError:
        pass


def try_handshake(rng: random.Random, poller: Poller) -> None:
    a, b = socket.socketpair()
    seen: list[Frame] = []
    conn = Connection(
        poller, a, 1, Limits(LIMIT, LIMIT, 5.0), lambda c, f: seen.append(f), lambda c, r: None, secret=SECRET
    )
    hello = auth.greeting(2, SECRET)
    frame = Frame(CALL, 1, 2, 0, (b"", b"x"))
    data = mutate(rng, hello + bytes(32)) + frame.head() + b"x"
    b.sendall(data)
    b.shutdown(socket.SHUT_WR)
    conn._on_event(1)
    assert not seen, "a frame was taken from a stranger"
    conn.close("done")
    b.close()


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--seconds", type=float, default=60.0)
    args.add_argument("--seed", type=int, default=int(time.time()))
    opts = args.parse_args()
    rng = random.Random(opts.seed)
    poller = Poller()
    tracemalloc.start()
    end, rounds = time.monotonic() + opts.seconds, 0
    while time.monotonic() < end:
        try_parser(rng)
        if rounds % 10 == 0:
            try_handshake(rng, poller)
        rounds += 1
        poller._timers.clear()
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 64 << 20, peak
    print(f"fuzz_wire: {rounds} rounds, seed {opts.seed}, peak {peak >> 20} MiB, nothing found")


if __name__ == "__main__":
    main()
