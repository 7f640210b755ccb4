"""What waits for the answers to a call: one, all, or a stream of them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from monarch.runtime.errors import SupervisionError
from monarch.runtime.failure import OWNER_GONE, Exit, death_report
from monarch.runtime.future import Future
from monarch.runtime.node import Node, Port
from monarch.runtime.ports import decode
from monarch.wire.frames import DEAD, ERROR, Frame


def gone(exit: Exit, display: str, endpoint: str) -> SupervisionError:
    """The error for a target whose process is gone."""
    if exit.detail == OWNER_GONE:
        exit = exit._replace(detail=f"{OWNER_GONE}, for mesh {endpoint.rpartition('.')[0]}")
    text = exit.describe()
    return SupervisionError(death_report(display, text) if exit.failed else f"{display} {text}", endpoint)


def ended(reason: str, endpoint: str) -> SupervisionError:
    return SupervisionError(f"has status: stopped: {reason}", endpoint)


class OneCall(Port):
    """One target, one answer."""

    __slots__ = ("display", "endpoint", "future", "ident", "node", "target")

    def __init__(self, node: Node, target: int, display: Callable[[int], str], endpoint: str) -> None:
        self.node, self.target, self.display, self.endpoint = node, target, display, endpoint
        self.future: Future[Any] = Future._make()
        self.ident = node.open_port(self)

    def deliver(self, frame: Frame) -> None:
        self.node.close_port(self.ident)
        endpoint = self.endpoint
        self.future._settle_lazily(lambda: decode(frame, endpoint))

    def node_down(self, node: int, exit: Exit) -> None:
        if node == self.target:
            self.node.close_port(self.ident)
            self.future._settle(error=gone(exit, self.display(node), self.endpoint))

    def node_down_all(self, reason: str) -> None:
        self.future._settle(error=ended(reason, self.endpoint))


class ManyCall(Port):
    """One answer from each target; done when all are there, or as soon as a target is known to be dead.

    `finish(frames)` builds the result from the frames by dense rank, when it is first looked at.
    """

    def __init__(
        self,
        node: Node,
        targets: dict[int, int],
        display: Callable[[int], str],
        endpoint: str,
        finish: Callable[[list[Frame]], Any],
    ) -> None:
        self.node, self.targets, self.display, self.endpoint = node, targets, display, endpoint
        self.frames: list[Frame | None] = [None] * len(targets)
        self.left = len(targets)
        self.finish = finish
        self.future: Future[Any] = Future._make()
        self.future._patient = len(targets) > 1
        self.lock = threading.Lock()
        self.ident = node.open_port(self)

    def deliver(self, frame: Frame) -> None:
        rank = frame.rank
        with self.lock:
            if rank >= len(self.frames) or self.frames[rank] is not None:
                return  # an extra answer of the same rank
            self.frames[rank] = frame
            self.left -= 1
            left = self.left
        if frame.flags & DEAD:
            self._close()
            endpoint = self.endpoint
            self.future._settle_lazily(lambda: decode(frame, endpoint))
        elif left == 0:
            self._close()
            self.future._settle_lazily(self._collect)

    def _collect(self) -> Any:
        errors: list[tuple[int, BaseException]] = []
        for rank, frame in enumerate(self.frames):
            if frame is not None and frame.flags & ERROR:
                try:
                    decode(frame, self.endpoint)
                except BaseException as e:
                    errors.append((rank, e))
        if errors:
            first = errors[0][1]
            try:
                first.errors_by_rank = dict(errors)  # type: ignore[attr-defined]
            except AttributeError:
                pass
            raise first
        return self.finish([f for f in self.frames if f is not None])

    def node_down(self, node: int, exit: Exit) -> None:
        rank = self.targets.get(node)
        if rank is not None and self.frames[rank] is None:
            self._close()
            self.future._settle(error=gone(exit, self.display(node), self.endpoint))

    def node_down_all(self, reason: str) -> None:
        self.future._settle(error=ended(reason, self.endpoint))

    def _close(self) -> None:
        self.node.close_port(self.ident)


class StreamCall(Port):
    """Answers in arrival order. Each future takes the next one when it is first observed."""

    def __init__(self, node: Node, targets: dict[int, int], display: Callable[[int], str], endpoint: str) -> None:
        self.node, self.targets, self.display, self.endpoint = node, targets, display, endpoint
        self.lock = threading.Lock()
        self.arrived: collections.deque[Callable[[], Any]] = collections.deque()
        self.claims: collections.deque[Future[Any]] = collections.deque()
        self.answered: set[int] = set()
        self.ident = node.open_port(self)

    def deliver(self, frame: Frame) -> None:
        self._put(frame.rank, lambda: decode(frame, self.endpoint))

    def node_down(self, node: int, exit: Exit) -> None:
        rank = self.targets.get(node)
        if rank is not None:
            error = gone(exit, self.display(node), self.endpoint)

            def fail() -> Any:
                raise error

            self._put(rank, fail)

    def node_down_all(self, reason: str) -> None:
        error = ended(reason, self.endpoint)

        def fail() -> Any:
            raise error

        for rank in self.targets.values():
            self._put(rank, fail)

    def _put(self, rank: int, outcome: Callable[[], Any]) -> None:
        with self.lock:
            if rank in self.answered:
                return
            self.answered.add(rank)
            if len(self.answered) == len(self.targets):
                self.node.close_port(self.ident)
            if not self.claims:
                self.arrived.append(outcome)
                return
            future = self.claims.popleft()
        future._settle_lazily(outcome)

    def next_future(self) -> Future[Any]:
        future: Future[Any]

        def claim() -> None:
            with self.lock:
                if not self.arrived:
                    self.claims.append(future)
                    return
                outcome = self.arrived.popleft()
            future._settle_lazily(outcome)

        future = Future._make(claim)
        return future
