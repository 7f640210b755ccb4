"""patch_actor: spawning one class gives another, here and in processes made meanwhile."""

import asyncio

import pytest

from actors_for_tests import Echo
from conftest import WAIT
from monarch._src.actor.mock import (
    get_actor_class,
    get_actor_mock_registry_state,
    get_tensor_engine_factory,
    patch_actor,
    patch_tensor_engine,
    set_actor_mock_registry_state,
)
from monarch.actor import Actor, endpoint, this_host, this_proc


class Original(Actor):
    def __init__(self, x=0):
        self.x = x

    @endpoint
    def who(self):
        return "original"


class Mock(Original):
    @endpoint
    def who(self):
        return "mock"


class NoArguments(Actor):
    @endpoint
    def who(self):
        return "no arguments"


class Spawner(Actor):
    @endpoint
    def here(self):
        return this_proc().spawn("o", Original).who.call_one().get(timeout=WAIT)

    @endpoint
    def further_down(self):
        p = this_host().spawn_procs({"gpus": 1})
        answer = p.spawn("s", Spawner).here.call_one().get(timeout=WAIT)
        p.stop().get(timeout=WAIT)
        return answer


def test_the_patch_nests_and_is_undone():
    with patch_actor(Original, Mock) as entered:
        assert entered is Mock and get_actor_class(Original) is Mock
        with patch_actor(Original, NoArguments):
            assert get_actor_class(Original) is NoArguments
        assert get_actor_class(Original) is Mock and get_actor_class(Echo) is Echo
    assert get_actor_class(Original) is Original


def test_an_exception_undoes_the_patch():
    with pytest.raises(ZeroDivisionError), patch_actor(Original, Mock):
        1 / 0  # noqa: B018
    assert get_actor_class(Original) is Original


def test_it_decorates_functions_of_both_kinds():
    @patch_actor(Original, Mock)
    def plain():
        return get_actor_class(Original)

    @patch_actor(Original, Mock)
    async def coroutine():
        return get_actor_class(Original)

    async def block():
        async with patch_actor(Original, Mock):
            return get_actor_class(Original)

    assert plain() is asyncio.run(coroutine()) is asyncio.run(block()) is Mock
    assert get_actor_class(Original) is Original


def test_spawn_gives_the_mock_and_checks_its_arguments(procs):
    p = procs()
    with patch_actor(Original, Mock):
        assert p.spawn("o", Original, 1).who.call_one().get(timeout=WAIT) == "mock"
    with patch_actor(Original, NoArguments), pytest.raises(TypeError):
        p.spawn("o", Original, 1)
    assert p.spawn("o", Original).who.call_one().get(timeout=WAIT) == "original"


def test_processes_made_meanwhile_carry_the_patch_and_keep_it(procs):
    before = procs().spawn("s", Spawner)
    with patch_actor(Original, Mock):
        meanwhile = procs().spawn("s", Spawner)
        assert meanwhile.here.call_one().get(timeout=WAIT) == "mock"
    assert meanwhile.here.call_one().get(timeout=WAIT) == "mock"
    assert meanwhile.further_down.call_one().get(timeout=WAIT) == "mock"
    after = procs().spawn("s", Spawner)
    assert [s.here.call_one().get(timeout=WAIT) for s in (before, after)] == ["original", "original"]


def test_the_registry_can_be_read_and_written():
    state = get_actor_mock_registry_state()
    set_actor_mock_registry_state({Original: Mock})
    try:
        assert get_actor_class(Original) is Mock
    finally:
        set_actor_mock_registry_state(state)
    assert get_actor_class(Original) is Original


def test_a_tensor_engine_patch_has_a_default_factory_and_is_undone():
    assert get_tensor_engine_factory(Original) is None
    with patch_tensor_engine(Original):
        assert callable(get_tensor_engine_factory(Original))
    assert get_tensor_engine_factory(Original) is None
