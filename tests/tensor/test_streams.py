"""Streams and borrows: order, rights, errors."""

import gc

import pytest
import torch

import monarch
from monarch.mesh_controller import RemoteException


@pytest.fixture
def active(pair):
    with pair.activate() as mesh:
        yield mesh


def test_names_and_nesting():
    s = monarch.Stream("x")
    assert str(s) == "stream 'x'" and repr(s).startswith("<Stream('x') at ")
    assert monarch.get_active_stream().name == "main"
    with s.activate():
        with monarch.Stream("y").activate():
            assert monarch.get_active_stream().name == "y"
        assert monarch.get_active_stream() is s
    assert monarch.get_active_stream().name == "main"


def test_operands_must_be_on_the_active_stream(active):
    s = monarch.Stream("s")
    x = torch.ones(2)
    with s.activate():
        y = torch.ones(2)
        for use in (lambda: x + 1, lambda: y + x, lambda: monarch.fetch_shard(x)):
            with pytest.raises(TypeError, match="WRONG_STREAM"):
                use()
        assert monarch.inspect(y).tolist() == [1, 1]


def test_an_immutable_borrow_is_read_by_both_and_written_by_none(active):
    s = monarch.Stream("s")
    x = torch.ones(2)
    b, borrow = s.borrow(x)
    other, second = s.borrow(x)
    with s.activate():
        y = b + 1
        with pytest.raises(TypeError, match=r"(?s)MUTATING_BORROW.*would be mutated.*test_streams"):
            b.add_(1)
        assert monarch.inspect(y).tolist() == [2, 2]
    with pytest.raises(TypeError, match="MUTATING_BORROW"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="Cannot borrow this tensor mutably"):
        s.borrow(x, mutable=True)
    x + 1
    borrow.drop()
    borrow.drop()
    with pytest.raises(TypeError, match="MUTATING_BORROW"):
        x.add_(1)
    second.drop()
    x.add_(1)
    with s.activate(), pytest.raises(TypeError, match=r"(?s)DROPPED.*borrow.drop\(\)"):
        b + 1
    assert other.dropped
    assert monarch.inspect(x).tolist() == [2, 2]


def test_a_mutable_borrow_takes_all_rights(active):
    s = monarch.Stream("s")
    x = torch.zeros(2)
    alias = x.view(1, 2)
    b, borrow = s.borrow(x, mutable=True)
    with borrow:
        for use in (lambda: x + 1, lambda: alias + 1, lambda: x.add_(1)):
            with pytest.raises(TypeError, match="BORROWED"):
                use()
        for mutable in (True, False):
            with pytest.raises(RuntimeError, match="Cannot borrow"):
                s.borrow(x, mutable=mutable)
        with s.activate():
            for _ in range(50):
                b.add_(1)
    assert monarch.inspect(alias).tolist() == [[50, 50]]


def test_streams_are_concurrent_and_borrows_order_them(active):
    """Work on one stream waits for the other only where a borrow says so."""
    s = monarch.Stream("s")
    total = torch.zeros(())
    for step in range(20):
        slow = torch.rand(300, 300) @ torch.rand(300, 300)
        x = torch.full((), float(step)) + 0 * slow.sum()
        b, borrow = s.borrow(x, mutable=True)
        with s.activate():
            b.mul_(2)
        borrow.drop()
        total = total + x
    assert monarch.inspect(total).item() == 380


def test_reduction_on_a_second_stream_by_mutable_borrow(active):
    comms = monarch.Stream("comms")
    grads = [active.rank("gpus") + torch.full((1000,), float(i)) for i in range(8)]
    borrows = []
    for g in grads:
        b, borrow = comms.borrow(g, mutable=True)
        with comms.activate():
            b.reduce_("gpus", "avg")
        borrows.append(borrow)
    busy = torch.ones(10) * 2
    for borrow in borrows:
        borrow.drop()
    assert monarch.inspect(busy).tolist() == [2] * 10
    assert [monarch.inspect(g, gpus=1).tolist()[0] for g in grads] == [i + 0.5 for i in range(8)]


def test_forgetting_a_borrow_warns_and_ends_it(active):
    s = monarch.Stream("s")
    x = torch.ones(2)
    b, borrow = s.borrow(x, mutable=True)
    with pytest.warns(UserWarning, match=r"(?s)without drop.*s.borrow\(x, mutable=True\)"):
        del borrow
        gc.collect()
    assert b.dropped
    assert monarch.inspect(x.add_(1)).tolist() == [2, 2]


def test_errors_travel_through_borrows(active):
    s = monarch.Stream("s")
    bad = torch.ones(2)[torch.tensor([9])]
    b, borrow = s.borrow(bad)
    with s.activate():
        y = b + 1
        with pytest.raises(RemoteException, match="IndexError"):
            monarch.inspect(y)
    borrow.drop()
    x = torch.ones(2)
    alias = x.view(2, 1)
    b, borrow = s.borrow(x, mutable=True)
    with s.activate():
        b.add_(torch.ones(3)[torch.tensor([9])])
    borrow.drop()
    with pytest.raises(RemoteException, match="IndexError"):
        monarch.inspect(alias)


def test_borrowing_onto_the_same_stream_and_dropped_tensors(active):
    x = torch.ones(2)
    with x.stream.borrow(x)[1]:
        pass
    b, borrow = x.stream.borrow(x)
    with borrow:
        assert monarch.inspect(b + x).tolist() == [2, 2]
    x.drop()
    with pytest.raises(TypeError, match="DROPPED"):
        x.stream.borrow(x)
    with pytest.raises(TypeError):
        monarch.Stream("s").borrow(3)


def test_the_owner_keeps_its_value_while_lent(active):
    s = monarch.Stream("s")
    x = torch.full((3,), 4.0)
    b, borrow = s.borrow(x)
    del x
    gc.collect()
    torch.ones(1)
    with s.activate():
        assert monarch.inspect(b * 2).tolist() == [8, 8, 8]
    borrow.drop()
