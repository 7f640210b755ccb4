"""The user's bootstrap callable: runs once in a new process, before any actor's `__init__`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from monarch.runtime.cell import Cell, Event, Spec
from monarch.runtime.failure import MeshFailure
from monarch.runtime.future import Future
from monarch.runtime.node import RANK_MASK, Node
from monarch.runtime.ownership import Owner
from monarch.wire import pickling
from monarch.wire.frames import Frame


class BootstrapCell(Cell):
    """The context that a bootstrap callable runs in; owner of what it spawns, for the life of the process."""

    IDENT = 2

    def __init__(self, node: Node, orders: dict[str, Any], frame: Frame) -> None:
        spec = Spec(
            name="bootstrap",
            full_name=f"bootstrap-{node.name}",
            class_name="bootstrap",
            labels=tuple(orders["labels"]),
            sizes=tuple(orders["sizes"]),
            owner_node=orders["owner"][0],
            owner_host=tuple(orders["owner"][1]),
            owner_actor=orders["owner"][2],
            parent="<root>",
            creator=None,
            is_async=False,
            mesh=orders["mesh"],
        )
        super().__init__(node, self.IDENT, orders["rank"], spec)
        self._parts = frame.parts
        self.state = "running"

    def deliver(self, frame: Frame) -> None:
        self.node.reply_dead(frame, "this is not an actor")

    def owner(self) -> Owner | None:
        return None  # it has no end of its own: it lives as long as the process

    def reported_mesh(self) -> int:
        return self.node.id & ~RANK_MASK

    def post_event(self, event: Event) -> None:
        if isinstance(event, MeshFailure):
            self.tell_owner(event.cause, event.report(), again=True)

    def request_stop(self, reason: str, drain: bool = True) -> Future[None]:
        self.stopped._settle(None)
        return self.stopped

    def pending(self) -> list[Frame]:
        return []

    def start(self, done: Callable[[BaseException | None], None]) -> None:
        self.node.cells[self.id] = self
        threading.Thread(target=self._run, args=(done,), name="monarch-bootstrap", daemon=True).start()

    def _run(self, done: Callable[[BaseException | None], None]) -> None:
        self.set_here(None, 0)
        error: BaseException | None = None
        try:
            function = pickling.loads(self._parts[2], self._parts[3:])
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except BaseException as e:
            error = e
        done(error)


async def _awaited(thing: Any) -> Any:
    return await thing


class PlainSender(BootstrapCell):
    """What threads of a worker send as when no actor's context reached them."""

    IDENT = 1

    def __init__(self, node: Node, orders: dict[str, Any]) -> None:
        super().__init__(node, orders, Frame(0, 0, 0))
        self.display = f"<plain thread of {node.name}>"
