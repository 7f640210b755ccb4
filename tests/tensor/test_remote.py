"""Remote functions: adverbs, propagation, aliasing, errors, arguments that have a counterpart on workers."""

import pytest
import torch
import torch.distributed as dist

import monarch
from monarch import call_on_shard_and_fetch, fetch_shard, inspect, remote
from monarch.actor import Channel, send
from monarch.tensor import RemoteException


@remote(propagate=lambda x, y: torch.empty_like(x))
def add(x, y):
    return x + y


@remote
def split_up(x):
    return list(x.chunk(4))


@remote(propagate="inspect")
def nothing(x):
    x + 1


@remote
def counted(x, by):
    x.add_(by)
    return x


@remote(propagate=lambda m: torch.empty(2, dtype=torch.int64))
def where(m):
    return torch.tensor([m.dims["gpus"].rank, m.dims["gpus"].size])


@remote
def ranks(a, b=None):
    return int(a), b


@remote
def raising(x):
    return inner_that_raises(x)


def inner_that_raises(x):
    raise ZeroDivisionError("worker side")


def test_a_propagated_result_is_a_distributed_tensor(pair):
    with pair.activate():
        r = pair.rank_tensor("gpus")
        t = add(torch.ones(2, 2), r)
    assert t.shape == (2, 2)
    assert [inspect(t, gpus=i).tolist() for i in range(2)] == [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]


def test_cached_propagation_keeps_aliases_and_blocks_once(pair):
    from monarch.tensor import remotes as module

    with pair.activate():
        x = torch.zeros(16, 5)
        before = module._miss
        parts = split_up(x)
        split_up(torch.zeros(16, 5))
        assert module._miss == before + 1
        assert len(parts) == 4 and len(x._aliases.aliases) == 5
        assert parts[2]._fake.storage_offset() == 40
        x.add_(1)
        parts[3].add_(1)
    assert inspect(parts[2]).tolist() == [[1] * 5] * 4
    assert inspect(x)[-1].tolist() == [2] * 5


def test_cached_propagation_sees_mutation_and_returned_arguments(pair):
    with pair.activate():
        x = torch.zeros(2)
        y = counted(x, 1)  # runs once more on the first worker
        z = counted(x, 1)
    assert inspect(x, gpus=1).tolist() == [2, 2]
    assert inspect(y, gpus=1).tolist() == inspect(z, gpus=1).tolist() == [2, 2]
    assert inspect(x, gpus=0).tolist() == [3, 3]


def test_call_collects_python_values(square):
    with square.activate():
        t = square.rank_tensors()
        got = ranks.call(10 * t["host"] + t["gpu"], b="x").get()
    assert [(p["host"], p["gpu"], v) for p, v in got] == [(h, g, (10 * h + g, "x")) for h in range(2) for g in range(2)]
    with square.slice(host=1).activate():
        assert [v[0] for _, v in ranks.call(10 * t["host"] + t["gpu"]).get()] == [10, 11]
        assert ranks.choose(t["host"]).get()[0] == 1
        assert sorted(f.get()[0] for f in ranks.stream(t["gpu"])) == [0, 1]
        with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 2"):
            ranks.call_one(t["gpu"])
    with square.slice(host=1, gpu=1).activate():
        assert ranks.call_one(t["gpu"]).get() == (1, None)


def test_a_port_takes_the_values(pair):
    port, receiver = Channel.open()
    with pair.activate():
        send(ranks, args=(pair.rank_tensor("gpus"),), kwargs={}, port=port)
    assert sorted(receiver.recv().get(timeout=30)[0] for _ in range(2)) == [0, 1]


def test_broadcast_is_fire_and_forget(pair):
    with pair.activate():
        x = torch.zeros(2)
        remote(lambda t: t.add_(3), propagate=lambda t: t.add_(3)).broadcast(x)
    assert inspect(x, gpus=1).tolist() == [3, 3]


def test_calls_need_a_mesh_that_is_part_of_the_tensors(pair):
    with pair.slice(gpus=0).activate():
        x = torch.zeros(2)
    with pytest.raises(ValueError, match="requires an active proc_mesh"):
        ranks.call(x)
    with pytest.raises(TypeError, match="Remote functions require an active device mesh"):
        add(1, 2)
    with pair.activate():
        with pytest.raises(ValueError, match="is not a subset"):
            ranks.call(x)
        local = inspect(x)
        with pytest.raises(TypeError, match="LOCAL_TENSOR"):
            ranks.call(local)


