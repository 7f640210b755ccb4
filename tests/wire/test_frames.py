import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.wire.frames import CALL, HEADER_SIZE, Frame, FrameError, FrameParser

parts = st.lists(st.binary(max_size=300), max_size=12)


def encode(frame):
    return frame.head() + b"".join(frame.parts)


@given(st.lists(parts, min_size=1, max_size=6), st.data())
@settings(deadline=None)
def test_frames_survive_any_cut_of_the_stream(frames, data):
    stream = b"".join(encode(Frame(CALL, i, 2, 3, p, rank=4, reply=5, sender=6)) for i, p in enumerate(frames))
    parser, got, at = FrameParser(1 << 20), [], 0
    while at < len(stream):
        n = data.draw(st.integers(1, len(stream) - at))
        got += parser.feed(stream[at : at + n])
        at += n
    assert [[bytes(p) for p in f.parts] for f in got] == frames
    assert [(f.kind, f.dest, f.origin, f.key, f.rank, f.reply, f.sender) for f in got] == [
        (CALL, i, 2, 3, 4, 5, 6) for i in range(len(frames))
    ]


def test_a_large_frame_is_received_straight_into_its_memory():
    frame = Frame(CALL, 1, 2, 3, (b"meta", bytes(range(256)) * 4096))
    stream = encode(frame)
    parser = FrameParser(1 << 30)
    assert list(parser.feed(stream[:1000])) == []
    at = 1000
    while True:
        room = parser.want()
        n = min(len(room), 50_000)
        room[:n] = stream[at : at + n]
        at += n
        got = parser.received_into(n)
        if got is not None:
            break
    assert bytes(got.parts[1]) == frame.parts[1]
    assert parser.want() is None


def test_an_oversize_frame_is_refused_before_memory_is_taken():
    head = Frame(CALL, 1, 2, 3, (b"", b"x" * 2000)).head()
    with pytest.raises(FrameError, match=r"rejecting oversize frame: len=2000 > max=1000"):
        list(FrameParser(1000).feed(head))


@given(st.binary(max_size=400))
@settings(deadline=None, max_examples=300)
def test_random_bytes_give_a_clean_error_or_nothing(noise):
    parser = FrameParser(1 << 16)
    try:
        assert len(list(parser.feed(noise))) == 0
    except FrameError:
        return
    assert len(noise) < HEADER_SIZE or parser.want() is not None


@given(parts, st.integers(0, 200))
@settings(deadline=None)
def test_a_truncated_frame_is_never_delivered(body, cut):
    stream = encode(Frame(CALL, 1, 2, 3, body))
    assert list(FrameParser(1 << 20).feed(stream[: max(0, len(stream) - 1 - cut)])) == []
