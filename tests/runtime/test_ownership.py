"""Whole clusters of ownership trees, in memory: random spawns, stops, failures and deaths, delivered in any order
that a network allows. Properties of the spec's ownership model are checked after each step and when all is quiet."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monarch.runtime.ownership import Ask, CleanUp, End, Owner, OwnerEnded, Report, Stop, Tree

ROOT = 1
CLIENT = 0


class Cluster(RuleBasedStateMachine):
    """Processes with a tree each; what the runtime does about effects, without processes or sockets.

    A frame to a live process arrives, in the order of its sender. The news of a death comes after everything that
    the dead process had sent. Stops are answered when the actor has cleaned up.
    """

    @initialize()
    def begin(self):
        self.trees = {CLIENT: Tree()}
        self.trees[CLIENT].add(ROOT, None)
        self.links = collections.defaultdict(collections.deque)  #: (from, to) -> frames in order
        self.dead = set()
        self.next_key = 100
        self.next_node = 1
        self.meshes = {}  #: key -> (owner node, owner actor, {node: rank}, is_procs)
        self.asked = collections.Counter()  #: (key, rank) -> how often a handler was asked
        self.real = {}  #: (key, rank) -> it failed while its owner ran and wanted it
        self.cleaned = set()  #: (node, actor)
        self.ended = set()  #: (node, actor) left "running"
        self.waiting = {}  #: (owner node, key) -> ranks whose answer to a stop is missing
        self.process_owner = {}

    # -- what the runtime would do

    def send(self, origin, dest, *frame):
        if dest not in self.dead and origin not in self.dead:
            self.links[origin, dest].append(frame)

    def carry_out(self, node, effects):
        for effect in effects:
            if isinstance(effect, Ask):
                self.asked[effect.mesh.key, effect.rank] += 1
            elif isinstance(effect, Report):
                to = effect.to
                self.send(node, to.node, "failed", to.actor, effect.actor, self.rank_of(effect.actor, node))
            elif isinstance(effect, End):
                self.end(node, effect.actor, failed=False)
            elif isinstance(effect, Stop):
                self.stop_mesh(node, effect.mesh)
            elif isinstance(effect, CleanUp):
                self.clean_up(node, effect.actor)

    def rank_of(self, key, node):
        return self.meshes[key][2][node]

    def stop_mesh(self, node, mesh):
        left = {n for n in mesh.ranks if n not in mesh.gone and n not in self.dead}
        self.waiting[node, mesh.key] = left
        for n in left:
            self.send(node, n, "exit" if mesh.is_procs else "stop", mesh.key, node)
        self.settle_stop(node, mesh.owner, mesh.key)

    def settle_stop(self, node, owner, key):
        if not self.waiting.get((node, key), True):
            del self.waiting[node, key]
            self.carry_out(node, self.trees[node].stopped(owner, key))

    def answer(self, node, key, origin):
        """A rank is gone, and the owner who waits for its stop hears of it."""
        left = self.waiting.get((node, key))
        if left is not None:
            left.discard(origin)
            self.settle_stop(node, self.meshes[key][1], key)

    def end(self, node, actor, failed):
        effects = self.trees[node].end(actor, failed)
        if effects or (node, actor) not in self.ended:
            self.ended.add((node, actor))
        self.carry_out(node, effects)

    def clean_up(self, node, actor):
        assert (node, actor) not in self.cleaned, "cleaned up twice"
        member = self.trees[node].members[actor]
        assert not member.owned and member.state != "running"
        for key, (owner_node, owner, ranks, is_procs) in self.meshes.items():
            if (owner_node, owner) == (node, actor) and not is_procs:
                for n in ranks:
                    assert n in self.dead or not self.lives(n, key), "a child outlived its owner's cleanup"
        self.cleaned.add((node, actor))
        self.trees[node].closed(actor)
        if actor in self.meshes:
            self.send(node, self.meshes[actor][0], "stopped", actor, node)

    def lives(self, node, actor):
        return node in self.trees and actor in self.trees[node].members and (node, actor) not in self.cleaned

    def die(self, node, failed):
        """A process ends; what it owned as processes dies with it, as the host's agent sees to."""
        if node in self.dead:
            return
        self.dead.add(node)
        for key, (_, _, ranks, _) in self.meshes.items():
            if node in ranks and failed:
                self.note(key, ranks[node])
        for (origin, dest), frames in self.links.items():
            if dest == node:
                frames.clear()
            elif origin == node:
                frames.append(("down", node, failed))
        for other in self.trees:
            if other not in self.dead and not any(f[0] == "down" for f in self.links[node, other]):
                self.links[node, other].append(("down", node, failed))
        for other, owner in self.process_owner.items():
            if owner == node:
                self.die(other, False)

    def note(self, key, rank):
        """This failure must be handled, once, if its owner runs and does not want the mesh stopped."""
        node, owner, _, is_procs = self.meshes[key]
        if node not in self.dead and self.trees[node].is_live(owner, key) and not is_procs:
            self.real.setdefault((key, rank), True)

    def running(self):
        return [
            (node, ident) for node, tree in self.trees.items() if node not in self.dead
            for ident, member in tree.members.items() if member.state == "running"
        ]  # fmt: skip

    # -- what happens

    @rule(data=st.data(), size=st.integers(1, 3))
    def spawn_processes(self, data, size):
        if len(self.trees) > 12:
            return
        node, owner = data.draw(st.sampled_from(self.running()))
        key, self.next_key = self.next_key, self.next_key + 1
        ranks = {}
        for rank in range(size):
            self.trees[self.next_node] = Tree()
            self.process_owner[self.next_node] = node
            ranks[self.next_node] = rank
            self.next_node += 1
        self.meshes[key] = (node, owner, ranks, True)
        self.trees[node].own(owner, key, ranks, True)

    @rule(data=st.data())
    def spawn_actors(self, data):
        """Anybody may spawn on any processes that they hold a handle of, also on dead ones."""
        procs = [m for m in self.meshes.values() if m[3]]
        if not procs or len(self.meshes) > 30:
            return
        node, owner = data.draw(st.sampled_from(self.running()))
        ranks = data.draw(st.sampled_from(procs))[2]
        key, self.next_key = self.next_key, self.next_key + 1
        self.meshes[key] = (node, owner, ranks, False)
        self.trees[node].own(owner, key, ranks, False)
        for n, rank in ranks.items():
            if n in self.dead:
                self.note(key, rank)
                self.carry_out(node, self.trees[node].process_ended(n, True))
            else:
                self.send(node, n, "spawn", key, Owner(node, owner))

    @rule(data=st.data())
    def an_actor_fails(self, data):
        actors = [(n, a) for n, a in self.running() if a != ROOT]
        if actors:
            node, actor = data.draw(st.sampled_from(actors))
            self.note(actor, self.rank_of(actor, node))
            self.end(node, actor, failed=True)

    @rule(data=st.data(), failed=st.booleans())
    def a_process_dies(self, data, failed):
        alive = [n for n in self.trees if n not in self.dead and n != CLIENT]
        if alive:
            self.die(data.draw(st.sampled_from(alive)), failed)

    @rule(data=st.data())
    def an_owner_stops_a_mesh(self, data):
        owned = [(n, a, m) for n, a in self.running() for m in self.trees[n].owned_by(a)]
        if owned:
            node, actor, mesh = data.draw(st.sampled_from(owned))
            for rank in mesh.ranks.values():
                if not self.asked[mesh.key, rank]:
                    self.real.pop((mesh.key, rank), None)  # its owner had no interest any more when it came
            self.carry_out(node, self.trees[node].stop(actor, mesh.key))

    @rule(data=st.data())
    def an_owner_does_not_handle(self, data):
        """A handler that was asked returned a false value: the owner fails in turn."""
        asked = [(self.meshes[k][0], self.meshes[k][1]) for k, _ in self.asked]
        owners = [o for o in asked if o in set(self.running()) and o[1] != ROOT]
        if owners:
            node, actor = data.draw(st.sampled_from(owners))
            self.note(actor, self.rank_of(actor, node))
            self.end(node, actor, failed=True)

    @rule(data=st.data())
    def a_frame_arrives(self, data):
        links = [k for k, frames in self.links.items() if frames and k[1] not in self.dead]
        if links:
            self.deliver(data.draw(st.sampled_from(links)))

    def deliver(self, link):
        origin, dest = link
        op, *args = self.links[link].popleft()
        tree = self.trees[dest]
        if op == "spawn":
            key, owner = args
            tree.add(key, owner)
            if owner.node in self.dead and not any(f[0] == "down" for f in self.links[owner.node, dest]):
                self.carry_out(dest, tree.process_ended(owner.node, True))
        elif op == "failed":
            self.carry_out(dest, tree.failed(*args))
        elif op == "stop":
            key, owner_node = args
            if self.lives(dest, key):
                self.end(dest, key, failed=False)
            else:
                self.send(dest, owner_node, "stopped", key, dest)
        elif op == "exit":
            self.die(dest, False)
        elif op == "stopped":
            self.answer(dest, *args)
        elif op == "down":
            node, failed = args
            self.carry_out(dest, tree.process_ended(node, failed))
            for owner_node, key in list(self.waiting):
                if owner_node == dest and (dest, key) in self.waiting:
                    self.answer(dest, key, node)

    # -- what must hold

    @invariant()
    def nobody_is_asked_twice(self):
        assert not [k for k, n in getattr(self, "asked", {}).items() if n > 1]

    def settle(self):
        for _ in range(100_000):
            links = [k for k, frames in self.links.items() if frames and k[1] not in self.dead]
            if not links:
                return
            self.deliver(links[0])
        raise AssertionError("it never becomes quiet")

    @rule()
    def all_is_quiet(self):
        self.settle()
        for node, tree in self.trees.items():
            if node in self.dead:
                continue
            for ident, member in tree.members.items():
                assert member.state == "running", "an end that never finishes"
                if member.owner is not None:
                    above = self.trees[member.owner.node].members.get(member.owner.actor)
                    assert member.owner.node not in self.dead and above is not None, f"orphan {ident}"
                    assert ident in above.owned, "its owner does not know it"
                for key, mesh in member.owned.items():
                    truth = {r for n, r in mesh.ranks.items() if n in self.dead or not self.lives(n, key)}
                    if not mesh.is_procs:
                        orderly = {r for n, r in mesh.ranks.items() if n in self.dead and r not in mesh.failed}
                        assert tree.health(ident, key) == truth - orderly
        for (key, rank), must in self.real.items():
            node, owner, _, _ = self.meshes[key]
            if must and node not in self.dead and (node, owner) not in self.ended:
                assert self.asked[key, rank] == 1, f"a failure of mesh {key} rank {rank} was lost"

    def teardown(self):
        if not hasattr(self, "trees"):
            return
        self.all_is_quiet()
        self.end(CLIENT, ROOT, failed=False)
        self.settle()
        assert (CLIENT, ROOT) in self.cleaned
        left = [n for n, tree in self.trees.items() if n not in self.dead and n != CLIENT]
        assert not left, "a process outlives the root"


