import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.actor import ChannelTransport
from monarch.config import (
    configure,
    configured,
    durations,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    store,
)
from monarch.config.transport import BindSpec


@given(st.integers(0, 10**9))
def test_durations_come_back_equal(milliseconds):
    seconds = milliseconds / 1000
    assert durations.parse(durations.render(seconds)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "shown"), [("300s", "5m"), ("90s", "1m 30s"), ("1h30m", "1h 30m"), ("1.5s", "1s 500ms"), ("2w", "14d")]
)
def test_durations_are_normalised(text, shown):
    assert durations.render(durations.parse(text)) == shown


def test_a_refused_call_changes_nothing():
    before = get_global_config()
    with pytest.raises(TypeError, match="tail_log_lines"):
        configure(prefix_with_rank=False, tail_log_lines="many")
    with pytest.raises(ValueError, match="did you mean `tail_log_lines`"):
        configure(prefix_with_rank=False, tail_log_line=1)
    assert get_global_config() == before


def test_blocks_nest_and_restore():
    with configured(tail_log_lines=3):
        with configured(tail_log_lines=4) as inner:
            assert inner["tail_log_lines"] == 4
        assert get_runtime_config()["tail_log_lines"] == 3
    assert "tail_log_lines" not in get_runtime_config()


def test_a_key_shadowed_by_the_environment_warns(monkeypatch):
    monkeypatch.setitem(store._environment, "tail_log_lines", 9)
    store._merge()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with configured(tail_log_lines=3):
                assert get_global_config()["tail_log_lines"] == 9
        assert "HYPERACTOR_MESH_TAIL_LOG_LINES" in str(seen[0].message)
    finally:
        monkeypatch.undo()
        store._merge()


def test_transports_compare_by_meaning():
    assert BindSpec("unix") == BindSpec(ChannelTransport.Unix) == BindSpec("ipc")
    with pytest.raises(ValueError, match="smoke"):
        BindSpec("smoke signals")
    with pytest.raises(TypeError):
        BindSpec(3)


@parametrize_config(tail_log_lines={1, 2}, prefix_with_rank={True})
def test_a_test_runs_under_each_combination():
    assert get_global_config()["tail_log_lines"] in (1, 2)


def test_no_options_are_refused():
    with pytest.raises(ValueError, match="at least one option"):
        parametrize_config()
