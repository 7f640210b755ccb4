"""A pytest plugin: a test that leaves a process, thread, socket file or shared memory behind fails.

    # conftest.py
    pytest_plugins = ["monarch.testing.plugin"]

Each test gets `--monarch-leak-wait` seconds (default 5) for what it ended to go away. A test that means to leave
something behind says so: `@pytest.mark.leaves_traces`.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from monarch.testing._leaks import leftovers, traces


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("monarch").addoption(
        "--monarch-leak-wait",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long a test's processes and threads may take to go away (default: 5)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_traces: the test may leave processes, threads or files behind")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Generator[None]:
    """Fails the test when something exists after it that did not exist before."""
    before = traces()
    yield
    if request.node.get_closest_marker("leaves_traces") is not None:
        return
    left = leftovers(before, request.config.getoption("--monarch-leak-wait"))
    if left:
        pytest.fail(f"the test left something behind: {left}", pytrace=False)