Cluster.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase


def tree_with_a_mesh():
    tree = Tree()
    tree.add(ROOT, None)
    tree.own(ROOT, 7, {20: 0, 21: 1}, True)
    tree.own(ROOT, 8, {20: 0, 21: 1}, False)
    return tree


def test_a_death_is_one_question_to_the_owner_of_process_and_actors():
    tree = tree_with_a_mesh()
    effects = tree.process_ended(21, failed=True)
    assert [(type(e), e.mesh.key, e.rank) for e in effects] == [(Ask, 8, 1)]
    assert tree.health(ROOT, 8) == {1} == tree.health(ROOT, 7)
    assert tree.process_ended(21, failed=True) == []


def test_a_process_without_actors_is_a_failure_of_the_process_mesh():
    tree = Tree()
    tree.add(ROOT, None)
    tree.own(ROOT, 7, {20: 0}, True)
    assert [e.mesh.key for e in tree.process_ended(20, failed=True)] == [7]


def test_the_death_of_a_process_whose_actor_failed_before_is_the_processs_failure():
    tree = tree_with_a_mesh()
    assert len(tree.failed(ROOT, 8, 0)) == 1 and tree.failed(ROOT, 8, 0) == []
    assert [e.mesh.key for e in tree.process_ended(20, failed=True)] == [7]


