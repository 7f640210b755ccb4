"""What is told about a failure: how a process ended, and the event that climbs the ownership tree."""

from __future__ import annotations

import datetime
import signal
import textwrap
from typing import Any, NamedTuple

#: why something was stopped whose owner's process is gone; programs match on the first words
OWNER_GONE = "timed out reaching controller: the process of its owner ended"


class Exit(NamedTuple):
    """How a process ended.

    `kind` is `stopped` (orderly), `exited`, `killed`, `frozen` (stopped by a signal for too long, then killed), or
    `lost` (nobody saw it end).
    """

    kind: str
    code: int = 0
    core: bool = False
    who: str = ""  #: process name and pid, for people
    detail: str = ""
    before: str = ""  #: what the failure was the end of, for people

    @classmethod
    def of_status(cls, status: int, stopping: bool, who: str) -> Exit:
        """From a `waitpid` status."""
        import os

        if os.WIFSIGNALED(status):
            return cls("stopped" if stopping else "killed", os.WTERMSIG(status), os.WCOREDUMP(status), who)
        code = os.WEXITSTATUS(status)
        return cls("stopped" if stopping else "exited", code, False, who)

    def describe(self) -> str:
        return self.before + self._describe()

    def _describe(self) -> str:
        where = f" [{self.who}]" if self.who else ""
        tail = f"\n{self.detail}" if self.detail else ""
        if self.kind == "killed":
            try:
                name = signal.Signals(self.code).name
            except ValueError:
                name = f"signal {self.code}"
            core = ", core" if self.core else ""
            return f"the process this actor was running on failed: Killed(sig={self.code}{core}) ({name}){where}{tail}"
        if self.kind == "exited" and self.code:
            return f"the process this actor was running on exited with non-zero code {self.code}{where}{tail}"
        if self.kind == "exited":
            return (
                "the process this actor was running on exited unexpectedly: process exited cleanly (code 0) "
                f"outside an orderly stop{where}{tail}"
            )
        if self.kind == "frozen":
            return (
                f"timeout waiting for {self.who}: it was frozen (stopped by a signal) for {self.detail} and was then "
                "killed; the limit is get_actor_state_max_idle"
            )
        if self.kind == "stopped":
            return f"has status: stopped: {self.detail or 'the process was stopped by its owner'}{where}"
        return f"the process this actor was running on was lost: {self.detail or 'connection closed'}{where}"

    @property
    def failed(self) -> bool:
        return self.kind != "stopped"


def death_report(display: str, reason: str, where: str = "") -> str:
    """The text that `report()` and `SupervisionError` show for a dead actor. `where`: its process, for people."""
    text = reason.rstrip() + (f"\n[{where}]" if where else "")
    return f"The actor {display} and all its descendants have failed:\n" + textwrap.indent(text, "    ")


class MeshFailure:
    """One failure, as its owner is told. Read-only, picklable.

    `mesh_name` is the unique name of the failing mesh, `<spawn name>-<suffix>`; `crashed_ranks` are ranks in the
    whole mesh; `cause` is the reason alone; `where` names the process (its name, pid and host) when an actor failed
    in one that goes on; `mesh` is the handle, when the owner still has it; `exit_code` and `signal` are
    set when a process ended; `occurred_at` is an aware datetime.
    """

    def __init__(
        self,
        mesh_name: str,
        crashed_ranks: list[int],
        display: str,
        cause: str,
        *,
        exit: Exit | None = None,
        chain: str = "",
        mesh: Any = None,
        where: str = "",
    ) -> None:
        self.mesh_name = mesh_name
        self.crashed_ranks = list(crashed_ranks)
        self.display = display
        self.cause = cause
        self.chain = chain
        self.exit_code = exit.code if exit is not None and exit.kind == "exited" else None
        self.signal = exit.code if exit is not None and exit.kind == "killed" else None
        self.occurred_at = datetime.datetime.now(datetime.timezone.utc)
        self.mesh = mesh
        self.where = where

    def report(self) -> str:
        """A report for people, root cause included."""
        text = death_report(self.display, self.cause, self.where)
        return f"{self.chain}\n{text}" if self.chain else text

    def __repr__(self) -> str:
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={self.crashed_ranks}, "
            f"event=Supervision event: actor {self.display} failed: {self.cause})"
        )

    __str__ = __repr__


class UndeliverableMessageEnvelope:
    """A message that came back to the actor that sent it, for `_handle_undeliverable_message`."""

    def __init__(self, sender: str, dest: str, error: str) -> None:
        self._sender, self._dest, self._error = sender, dest, error

    def sender(self) -> str:
        """The actor that sent it."""
        return self._sender

    def dest(self) -> str:
        """Where it should have gone."""
        return self._dest

    def error_msg(self) -> str:
        """Why it could not."""
        return self._error

    def report(self) -> str:
        return f"undeliverable message from {self._sender} to {self._dest}: {self._error}"

    __repr__ = report
