"""Which of several settings of one key wins, and how far a setting reaches."""

import pytest

from actors_for_tests import Echo
from conftest import WAIT, run_script
from monarch.config import (
    clear_runtime_config,
    configure,
    configured,
    durations,
    get_global_config,
    get_runtime_config,
    parametrize_config_pointwise,
    store,
)
from monarch.config.keys import KEYS


@pytest.fixture(autouse=True)
def same_configuration_after():
    before = store.runtime_layer(), dict(store._inherited)
    yield
    store._inherited.clear()
    store._inherited.update(before[1])
    store.restore(before[0])


def test_configure_beats_what_was_inherited():
    store.install_inherited({"tail_log_lines": 5})
    assert get_global_config()["tail_log_lines"] == 5
    configure(tail_log_lines=6)
    assert get_global_config()["tail_log_lines"] == 6
    clear_runtime_config()
    assert get_global_config()["tail_log_lines"] == 5


def test_the_environment_beats_configure():
    r = run_script(
        "from monarch.config import *; configure(tail_log_lines=3); print(get_global_config()['tail_log_lines'])",
        HYPERACTOR_MESH_TAIL_LOG_LINES="9",
    )
    assert r.stdout == "9\n"


def test_a_malformed_variable_is_reported_and_ignored():
    r = run_script(
        "from monarch.config import *; print(get_global_config()['tail_log_lines'])",
        HYPERACTOR_MESH_TAIL_LOG_LINES="many",
    )
    assert r.stdout == "0\n" and "HYPERACTOR_MESH_TAIL_LOG_LINES" in r.stderr


def test_an_exception_in_a_block_restores_too():
    before = get_global_config()
    with pytest.raises(ZeroDivisionError), configured(tail_log_lines=3):
        1 / 0  # noqa: B018
    assert get_global_config() == before


def test_reading_gives_copies():
    get_global_config()["tail_log_lines"] = 77
    get_runtime_config()["tail_log_lines"] = 77
    assert get_global_config()["tail_log_lines"] != 77


def test_the_runtime_layer_holds_only_what_was_set():
    clear_runtime_config()
    configure(stop_actor_timeout="90s")
    assert get_runtime_config() == {"stop_actor_timeout": "1m 30s"}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_default_is_a_valid_value_of_its_key(key):
    row = KEYS[key]
    shown = get_global_config()[key]
    if row.kind[0] == "d" and shown is not None:
        assert durations.parse(shown) >= 0
    with configured(**{key: shown}):
        assert get_global_config()[key] == shown


@pytest.mark.parametrize("bad", ["", "5", "s", "5 parsecs", "-1s", "1s1", None, 5, 5.0])
def test_a_bad_duration_is_refused_by_name(bad):
    with pytest.raises(TypeError, match="stop_actor_timeout"):
        configure(stop_actor_timeout=bad)


@pytest.mark.parametrize("bad", [-1, "3", 1.5])
def test_a_bad_integer_is_refused_by_name(bad):
    with pytest.raises(TypeError, match="tail_log_lines"):
        configure(tail_log_lines=bad)


def test_a_key_that_must_not_be_zero_says_so():
    with pytest.raises(ValueError, match="codec_max_frame_length"):
        configure(codec_max_frame_length=0)


def read_key(name):
    return get_global_config()[name]


def test_processes_inherit_what_was_set_before_they_were_started(procs):
    with configured(tail_log_lines=4):
        early = procs().spawn("e", Echo)
        assert early.apply.call_one(read_key, "tail_log_lines").get(timeout=WAIT) == 4
    late = procs().spawn("e", Echo)
    assert late.apply.call_one(read_key, "tail_log_lines").get(timeout=WAIT) == 0
    assert early.apply.call_one(read_key, "tail_log_lines").get(timeout=WAIT) == 4


def test_private_keys_stay_here(procs):
    default = KEYS["hyperactor_tls_key"].default
    with configured(hyperactor_tls_key="/secret"):
        e = procs().spawn("e", Echo)
        assert e.apply.call_one(read_key, "hyperactor_tls_key").get(timeout=WAIT) == default


@parametrize_config_pointwise(tail_log_lines=[1, 2], prefix_with_rank=[True, False])
def test_pointwise_options_go_together():
    c = get_global_config()
    assert (c["tail_log_lines"], c["prefix_with_rank"]) in [(1, True), (2, False)]


def test_pointwise_options_have_equal_lengths():
    with pytest.raises(ValueError, match="equal length"):
        parametrize_config_pointwise(tail_log_lines=[1], prefix_with_rank=[True, False])


def test_configuration_needs_no_client():
    r = run_script("import monarch.config, sys; print('monarch.actor' in sys.modules)")
    assert r.stdout == "False\n"