def test_actors_are_stopped_before_processes_and_the_newest_first():
    tree = tree_with_a_mesh()
    tree.own(ROOT, 9, {20: 0, 21: 1}, False)
    assert [e.mesh.key for e in tree.end(ROOT, failed=False)] == [9, 8, 7]
    assert tree.stopped(ROOT, 9) == [] and tree.stopped(ROOT, 7) == []
    assert tree.stopped(ROOT, 8) == [CleanUp(ROOT)]


def test_an_actor_that_ends_cannot_own():
    tree = Tree()
    tree.add(5, Owner(99, 1))
    assert tree.end(5, failed=True) == [Report(5, Owner(99, 1)), CleanUp(5)]
    with pytest.raises(OwnerEnded, match="ending"):
        tree.own(5, 10, {1: 0}, True)


def test_a_mesh_that_is_being_stopped_has_no_failures():
    tree = tree_with_a_mesh()
    assert len(tree.stop(ROOT, 8)) == 1 and tree.stop(ROOT, 8) == []
    assert tree.failed(ROOT, 8, 0) == []
    tree.stop(ROOT, 7)
    assert tree.process_ended(20, failed=True) == []


def test_meshes_whose_processes_are_gone_are_forgotten():
    tree = tree_with_a_mesh()
    tree.process_ended(20, failed=False)
    assert len(tree.owned_by(ROOT)) == 2
    tree.process_ended(21, failed=True)
    assert tree.owned_by(ROOT) == []
