"""Versions that travel whole: publishers, subscribers, push and broadcast."""

import pickle

import pytest
import torch
from actors_of_weights import (
    AsyncGenerator,
    AsyncTrainer,
    Generator,
    Late,
    Trainer,
    fill,
    model,
    publisher_of,
    values,
)

from conftest import ask
from monarch.actor import ActorError, Channel
from monarch.config import configured
from monarch.weights import LayoutMismatch, WeightLayout, WeightPublisher, WeightsLapped, WeightSubscriber

WAIT = 60


class TestLayout:
    def test_offsets_are_aligned_and_tied_parameters_are_stored_once(self):
        m = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(3, 5)})
        m["b"].weight = m["a"].weight
        layout = WeightLayout.from_module(m)
        at = {e.name: e.offset for e in layout.entries}
        assert at["a.weight"] == at["b.weight"] and at["a.bias"] != at["b.bias"]
        assert all(offset % 64 == 0 for offset in at.values())
        assert layout.nbytes == 128 + 20

    def test_layouts_compare_hash_and_travel(self):
        a, b = WeightLayout.from_module(model(2, 8)), WeightLayout.from_module(model(2, 8))
        other = WeightLayout.from_module(model(2, 9))
        assert a == b and hash(a) == hash(b) and a != other
        assert pickle.loads(pickle.dumps(a)) == a and a.fingerprint != other.fingerprint

    def test_buffers_are_part_of_it_unless_left_out(self):
        m = torch.nn.BatchNorm1d(4)
        assert "running_mean" in {e.name for e in WeightLayout.from_module(m).entries}
        assert {e.name for e in WeightLayout.from_module(m, buffers=False).entries} == {"weight", "bias"}

    @pytest.mark.parametrize("align", [0, 3, -64])
    def test_a_bad_align_is_refused(self, align):
        with pytest.raises(ValueError, match="align must be a power of two"):
            WeightLayout.from_module(model(1, 4), align=align)

    def test_a_sparse_tensor_is_refused_by_name(self):
        with pytest.raises(ValueError, match="'w' has layout torch.sparse_coo"):
            WeightLayout.from_module({"w": torch.zeros(3, 3).to_sparse()})

    def test_what_is_no_model_is_refused(self):
        with pytest.raises(TypeError, match=r"expected a torch.nn.Module or a dict of tensors, got list"):
            WeightLayout.from_module([1])
        with pytest.raises(TypeError, match=r"weights\['x'\] is int"):
            WeightLayout.from_module({"x": 1})

    @pytest.mark.parametrize(
        ("theirs", "says"),
        [
            ({"a": torch.zeros(2)}, "'b' is published, and the target has no such tensor"),
            ({"a": torch.zeros(3), "b": torch.zeros(1)}, r"'a' has shape \(2,\) where it is published, \(3,\)"),
            ({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)}, "the target has 'c', which is not"),
            ({"a": torch.zeros(2, dtype=torch.int32), "b": torch.zeros(1)}, "'a' is published as float32, the target"),
        ],
    )
    def test_a_mismatch_names_the_first_entry_that_differs(self, theirs, says):
        p = WeightPublisher({"a": torch.zeros(2), "b": torch.zeros(1)})
        try:
            with pytest.raises(LayoutMismatch, match=says):
                WeightSubscriber(p.handle(), theirs)
        finally:
            p.close()


