"""Readers that are overtaken, that die, and trainers that die: what is applied is always one complete version."""

import os
import signal
import time

import pytest
from actors_of_weights import Generator, Trainer, fill, model, publisher_of, values

from conftest import ask, gone, wait_until
from monarch.actor import ActorError
from monarch.rdma import RDMAOwnerDiedError
from monarch.weights import WeightsLapped, WeightSubscriber

WAIT = 60


class TestOvertaken:
    @pytest.mark.parametrize("slots", [2, 3])
    def test_four_readers_and_thousands_of_rapid_updates(self, procs, slots):
        """Each reader checks after each sync that all values it holds are those of one version."""
        mesh = procs(5)
        trainer = mesh.slice(gpus=0).spawn("trainer", Trainer, 4, 96, slots=slots)
        readers = mesh.slice(gpus=slice(1, 5)).spawn("gen", Generator, 4, 96)
        readers.subscribe.call(trainer, retries=100_000).get(timeout=WAIT)
        running = readers.sync_up_to.call(2000)
        last = ask(trainer.step_until, 2.0, 2000)
        assert last >= 2000
        for applied, stats in running.get(timeout=WAIT).values():
            assert applied >= 1 and stats["path"] == "vm"

    def test_a_version_overtaken_while_it_is_read_is_noticed(self, nothing_left, monkeypatch):
        p, m = publisher_of(0.0, slots=2)
        target = model(2, 8)
        fill(target, -1.0)
        s = WeightSubscriber(p.handle(), target, retries=3)
        real = s._slot

        def publishes_meanwhile(i, end):
            slot = real(i, end)
            for _ in range(2):
                p.publish()
            return slot

        monkeypatch.setattr(s, "_slot", publishes_meanwhile)
        with pytest.raises(
            WeightsLapped, match=r"4 reads were overtaken by the publisher, of versions \[0, 2, 4, 6\]"
        ) as e:
            s.sync()
        assert e.value.versions == (0, 2, 4, 6) and s.stats()["retries"] == 3
        assert values(target) == [-1.0] and s.version == -1
        monkeypatch.undo()
        assert s.sync() == 8
        p.close()

    def test_a_version_still_in_its_slot_is_taken_though_newer_ones_exist(self, nothing_left, monkeypatch):
        p, m = publisher_of(0.0, slots=3)
        target = model(2, 8)
        s = WeightSubscriber(p.handle(), target)
        real = s._slot

        def publishes_meanwhile(i, end):
            slot = real(i, end)
            fill(m, 1.0)
            p.publish()
            return slot

        monkeypatch.setattr(s, "_slot", publishes_meanwhile)
        assert s.sync() == 0 and values(target) == [0.0] and s.stats()["retries"] == 0
        p.close()


class TestLeases:
    def test_a_leased_slot_is_passed_over(self, nothing_left):
        p, _ = publisher_of(0.0, slots=3, on_lap="lease")
        s = WeightSubscriber(p.handle(), model(2, 8), lease=True)
        end = time.monotonic() + 10
        s._look(end)
        held = s._head.current
        s._take_lease(held, end)
        for _ in range(5):
            p.publish()
            assert p._page.current != held
        s._give_lease_back(end)
        used = set()
        for _ in range(3):
            p.publish()
            used.add(p._page.current)
        assert held in used
        p.close()

    def test_a_leased_slot_keeps_its_version_and_grow_makes_more(self, nothing_left):
        p, m = publisher_of(0.0, slots=2, on_lap="lease", lease_policy="grow")
        target = model(2, 8)
        readers = [WeightSubscriber(p.handle(), model(2, 8), lease=True) for _ in range(3)]
        for i, r in enumerate(readers):
            r._cell = i
        end = time.monotonic() + 10
        for r in readers:
            r._look(end)
            r._take_lease(r._head.current, end)
            p.publish()
        assert p.slots > 2
        fill(m, 9.0)
        version = p.publish()
        assert WeightSubscriber(p.handle(), target, lease=True).sync() == version
        assert values(target) == [9.0]
        p.close()

    def test_the_lease_of_a_dead_reader_expires(self, procs, faults):
        mesh = procs(3)
        trainer = mesh.slice(gpus=0).spawn("trainer", Trainer, slots=2, on_lap="lease")
        reader = mesh.slice(gpus=1).spawn("reader", Generator)
        other = mesh.slice(gpus=2).spawn("other", Generator)
        ask(reader.subscribe, trainer, lease=True)
        ask(other.subscribe, trainer, lease=True)
        with pytest.raises(Exception, match=r"reader|process"):
            ask(reader.take_lease_and_stop)
        _, slowest = ask(trainer.step, 4)
        assert 1.0 < slowest < 4.0  # it waited for the lease, once
        _, slowest = ask(trainer.step, 4)
        assert slowest < 0.5
        assert ask(other.sync) == (8, [8.0])
        assert faults