def test_one_shard_is_computed_and_fetched(pair):
    with pair.activate():
        x = pair.rank_tensor("gpus") + 5.0
        y = x.reshape(1)
        got = call_on_shard_and_fetch(counted, y, 1, shard={"gpus": 1}).get()
    assert got.tolist() == [7]
    assert [inspect(x, gpus=i).item() for i in range(2)] == [5, 7]


def test_errors_of_remote_functions_show_both_sides(pair):
    with pair.activate():
        x = torch.zeros(2)
        with pytest.raises(RemoteException) as cached:
            raising(x)
        t = remote(inner_that_raises, propagate=lambda x: x.clone())(x)
        u = t + 1
        with pytest.raises(RemoteException) as error:
            fetch_shard(u).get()
        with pytest.raises(RemoteException, match="ZeroDivisionError"):
            raising.call(x).get()
    for text in (str(cached.value), str(error.value)):
        assert "A remote function has failed asynchronously on rank" in text
        assert "ZeroDivisionError: worker side" in text and "inner_that_raises" in text
        assert 'raise ZeroDivisionError("worker side")' in text
        assert "test_errors_of_remote_functions_show_both_sides" in text
    assert inspect(x).tolist() == [0, 0]


def test_a_wrong_number_of_results_is_an_error(pair):
    with pair.activate():
        t = remote(lambda: (torch.ones(1), torch.ones(1)), propagate=lambda: torch.empty(1))()
    with pytest.raises(RemoteException, match="unexpected number of returns from op, expected 1, got 2"):
        inspect(t)


def test_an_unresolvable_path_is_an_error_at_the_fetch(pair):
    with pair.activate():
        t = remote("no_such_module.at_all", propagate=lambda: torch.empty(1))()
    with pytest.raises(RemoteException, match="no_such_module"):
        inspect(t)
    with pytest.raises(ValueError, match="unsupported target"):
        remote("nodots")


def test_paths_operators_and_propagation_modes(pair):
    with pair.activate():
        x = torch.full((2,), 4.0)
        assert nothing(x) is None
        assert inspect(remote("torch.sqrt", propagate=lambda t: t.clone())(x)).tolist() == [2, 2]
        assert inspect(remote(torch.ops.aten.neg.default)(x)).tolist() == [-4, -4]
        with pytest.raises(NotImplementedError):
            remote(lambda: None, propagate="mocked")()
        with pytest.raises(TypeError, match="hashed"):
            remote(lambda d: None)({1, 2})
    with pytest.raises(ValueError, match="propagate="):
        remote(lambda: None, propagate="other")


def test_meshes_arrive_as_coordinates(pair):
    with pair.activate():
        mesh = monarch.get_active_mesh()
        t = where(mesh)
    assert [inspect(t, gpus=i).tolist() for i in range(2)] == [[0, 2], [1, 2]]


def test_returning_an_exception_is_a_value(pair):
    with pair.activate():
        got = remote(lambda: ValueError("fine")).call().get()
    assert all(isinstance(v, ValueError) for _, v in got)


def test_process_groups_are_arguments(square):
    def both(g, t):
        dist.all_reduce(t, group=g)
        assert dist.get_world_size(g) == 2
        if g.rank() == 0:
            dist.isend(t, group=g, group_dst=1).wait()
        else:
            dist.irecv(torch.empty_like(t), group=g, group_src=0).wait()
        dist.barrier(group=g)
        return t

    with square.activate():
        mesh = monarch.get_active_mesh()
        group = mesh.process_group("gpu")
        assert group.size() == 2 and group.dims == ("gpu",) and not group.dropped
        t = (1 + mesh.rank("gpu") + 10 * mesh.rank("host")).reshape(1)
        out = remote(both, propagate=lambda g, t: t.add_(1))(group, t)
    assert inspect(out, host=1, gpu=0).item() == 23
    group.drop()
    with square.activate(), pytest.raises(TypeError, match="DROPPED"):
        remote(both, propagate=lambda g, t: t)(group, t)


def test_pickling_elsewhere_is_refused(pair):
    import pickle

    with pair.activate():
        t = torch.zeros(1)
    with pytest.raises(TypeError, match="not allowed in the current pickling context"):
        pickle.dumps(t)
