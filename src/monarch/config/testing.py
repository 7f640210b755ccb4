"""pytest parametrisation over configurations. Imports pytest only when used."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any


def _decorate(cases: list[dict[str, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    import pytest

    from monarch.config import configured

    ids = ["-".join(f"{k}={v}" for k, v in case.items()) for case in cases]

    def wrap(test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run(*args: Any, _monarch_config: dict[str, Any], **kwargs: Any) -> Any:
                with configured(**_monarch_config):
                    return await test(*args, **kwargs)
        else:

            @functools.wraps(test)
            def run(*args: Any, _monarch_config: dict[str, Any], **kwargs: Any) -> Any:
                with configured(**_monarch_config):
                    return test(*args, **kwargs)

        sig = inspect.signature(test)
        extra = inspect.Parameter("_monarch_config", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = sig.replace(parameters=[*sig.parameters.values(), extra])  # type: ignore[attr-defined]
        marked: Callable[..., Any] = pytest.mark.parametrize("_monarch_config", cases, ids=ids)(run)
        return marked

    return wrap


def parametrize_config(**options: set[Any]) -> Any:
    if not options:
        raise ValueError("parametrize_config needs at least one option, such as tail_log_lines={1, 2}")
    values = [sorted(v, key=str) for v in options.values()]
    return _decorate([dict(zip(options, combo, strict=True)) for combo in itertools.product(*values)])


def parametrize_config_pointwise(**options: list[Any]) -> Any:
    if not options or len({len(v) for v in options.values()}) != 1:
        raise ValueError("parametrize_config_pointwise needs options with lists of equal length")
    return _decorate([dict(zip(options, combo, strict=True)) for combo in zip(*options.values(), strict=True)])