class TestDeaths:
    def test_a_reader_killed_while_it_reads_disturbs_nobody(self, procs, faults):
        mesh = procs(3)
        trainer = mesh.slice(gpus=0).spawn("trainer", Trainer, 4, 512)
        victim = mesh.slice(gpus=1).spawn("victim", Generator, 4, 512)
        other = mesh.slice(gpus=2).spawn("other", Generator, 4, 512)
        for g in (victim, other):
            ask(g.subscribe, trainer)
        pid = ask(victim.read_until_killed)
        ask(trainer.step, 5)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: gone(pid))
        version, slowest = ask(trainer.step, 20)
        assert version == 25 and slowest < 2
        assert ask(other.sync) == (25, [25.0])
        wait_until(lambda: faults)

    def test_a_publisher_killed_in_the_middle_of_a_publish(self, procs, faults):
        """Readers keep the last complete version, learn of the death, and do not hang."""
        mesh = procs(2)
        trainer = mesh.slice(gpus=0).spawn("trainer", Trainer)
        g = mesh.slice(gpus=1).spawn("gen", Generator)
        handle = ask(trainer.weight_handle)
        ask(g.subscribe, handle)
        ask(trainer.step, 1)
        assert ask(g.sync) == (1, [1.0])
        with pytest.raises(Exception, match=r"trainer|process"):
            ask(trainer.begin_and_freeze)
        with pytest.raises(ActorError) as e:
            ask(g.sync)
        assert isinstance(e.value.__cause__ or e.value.exception, RDMAOwnerDiedError)
        assert ask(g.state)[1] == [1.0]
        wait_until(lambda: faults)

    def test_a_half_written_slot_is_never_taken(self, nothing_left):
        p, _ = publisher_of(3.0)
        target = model(2, 8)
        p._page.begin(p._next_slot())  # and never finished
        assert WeightSubscriber(p.handle(), target).sync() == 0
        p._page.begin(p._page.current)
        with pytest.raises(WeightsLapped):
            WeightSubscriber(p.handle(), model(2, 8), retries=3).sync()
        p.close()

    def test_a_restarted_trainer_is_found_and_nobody_steps_back(self, nothing_left):
        """A name that leads to whichever publisher lives now, as an actor that was started again does."""
        p, _ = publisher_of(5.0, start_version=5)
        source = Named(p)
        target, patient = model(2, 8), model(2, 8)
        strict = WeightSubscriber(source, target)
        lenient = WeightSubscriber(source, patient, allow_rollback=True)
        assert strict.sync() == 5 and lenient.sync() == 5
        p.close()
        source.p, m = publisher_of(2.0, start_version=2)
        assert strict.sync() is None and values(target) == [5.0]
        assert lenient.sync() == 2 and values(patient) == [2.0]
        assert lenient.sync() is None  # taken back once, not at each sync
        for _ in range(4):
            fill(m, 6.0)
            source.p.publish()
        assert strict.sync() == 6 and values(target) == [6.0]
        source.p.close()


class Named:
    """Stands for an actor's reference: its endpoints answer from the publisher that it has at the moment."""

    def __init__(self, p):
        self.p = p

    @property
    def weight_handle(self):
        return self

    def call_one(self, layout):
        self.asked = layout
        return self

    def get(self, timeout):
        return self.p.handle(layout=self.asked)