class TestInOneProcess:
    """The same promises where both sides are one process."""

    @pytest.fixture(autouse=True)
    def clean(self, nothing_left):
        pass

    def test_the_constructor_publishes_and_each_publish_is_one_more(self):
        p, m = publisher_of(3.0, start_version=7)
        target = model(2, 8)
        s = WeightSubscriber(p.handle(), target)
        assert (p.version, s.version) == (7, -1)
        assert s.sync() == 7 and values(target) == [3.0]
        assert s.sync() is None
        fill(m, 4.0)
        assert p.publish() == 8 and values(target) == [3.0]
        assert s.sync() == 8 and values(target) == [4.0]
        assert s.stats()["skipped"] == 1 and s.stats()["syncs"] == 2 and s.stats()["path"] == "local"
        p.close()

    def test_a_handle_is_small_and_the_layout_goes_once(self):
        p, _ = publisher_of()
        assert len(pickle.dumps(p.handle(layout=False))) < 1024
        with pytest.raises(ValueError, match=r"use handle\(layout=True\)"):
            WeightSubscriber(p.handle(layout=False), model(2, 8))
        p.close()

    def test_dtype_conversion_and_autograd_state(self):
        m = torch.nn.Linear(4, 4)
        m.bias.requires_grad_(False)
        p = WeightPublisher(m, dtype=torch.bfloat16)
        target = torch.nn.Linear(4, 4)
        target.bias.requires_grad_(False)
        out = target(torch.ones(4)).sum()
        s = WeightSubscriber(p.handle(), target)
        assert s.sync() == 0
        assert p.layout.nbytes < 64 + 16
        assert target.weight.dtype == torch.float32 and torch.equal(target.weight, m.weight.bfloat16().float())
        assert target.weight.requires_grad and not target.bias.requires_grad
        assert target.weight.grad_fn is None
        out.backward()  # a graph made before the sync is still good
        p.close()

    def test_integers_and_empty_tensors_and_tied_targets(self):
        w = torch.randn(3, 3)
        p = WeightPublisher({"w": w, "tied": w, "n": torch.arange(5), "none": torch.zeros(0, 4)})
        mine = torch.zeros(3, 3)
        target = {"w": mine, "tied": mine, "n": torch.zeros(5, dtype=torch.int64), "none": torch.zeros(0, 4)}
        assert WeightSubscriber(p.handle(), target).sync() == 0
        assert torch.equal(mine, w) and target["n"].tolist() == list(range(5))
        p.close()

    def test_an_integer_is_not_put_into_a_float(self):
        p = WeightPublisher({"n": torch.arange(5)})
        with pytest.raises(LayoutMismatch, match="'n' is published as int64, the target has torch.float32"):
            WeightSubscriber(p.handle(), {"n": torch.zeros(5)})
        p.close()

    def test_checksums(self):
        p, _ = publisher_of(2.0, checksum=True)
        target = model(2, 8)
        s = WeightSubscriber(p.handle(), target, retries=2)
        assert s.sync() == 0 and values(target) == [2.0]
        p.publish()
        p.current_slot()[0][0] ^= 1  # memory that changed behind our back
        with pytest.raises(WeightsLapped) as e:
            s.sync()
        assert e.value.versions == (1, 1, 1)
        assert values(target) == [2.0]
        p.close()

    def test_a_source_whose_shapes_changed_is_named(self):
        weights = {"a": torch.zeros(2)}
        p = WeightPublisher(weights)
        weights["a"] = torch.zeros(3)
        with pytest.raises(LayoutMismatch, match=r"'a' has shape \(2,\) where it is published, \(3,\)"):
            p.publish()
        weights["a"] = torch.ones(2)
        assert p.publish() == 1  # and can go on
        p.close()

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"slots": 1}, "slots must be between 2 and 32, got 1"),
            ({"slots": 33}, "slots must be between 2 and 32, got 33"),
            ({"staging": "disk"}, "staging must be one of 'auto', 'cpu', 'pinned'; got 'disk'"),
            ({"on_lap": "wait"}, "on_lap must be one of 'detect', 'lease'; got 'wait'"),
            ({"lease_policy": "x"}, "lease_policy must be one of 'wait', 'grow'; got 'x'"),
            ({"start_version": -1}, "start_version must not be negative"),
        ],
    )
    def test_bad_arguments(self, options, says):
        with pytest.raises(ValueError, match=says):
            WeightPublisher(model(1, 4), **options)

    def test_a_closed_publisher(self):
        p, _ = publisher_of()
        s = WeightSubscriber(p.handle(), model(2, 8))
        p.close()
        p.close()
        with pytest.raises(RuntimeError, match="this WeightPublisher was closed"):
            p.publish()
        from monarch.rdma import RDMABufferDroppedError

        with pytest.raises(RDMABufferDroppedError):
            s.sync()

    def test_a_version_that_does_not_come(self):
        p, _ = publisher_of()
        s = WeightSubscriber(p.handle(), model(2, 8))
        with pytest.raises(TimeoutError, match=r"version 5 was not published in 0.05 s: it is 0"):
            s.sync(min_version=5, timeout=0.05)
        assert s.sync() == 0
        p.close()

    def test_watch_needs_an_actor(self):
        p, _ = publisher_of()
        with pytest.raises(ValueError, match="watch needs a WeightSubscriber made with an actor"):
            WeightSubscriber(p.handle(), model(2, 8)).watch(print)
        p.close()


