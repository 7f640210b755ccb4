"""`get_meter`, `span`, `traced`: usable with no client and without OpenTelemetry.

OpenTelemetry is used when the program already imported it; we never import it ourselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Instrument:
    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self.total = 0.0
        self.count = 0

    def add(self, amount: float, attributes: dict[str, Any] | None = None) -> None:
        with self._lock:
            self.total += amount
            self.count += 1

    record = add


class LocalMeter:
    """A meter that adds up in this process."""

    def __init__(self) -> None:
        self.instruments: dict[str, _Instrument] = {}

    def _make(self, name: str, unit: str = "", description: str = "") -> _Instrument:
        return self.instruments.setdefault(name, _Instrument(name))

    create_counter = create_up_down_counter = create_histogram = _make

    def _unsupported(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("observable instruments and gauges are not supported; use a counter or a histogram")

    create_gauge = create_observable_counter = create_observable_gauge = _unsupported
    create_observable_up_down_counter = _unsupported


_local_meter = LocalMeter()


def get_meter() -> Any:
    """A meter with `create_counter`, `create_up_down_counter` and `create_histogram`."""
    metrics = sys.modules.get("opentelemetry.metrics")
    return metrics.get_meter("monarch") if metrics is not None else _local_meter


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Traces the block under `name`; exceptions pass through."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield
        return
    with trace.get_tracer("monarch").start_as_current_span(name):
        yield


def traced(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Wraps a sync or async function in a span, named after it unless `name` is given."""
    if fn is None:
        return lambda f: traced(f, name=name)
    label = name or fn.__name__
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with span(label):
                return await fn(*args, **kwargs)

        return run_async

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with span(label):
            return fn(*args, **kwargs)

    return run


def traced_if_watched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`traced`, for code on the hot path: a span only when OpenTelemetry is in use at the time of the call."""
    watched = traced(fn)
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            return await (watched if "opentelemetry.trace" in sys.modules else fn)(*args, **kwargs)

        return run_async

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (watched if "opentelemetry.trace" in sys.modules else fn)(*args, **kwargs)

    return run
