"""A function that runs in a fresh interpreter: for what would end, or change, the process that runs the tests."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle

F = TypeVar("F", bound=Callable[..., Any])

_CHILD = """
import sys, cloudpickle
with open(sys.argv[1], "rb") as f:
    function, args, kwargs, sys.path[:] = cloudpickle.load(f)
outcome = function(*args, **kwargs)
with open(sys.argv[2], "wb") as f:
    cloudpickle.dump(outcome, f)
"""


class IsolatedError(AssertionError):
    """The function did not return. `returncode` is the interpreter's exit status (negative: a signal's number),
    `stdout` and `stderr` what it wrote."""

    def __init__(self, message: str, returncode: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{message}\n{stderr}")
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


def isolated(timeout: float = 60.0) -> Callable[[F], F]:
    """`@isolated(timeout=60)`: each call runs in a new interpreter, as a session of its own, and returns its result.

    Arguments and result travel by pickle, the function by value. Afterwards its whole process group is killed. Raises
    IsolatedError when the function raises or the interpreter ends otherwise, TimeoutError after `timeout` seconds.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with tempfile.TemporaryDirectory(prefix="monarch-isolated-") as folder:
                return _run(function, args, kwargs, folder, timeout)

        return run  # type: ignore[return-value]

    return decorate


def _run(function: Any, args: Any, kwargs: Any, folder: str, timeout: float) -> Any:
    call, result = os.path.join(folder, "call"), os.path.join(folder, "result")
    module = sys.modules.get(function.__module__)
    by_value = module is not None and module.__name__ != "__main__"
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        with open(call, "wb") as f:
            cloudpickle.dump((function, args, kwargs, sys.path), f)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, call, result],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{function.__qualname__} did not return within {timeout:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()
    if not os.path.exists(result):
        raise IsolatedError(
            f"{function.__qualname__} did not return: exit status {process.returncode}",
            process.returncode,
            stdout,
            stderr,
        )
    with open(result, "rb") as f:
        return cloudpickle.load(f)
