"""Refusals on the client, and errors of workers: where they surface and what they say."""

import pytest
import torch

import monarch
from monarch.mesh_controller import RemoteException


def failing(x):
    """A tensor that is an error on every worker."""
    return x[torch.tensor([100])]


@pytest.mark.parametrize("form", ["operator", "reflected", "method", "inplace", "compare"])
def test_local_tensors_are_refused_with_an_explanation(pair, form):
    local = torch.ones(3)
    with pair.activate():
        x = torch.ones(3)

        def issue():
            if form == "operator":
                return x + local
            if form == "reflected":
                return local * x
            if form == "method":
                return x.add(local)
            if form == "inplace":
                x.__iadd__(local)
                return None
            return x == local

        with pytest.raises(TypeError) as e:
            issue()
    text = str(e.value)
    assert text.startswith("Incorrect arguments to monarch operation:")
    for part in ("ERROR_0", "LOCAL_TENSOR", "active_mesh = ", "active_stream = ", "no_mesh.activate"):
        assert part in text


def test_tensors_of_other_meshes_are_refused(pair):
    whole = pair._tensors("test")
    with whole.activate():
        a = torch.ones(2)
        with whole.slice(gpus=0).activate():
            b = torch.ones(2)
            same = torch.ones(2)
        with whole.slice(gpus=0).activate():
            same = same + b
        with pytest.raises(TypeError, match=r"(?s)aten.mul.Tensor\(., ERROR_0\).*WRONG_MESH.*to_mesh"):
            a * b
        assert monarch.inspect(same).tolist() == [2, 2]


def test_a_local_item_may_be_read_inside_a_mesh(pair):
    local = torch.tensor(4.0)
    with pair.activate():
        assert local.item() == 4


def test_an_error_names_both_places_and_is_told_each_time(pair):
    with pair.activate():
        x = torch.ones(4)
        bad = failing(x)
        worse = (bad * 2).sum()
        good = x + 1
        for _ in range(2):
            with pytest.raises(RemoteException) as e:
                monarch.inspect(worse)
            text = str(e.value)
            assert "A remote function has failed asynchronously on rank 0" in text
            assert "Traceback of where the remote function was issued on controller" in text
            assert "return x[torch.tensor([100])]" in text and "test_an_error_names" in text
            assert "Error as reported from worker" in text and "IndexError" in e.value.worker_error_string
            assert any(f.name == "failing" for f in e.value.controller_frames)
        assert monarch.inspect(good).tolist() == [2, 2, 2, 2]


def test_a_failing_write_poisons_every_alias(pair):
    with pair.activate():
        base = torch.zeros(4)
        view = base[:2]
        other = torch.zeros(4)
        view.add_(failing(other)[0])
        with pytest.raises(RemoteException):
            monarch.inspect(base)
        with pytest.raises(RemoteException):
            monarch.inspect(view)
        assert monarch.inspect(other).tolist() == [0] * 4


def test_a_failure_on_one_rank_fails_the_whole_tensor(pair):
    with pair.activate():
        x = torch.arange(2)[pair.rank_tensor("gpus").reshape(1) * 5]
        with pytest.raises(RemoteException) as e:
            monarch.inspect(x, gpus=0)
        assert e.value.rank == 1


def test_running_out_of_memory_is_an_ordinary_error(pair):
    with pair.activate():
        huge = torch.empty(1 << 50, dtype=torch.int8)
        with pytest.raises(RemoteException, match="memory"):
            monarch.inspect(huge)
        assert monarch.inspect(torch.ones(1)).item() == 1


def test_coordinates_of_fetches(square):
    with square.activate():
        h, g = square.rank_tensor("host"), square.rank_tensor("gpu")
        for i in range(2):
            for j in range(2):
                shard = {"host": i}
                got = monarch.fetch_shard((h, [g], "x"), shard, gpu=j).get(timeout=30)
                assert shard == {"host": i}
                assert (got[0].item(), got[1][0].item(), got[2]) == (i, j, "x")
        assert monarch.inspect(h).item() == 0
        with pytest.raises(ValueError, match="Missing key"):
            monarch.fetch_shard(h, host=0)
        with pytest.raises(KeyError):
            monarch.fetch_shard(h, host=0, gpu=0, rack=1)
        for at in (2, -1):
            with pytest.raises(IndexError):
                monarch.fetch_shard(h, host=0, gpu=at)
        assert monarch.fetch_shard(None).get(timeout=30) is None
    with pytest.raises(ValueError):
        monarch.fetch_shard(None)
    row = square._tensors("t").slice(host=1)
    with row.activate():
        x = row.rank("gpu") + 5
    assert monarch.inspect(x, gpu=1).item() == 6
    with pytest.raises(TypeError, match="does not have dimension labeled"):
        row.slice(host=0)
    with pytest.raises(IndexError):
        row.slice(gpu=2)


def test_rank_needs_an_active_mesh(square):
    mesh = square._tensors("t")
    with pytest.raises(TypeError, match="active"):
        mesh.rank("host")
    with mesh.slice(host=1).activate():
        with pytest.raises(KeyError):
            mesh.rank("rack")
        x = mesh.rank("host")
        i = mesh.process_idx()
    assert monarch.inspect((x, i), gpu=1) == (torch.tensor(1), torch.tensor(3))


def test_exit_reports_what_nobody_saw_and_ends_the_engine(procs):
    from monarch.mesh_controller import spawn_tensor_engine

    p = procs(1)
    first = spawn_tensor_engine(p)
    second = spawn_tensor_engine(p)
    with first.activate():
        failing(torch.ones(2))
    with second.activate():
        x = torch.ones(2)
        bad = failing(x)
        with pytest.raises(RemoteException):
            monarch.inspect(bad)
    with pytest.raises(RemoteException, match="IndexError"):
        first.exit()
    first.exit()
    second.exit()
    with pytest.raises(RuntimeError, match="exit"):
        with second.activate():
            pass
    with pytest.raises(RuntimeError, match="exit"):
        x + 1
