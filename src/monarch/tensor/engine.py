"""The client's engine of one set of workers: batches commands, and asks workers for values and errors.

Commands are tuples of small integers. They gather in segments, one per stretch of commands of one lane (a mesh and a
stream), and leave in one message: when there are many, when an answer is needed, or after a moment. The engine talks
to a `Backend` only, so that something other than worker processes can stand behind it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from monarch.mesh import Slice
from monarch.runtime.future import Future
from monarch.tensor import sites
from monarch.tensor.codes import DELETE
from monarch.tensor.handle import Lane

#: commands that are sent without waiting for more
BATCH = 48
#: seconds after which commands leave though nothing asks for them
PAUSE = 0.001

#: (lane, number of the first command, commands)
Segment = tuple[int, int, list[Any]]
Batch = tuple[list[Any], list[Segment]]


class Backend(Protocol):
    """What carries out commands."""

    def post(self, batch: Batch, ranks: Slice | None) -> None:
        """Hands commands to the workers `ranks` (None: all), in order with all that was handed before."""

    def ask(self, batch: Batch, ranks: Slice | None, question: tuple[Any, ...]) -> Future[list[Any]]:
        """The same, then a question; the future gives one answer per worker, in the order of the ranks."""

    def ask_each(self, batch: Batch, ranks: Slice | None, question: tuple[Any, ...]) -> Iterator[Future[Any]]:
        """The same, with a future for each answer, in the order of arrival."""

    def ask_port(self, batch: Batch, ranks: Slice | None, question: tuple[Any, ...], port: Any) -> None:
        """The same, with the answers sent to a port of the user."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Runs a callback after a while, on a thread that must not block."""

    def open_store(self) -> tuple[str, int]:
        """Starts the store of the communicators; its address."""

    def handle(self) -> Any:
        """What workers reach each other by."""

    def host_name(self, index: int) -> str:
        """The name of a host, for people."""

    def close(self) -> None:
        """Ends the workers."""


class RemoteException(Exception):
    """An operation failed on a worker.

    `worker_error_string`: the worker's traceback as text. `controller_frames`: where the operation was issued.
    `rank`: the first worker that reported it.
    """

    def __init__(
        self, worker_error_string: str, controller_frames: list[traceback.FrameSummary] | None, rank: int
    ) -> None:
        super().__init__(worker_error_string, controller_frames, rank)
        self.worker_error_string = worker_error_string
        self.controller_frames = controller_frames
        self.rank = rank

    def __str__(self) -> str:
        issued = "".join(traceback.format_list(self.controller_frames)) if self.controller_frames else "  <unknown>\n"
        return (
            f"A remote function has failed asynchronously on rank {self.rank}.\n"
            f"Traceback of where the remote function was issued on controller (most recent call last):\n{issued}"
            f"Error as reported from worker!!!!!!!!!!!\n{self.worker_error_string}"
        )


