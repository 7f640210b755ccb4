import os

import numpy as np
import pytest

from monarch.wire.segments import AVAILABLE, MappedSegments, SegmentPool

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="no anonymous memory files here")
MB = 1 << 20


@pytest.fixture
def pool():
    made = SegmentPool(4 * MB)
    yield made
    made.close()


def fds():
    return len(os.listdir("/proc/self/fd"))


def test_a_returned_segment_is_used_again(pool):
    first = pool.pack([bytes(MB)], [5])
    before = fds()
    for _ in range(20):
        mapped, back = MappedSegments(), []
        mapped.open(first, back.append)
        pool.give_back(back[0], 5)
        assert pool.pack([bytes(MB)], [5])[:20] == first[:20]
    del mapped
    assert fds() <= before


def test_the_limit_bounds_all_segments_together(pool):
    tickets = [pool.pack([bytes(MB)], [5]) for _ in range(6)]
    assert [t is not None for t in tickets] == [True] * 4 + [False] * 2


def test_free_segments_make_room_for_other_sizes(pool):
    for _ in range(4):
        pool.pack([bytes(MB)], [5])
    pool.borrower_gone(5)
    assert pool.pack([bytes(4 * MB)], [5]) is not None


def test_a_segment_stays_lent_until_its_last_borrower_returns_it(pool):
    pool.pack([b"x"], [5, 6, 6])
    pool.borrower_gone(6)
    assert pool.in_use() == 1
    pool.borrower_gone(7)  # never borrowed anything
    assert pool.in_use() == 1
    pool.borrower_gone(5)
    assert pool.in_use() == 0


def test_a_stranger_cannot_return_a_segment(pool):
    pool.pack([b"x"], [5])
    pool.give_back(1, 99)
    pool.give_back(12345, 5)
    assert pool.in_use() == 1


def test_an_array_on_a_segment_keeps_it_until_the_array_is_gone(pool):
    data = np.arange(100_000.0)
    mapped, back = MappedSegments(), []
    views = mapped.open(pool.pack([data], [5]), back.append)
    array = np.frombuffer(views[0])
    del views
    assert back == [] and (array == data).all()
    mapped.forget_process(os.getpid())
    assert (array == data).all()
    del array
    assert len(back) == 1


def test_parts_of_any_size_come_back_equal(pool):
    parts = [b"", b"a", bytes(range(256)) * 300, bytearray(b"zz")]
    views = MappedSegments().open(pool.pack(parts, [5]), lambda ident: None)
    assert [bytes(v) for v in views] == [bytes(p) for p in parts]


def test_closing_the_pool_closes_its_descriptors():
    before = fds()
    made = SegmentPool(4 * MB)
    made.pack([bytes(MB)], [5])
    made.pack([bytes(MB)], [6])
    made.borrower_gone(6)
    made.close()
    assert fds() == before


def test_segments_have_no_name_on_disk(pool):
    before = set(os.listdir("/dev/shm"))
    pool.pack([bytes(MB)], [5])
    assert set(os.listdir("/dev/shm")) == before