class TestBetweenProcesses:
    @pytest.fixture
    def trio(self, procs):
        mesh = procs(3)
        return mesh.slice(gpus=0).spawn("trainer", Trainer), mesh.slice(gpus=slice(1, 3)).spawn("gen", Generator)

    def test_generators_take_versions_when_they_want(self, trio):
        trainer, generators = trio
        generators.subscribe.call(trainer).get(timeout=WAIT)
        assert [r for _, r in generators.sync.call().get(timeout=WAIT).items()] == [(0, [0.0])] * 2
        ask(trainer.step, 3)
        assert ask(generators.slice(gpus=0).sync) == (3, [3.0])
        assert ask(generators.slice(gpus=0).sync) == (None, [3.0])
        assert ask(generators.slice(gpus=1).sync) == (3, [3.0])
        assert ask(generators.slice(gpus=1).stats)["path"] == "vm"

    def test_waiting_for_a_version(self, trio):
        trainer, generators = trio
        generators.subscribe.call(trainer).get(timeout=WAIT)
        waiting = generators.sync.call(4)
        ask(trainer.step, 4)
        assert {r for r in (v for v, _ in waiting.get(timeout=WAIT).values())} == {4}

    def test_from_a_handle(self, trio):
        trainer, generators = trio
        handle = ask(trainer.weight_handle)
        generators.subscribe.call(handle).get(timeout=WAIT)
        assert ask(generators.slice(gpus=1).sync) == (0, [0.0])

    def test_watch(self, trio):
        trainer, generators = trio
        one = generators.slice(gpus=0)
        ask(one.subscribe, trainer)
        port, receiver = Channel[int].open()
        ask(one.watch, port)
        ask(trainer.step, 3)
        assert [receiver.recv().get(timeout=WAIT) for _ in range(3)] == [1, 2, 3]
        ask(one.stop_watching)

    def test_push_writes_into_all(self, trio):
        trainer, generators = trio
        ask(trainer.step, 2)
        assert ask(trainer.push_to, generators) == 2
        assert list(generators.state.call().get(timeout=WAIT).values()) == [(2, [2.0])] * 2
        ask(trainer.step, 1)
        assert ask(trainer.push_to, [generators.slice(gpus=0), generators.slice(gpus=1)]) == 3
        assert list(generators.state.call().get(timeout=WAIT).values()) == [(3, [3.0])] * 2

    @pytest.mark.parametrize("fanout", [1, 2])
    def test_broadcast_through_a_tree(self, procs, fanout):
        mesh = procs(6)
        trainer = mesh.slice(gpus=0).spawn("trainer", Trainer)
        generators = mesh.slice(gpus=slice(1, 6)).spawn("gen", Generator)
        ask(trainer.step, 5)
        assert ask(trainer.broadcast_to, generators, fanout) == 5
        assert list(generators.state.call().get(timeout=WAIT).values()) == [(5, [5.0])] * 5

    def test_a_bad_fanout(self, trio):
        trainer, generators = trio
        with pytest.raises(ActorError, match="fanout must be at least 1, got 0"):
            ask(trainer.broadcast_to, generators, 0)

    def test_push_into_another_layout_is_refused(self, procs):
        mesh = procs(2)
        trainer = mesh.slice(gpus=0).spawn("trainer", Trainer, 4, 64)
        other = mesh.slice(gpus=1).spawn("gen", Generator, 3, 64)
        with pytest.raises(ActorError, match=r"'3.weight' is published, and the target has no such tensor"):
            ask(trainer.push_to, other)

    def test_async_actors(self, procs):
        mesh = procs(2)
        trainer = mesh.slice(gpus=0).spawn("trainer", AsyncTrainer)
        generator = mesh.slice(gpus=1).spawn("gen", AsyncGenerator)
        following = generator.follow.call_one(trainer)
        assert ask(trainer.step) == 1
        first, held, second, then = following.get(timeout=WAIT)
        assert (first, held) in [(0, [0.0]), (1, [1.0])] or second is None
        assert then == [1.0]

    def test_a_source_that_has_not_published(self, procs):
        mesh = procs(2)
        late = mesh.slice(gpus=0).spawn("late", Late)
        g = mesh.slice(gpus=1).spawn("gen", Generator)
        ask(g.subscribe, late)
        with pytest.raises(ActorError, match=r"Late has not called publish_weights\(model\) yet"):
            ask(g.sync)

    @pytest.mark.parametrize(
        ("path", "settings"),
        [("tcp", {"rdma_disable_vm_access": True}), ("message", {"rdma_allow_tcp_fallback": False})],
    )
    def test_every_path_brings_the_same(self, nothing_left, path, settings):
        from monarch.actor import this_host

        if path == "message":
            settings = {**settings, "rdma_disable_vm_access": True}
        with configured(**settings):
            mesh = this_host().spawn_procs({"gpus": 2})
            trainer = mesh.slice(gpus=0).spawn("trainer", Trainer)
            g = mesh.slice(gpus=1).spawn("gen", Generator)
            ask(g.subscribe, trainer)
            assert ask(g.sync) == (0, [0.0])
            ask(trainer.step, 2)
            assert ask(g.sync) == (2, [2.0])
            assert ask(g.sync) == (None, [2.0])
            assert ask(g.stats)["path"] == path
            mesh.stop().get(timeout=WAIT)
