"""Ranks, names, creators and addresses; what code can learn about where it runs."""

import os
import pickle
import re

import pytest

from actors_for_tests import Echo
from conftest import WAIT
from monarch.actor import (
    Actor,
    ActorAddr,
    ActorError,
    ProcId,
    Uid,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_proc,
)


class Where(Actor):
    def __init__(self):
        self.at_init = str(current_rank()), str(context().actor_instance.rank), current_size()

    @endpoint
    def init_ranks(self):
        return self.at_init

    @endpoint
    def ranks(self):
        return str(current_rank()), dict(current_size()), str(context().actor_instance.rank)

    @endpoint
    def facts(self):
        me = context().actor_instance
        return {
            "name": me.name,
            "class_name": me.class_name,
            "actor_id": me.actor_id,
            "proc_id": me.proc_id,
            "current": current_actor_name(),
            "text": str(me),
            "repr": repr(me),
            "creator": me.creator,
            "proc": me.proc,
            "mesh": me.proc_mesh,
            "pid": os.getpid(),
        }

    @endpoint
    def child_facts(self):
        child = this_proc().spawn("child", Where)
        return child.facts.call_one().get(timeout=WAIT)

    @endpoint
    def leak(self, what):
        return context() if what == "context" else context().actor_instance


def test_ranks_sum_over_the_mesh(procs):
    values = procs(2).spawn("w", Where).ranks.call().get(timeout=WAIT).values()
    assert values == [("{'gpus': 0/2}", {"gpus": 2}, "{'gpus': 0/2}"), ("{'gpus': 1/2}", {"gpus": 2}, "{'gpus': 1/2}")]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda m: m.slice(gpus=2), [("{}", {}, "{'gpus': 2/4}")]),
        (lambda m: m.slice(gpus=slice(3, 4)), [("{'gpus': 0/1}", {"gpus": 1}, "{'gpus': 3/4}")]),
        (lambda m: m.rename(gpus="g").slice(g=slice(0, 1)), [("{'g': 0/1}", {"g": 1}, "{'gpus': 0/4}")]),
        (
            lambda m: m.split(gpus=("a", "b"), a=2).slice(a=1, b=slice(1, 2)),
            [("{'b': 0/1}", {"b": 1}, "{'gpus': 3/4}")],
        ),
        (lambda m: m.flatten("all").slice(all=0), [("{}", {}, "{'gpus': 0/4}")]),
    ],
)
def test_the_message_rank_is_that_of_the_handle_and_the_rank_that_of_the_actor(procs, view, expected):
    m = procs(4).spawn("w", Where)
    assert view(m).ranks.call().get(timeout=WAIT).values() == expected


def test_choose_tells_the_rank_in_the_whole_handle(procs):
    message, size, own = procs(3).spawn("w", Where).ranks.choose().get(timeout=WAIT)
    assert message == own and size == {"gpus": 3}


def test_init_sees_its_rank_on_the_processes_it_was_spawned_on(procs):
    m = procs(4).slice(gpus=slice(2, 4)).spawn("w", Where)
    assert m.init_ranks.call().get(timeout=WAIT).values()[1] == ("{'gpus': 1/2}", "{'gpus': 1/2}", {"gpus": 2})


def test_an_actor_knows_its_names(procs):
    f = procs(2).spawn("w", Where).slice(gpus=1).facts.call_one().get(timeout=WAIT)
    assert (f["name"], f["class_name"]) == ("w", "test_identity.Where")
    assert f["text"] == f["repr"] == "<root>.<test_identity.Where w{'gpus': 1/2}>"
    assert f["current"] == str(f["actor_id"]) and f["actor_id"].label == "w" and not f["actor_id"].is_root
    assert len(f["proc"]) == 1 and f["proc"].extent.nelements == 1 and dict(f["mesh"].sizes) == {"gpus": 2}
    assert f["proc"].spawn("e", Echo).pid.call_one().get(timeout=WAIT) == f["pid"]


def test_ranks_of_a_mesh_share_their_name_and_differ_in_their_process(procs):
    a, b = (f["actor_id"] for f in procs(2).spawn("w", Where).facts.call().get(timeout=WAIT).values())
    assert a.actor_name == b.actor_name and a.proc_id != b.proc_id and a != b and len({a, b}) == 2


def test_an_actor_of_an_actor_knows_its_creator(procs):
    f = procs().spawn("parent", Where).child_facts.call_one().get(timeout=WAIT)
    assert f["text"] == "<root>.<test_identity.Where parent{'gpus': 0/1}>.<test_identity.Where child>"
    creator = pickle.loads(pickle.dumps(f["creator"]))
    assert (creator.name, creator.class_name, str(creator.rank)) == ("parent", "test_identity.Where", "{'gpus': 0/1}")
    assert creator.creator is None or creator.creator.name == "root"


@pytest.mark.parametrize("what", ["context", "instance"])
def test_a_context_cannot_leave_its_process(procs, what):
    with pytest.raises(ActorError) as info:
        procs().spawn("w", Where).leak.call_one(what).get(timeout=WAIT)
    assert isinstance(info.value.exception, TypeError)


def test_the_client_is_the_root():
    me = context().actor_instance
    assert (me.name, me.class_name, me.creator, str(me), str(me.rank)) == ("root", None, None, "<root>", "{}")
    assert me.actor_id.label == "client" and context().actor_instance is me


@pytest.mark.parametrize(
    ("given", "label"),
    [("My Actor!", "myactor"), ("1abc", "abc"), ("!!", "nil"), ("x" * 80, "x" * 63), ("a_b-c", "a_b-c")],
)
def test_spawn_names_become_labels(procs, given, label):
    m = procs().spawn(given, Where)
    assert re.fullmatch(re.escape(label) + r"-\w+", m._name.get(timeout=WAIT)) and m._mesh_name == given
    assert m.facts.call_one().get(timeout=WAIT)["name"] == given


def test_addresses_are_values():
    a = ActorAddr(addr="local:0", proc_name="test", actor_name="actor")
    assert str(a) == "actor.test@inproc://0" and a.proc_id == "test@inproc://0" and str(a.uid) == a.label == "actor"
    assert a.is_root and ActorAddr.from_string(str(a)) == a and hash(pickle.loads(pickle.dumps(a))) == hash(a)
    assert str(a.pid) == str(a.uid) and a.proc_label == "test"
    with pytest.raises(ValueError):
        ActorAddr.from_string("nonsense")


def test_identifiers_are_values():
    for uid in (Uid.anonymous(), Uid.instance(), Uid.instance("lbl"), Uid.from_string("lbl")):
        assert Uid.from_string(str(uid)) == uid == pickle.loads(pickle.dumps(uid))
        assert ProcId.from_string(str(ProcId(uid))) == ProcId(uid) and ProcId(uid).label == uid.label
    assert Uid.instance("lbl") != Uid.instance("lbl") and Uid.instance("lbl").is_instance
    assert Uid.from_string("lbl").is_singleton and Uid.anonymous().label is None


@pytest.mark.parametrize("bad", ["", "<", "a<b", "a<>", "a b", "<x>y"])
def test_a_bad_identifier_is_refused(bad):
    with pytest.raises(ValueError):
        Uid.from_string(bad)