class Engine:
    """See the module's text. `size`: number of workers; `name`: for people."""

    def __init__(self, backend: Backend, size: int, name: str) -> None:
        self.backend, self.size, self.name = backend, size, name
        self.lock = threading.RLock()
        self.closed = False
        self.lanes: dict[tuple[Any, Any], Lane] = {}
        self.meshes: dict[Any, Any] = {}  #: layout -> DeviceMesh
        self.known: set[Any] = set()  #: templates and functions that were sent
        self.recording: Any = None  #: what commands go into while a block is recorded
        self.mesh: Any = None  #: the DeviceMesh of all workers
        self._streams: dict[Any, int] = {}
        self._defs: list[Any] = []
        self._segments: list[Segment] = []
        self._lane: Any = None
        self._commands: list[Any] = []
        self._count = 0
        self._issued = 0
        self._touched: Any = None  #: the mesh of all pending segments; False when there are several
        self._timed = False
        self.held = 0  #: coalescing blocks that are open
        self.reported = False
        self.root: Any = None  #: the process mesh, when workers are processes
        self.per_host = size
        self._has_store = self._has_peers = False
        self._later: list[Callable[[], None]] = []  #: ends of borrows that were forgotten

    # -- naming things for the workers

    def lane(self, mesh: Any, stream: Any) -> Lane:
        key = (mesh, stream)
        found = self.lanes.get(key)
        if found is None:
            with self.lock:
                number = self._streams.get(stream)
                if number is None:
                    number = self._streams[stream] = len(self._streams)
                    self.define(("stream", number, stream.name))
                found = Lane(self, mesh, stream, len(self.lanes))
                self.lanes[key] = found
                self.define(("lane", found.ident, number, mesh._layout))
        return found

    def define(self, definition: tuple[Any, ...]) -> None:
        """Tells every worker, before all later commands. Definitions are never undone."""
        self._defs.append(definition)

    def need_store(self) -> None:
        """Before the first collective: starts what communicators meet through."""
        if not self._has_store:
            self._has_store = True
            self.define(("store", *self.backend.open_store()))

    def need_peers(self) -> None:
        """Before the first move between workers: tells each of the others."""
        if not self._has_peers:
            self._has_peers = True
            self.define(("peers", self.backend.handle()))

    def host_name(self, index: int) -> str:
        return self.backend.host_name(index)

    # -- commands

    def later(self, action: Callable[[], None]) -> None:
        """Runs `action` now, or with the next command when the collector came in the middle of one."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            self._later.append(action)
        else:
            action()

    def _catch_up(self) -> None:
        while self._later:
            self._later.pop(0)()

    def emit(self, lane: Lane, command: tuple[Any, ...]) -> None:
        """Appends a command for the workers of the lane."""
        recording = self.recording
        if recording is not None and recording.thread == threading.get_ident():
            recording.add(lane, command)
            return
        if self._later:
            self._catch_up()
        with self.lock:
            if self.closed:
                raise RuntimeError(f"the tensor engine of {self.name} was shut down by exit()")
            if lane is not self._lane:
                self._open(lane)
            self._commands.append(command)
            self._count += 1
            if self._count >= BATCH and not self.held:
                self._flush()
                return
        if not self._timed:
            self._timed = True
            self.backend.call_later(PAUSE, self._on_time)

    def _open(self, lane: Lane) -> None:
        self._lane = lane
        self._commands = []
        self._segments.append((lane.ident, self._issued + self._count, self._commands))
        if self._touched is None:
            self._touched = lane.mesh
        elif self._touched is not lane.mesh:
            self._touched = False

    def _on_time(self) -> None:
        if not self.lock.acquire(blocking=False):  # somebody is at it; this thread must not wait
            self.backend.call_later(PAUSE, self._on_time)
            return
        try:
            self._timed = False
            if self._count and not self.held and not self.closed:
                self._flush()
        finally:
            self.lock.release()

    def _take(self, mesh: Any = None) -> tuple[Batch, Slice | None]:
        """The pending batch, and the workers it is for. `mesh`: workers who get it in any case."""
        for lane in list(self.lanes.values()):
            if lane.dead:
                if lane is not self._lane:
                    self._open(lane)
                self._commands.append((DELETE, 0, (), (), lane.take_dead()))
        touched = self._touched
        whole = self._defs or touched is False or (mesh is not None and touched not in (None, mesh))
        target = None if whole else touched or mesh
        batch = (self._defs, self._segments)
        self._defs, self._segments, self._commands = [], [], []
        self._lane = self._touched = None
        self._issued += self._count
        self._count = 0
        return batch, None if target is None or len(target.processes) == self.size else target.processes

    def _flush(self) -> None:
        batch, ranks = self._take()
        if batch[0] or batch[1]:
            self.backend.post(batch, ranks)

    def flush(self) -> None:
        """Sends what is pending."""
        with self.lock:
            if not self.closed:
                self._flush()

    def pending(self) -> int:
        return self._count

    def discard(self) -> None:
        """Forgets pending commands (not definitions)."""
        with self.lock:
            self._segments, self._commands, self._lane, self._touched, self._count = [], [], None, None, 0

    def hold(self) -> None:
        with self.lock:
            if not self.held:
                self._flush()
            self.held += 1

    def release(self, send: bool) -> None:
        with self.lock:
            self.held -= 1
            if not self.held:
                if send:
                    self._flush()
                else:
                    self.discard()

    # -- questions

    def ask(self, mesh: Any, question: tuple[Any, ...], decode: Callable[[list[Any]], Any]) -> Future[Any]:
        """Sends what is pending and a question to the workers of `mesh`; `decode` makes the value of the answers."""
        self._may_ask()
        with self.lock:
            answers = self.backend.ask(*self._pose(mesh), question)
        return mapped(answers, decode)

    def _pose(self, mesh: Any) -> tuple[Batch, Slice | None]:
        """Before a question to the workers of `mesh`: what is pending, for them alone. Under the lock."""
        if self.closed:
            raise RuntimeError(f"the tensor engine of {self.name} was shut down by exit()")
        batch, ranks = self._take(mesh)
        if ranks is None and len(mesh.processes) != self.size:  # the commands concern others too
            if batch[0] or batch[1]:
                self.backend.post(batch, None)
            batch, ranks = ([], []), mesh.processes
        return batch, ranks

    def ask_each(self, mesh: Any, question: tuple[Any, ...], decode: Callable[[Any], Any]) -> Iterator[Future[Any]]:
        """`ask`, with one future for each answer, in the order of arrival."""
        self._may_ask()
        with self.lock:
            answers = self.backend.ask_each(*self._pose(mesh), question)
        return iter([mapped(answer, decode) for answer in answers])

    def ask_port(self, mesh: Any, question: tuple[Any, ...], port: Any) -> None:
        """`ask`, with the answers sent to a port of the user, tagged with their rank."""
        self._may_ask()
        with self.lock:
            self.backend.ask_port(*self._pose(mesh), question, port)

    def _may_ask(self) -> None:
        if self.held or self.recording is not None:
            raise NotImplementedError("fetching results during a coalescing block is not supported")

    def failure(self, errors: Sequence[Any]) -> RemoteException:
        """The exception for what workers reported: the earliest failure that is no consequence of another's."""
        self.reported = True
        known = [e for e in errors if e is not None]
        origin = min((e for e in known if e.text), key=lambda e: (e.order, e.rank), default=None)
        error = origin or known[0]
        return RemoteException(error.text or "an input of a collective failed on another worker",
                               sites.frames(error.site), error.rank)  # fmt: skip

    def close(self, timeout: float = 60.0) -> None:
        """Waits for everything issued, raises an error nobody has seen, ends the workers."""
        with self.lock:
            if self.closed:
                return
        try:
            errors = self.ask(self.mesh, ("finish",), lambda answers: answers).get(timeout=timeout)
            found = [e for e in errors if e is not None]
            if found and not self.reported:
                raise self.failure(found)
        finally:
            with self.lock:
                self.closed = True
            self.backend.close()


def mapped(inner: Future[Any], decode: Callable[[Any], Any]) -> Future[Any]:
    """A future of `decode(result)`, evaluated by its first observer."""
    out: Future[Any] = Future._make(inner._start)  # an answer of a stream is claimed by its first observer
    out._patient = inner._patient

    def settle() -> None:
        out._settle_lazily(lambda: decode(inner._result()))

    inner._on_ready(settle)
    return out
