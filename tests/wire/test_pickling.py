import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.wire import pickling


def copy(x):
    payload = pickling.dumps(x)
    return pickling.loads(payload.stream(), [bytearray(b) for b in payload.buffers])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.tuples(st.lists(values).map(tuple), st.dictionaries(st.text(), values)))
@settings(deadline=None)
def test_plain_values_come_back_equal(call):
    assert copy(call) == call


def test_lambdas_and_closures_travel_by_value():
    k = 10
    assert copy(lambda x: x + k)(1) == 11

    class Local:
        def f(self):
            return k

    assert copy(Local)().f() == 10


def test_importable_code_travels_by_name():
    payload = pickling.dumps(threading.Thread)
    assert len(payload.stream()) < 100
    assert copy(threading.Thread) is threading.Thread


def test_arrays_leave_the_stream_and_arrive_writable():
    a = np.arange(100_000.0)
    payload = pickling.dumps(((a,), {}))
    assert len(payload.stream()) < 1000 and payload.buffers[0].nbytes == a.nbytes
    b = copy(((a,), {}))[0][0]
    b[0] = 7
    assert (b[1:] == a[1:]).all() and a[0] == 0


def test_large_bytes_are_not_copied_into_the_stream():
    blob = bytes(1 << 20)
    assert any(chunk is blob for chunk in pickling.dumps(((blob,), {})).chunks)
    huge = bytes(16 << 20)
    payload = pickling.dumps(((huge,), {}))
    assert len(payload.stream()) < 1000 and payload.buffers[0].nbytes == len(huge)


@pytest.mark.parametrize("size", [0, 100, 1 << 20, (8 << 20) + 3, 64 << 20])
def test_bytes_of_any_size_come_back_equal(size):
    blob = bytes(range(256)) * (size // 256) + bytes(size % 256)
    args, kwargs = copy(((blob, (blob,)), {"k": blob}))
    for back in (args[0], args[1][0], kwargs["k"], copy(blob)):
        assert type(back) is bytes and back == blob


def test_what_refuses_is_named_by_its_path():
    class Holder:
        def __init__(self):
            self.inner = {"deep": [threading.Lock()]}

    assert pickling.explain_failure(Holder(), "argument 0") == "argument 0.inner['deep'][0]"


torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4),
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(3),
        lambda: torch.randn(5, dtype=torch.bfloat16),
        lambda: torch.arange(10)[::2],
        lambda: torch.tensor([True, False]),
    ],
)
def test_tensors_keep_value_dtype_and_shape(make):
    t = make()
    back = copy(t)
    assert back.dtype == t.dtype and back.shape == t.shape and torch.equal(back, t)


def test_a_view_ships_only_the_bytes_it_shows():
    big = torch.zeros(1_000_000)
    assert pickling.dumps(big[:10]).nbytes < 2000


def test_sharing_inside_one_message_is_kept():
    t = torch.zeros(1000)
    a, b = copy((t, t[10:20]))
    a[12] = 5
    assert b[2] == 5


def test_parameters_modules_and_requires_grad_survive():
    p = copy(torch.nn.Parameter(torch.ones(3), requires_grad=False))
    assert isinstance(p, torch.nn.Parameter) and not p.requires_grad
    assert copy(torch.ones(2, requires_grad=True)).requires_grad
    layer = torch.nn.Linear(3, 2)
    assert torch.equal(copy(layer)(torch.ones(3)), layer(torch.ones(3)))


def test_a_result_of_autograd_arrives_as_a_leaf():
    back = copy(torch.ones(2, requires_grad=True) * 2)
    assert back.is_leaf and back.requires_grad and back.tolist() == [2, 2]
