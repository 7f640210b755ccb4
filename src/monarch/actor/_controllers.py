"""Singletons by name, in the client's process: `get_or_spawn_controller`."""

from __future__ import annotations

import queue
import threading
from typing import Any, TypeVar

from monarch.actor._procs import own_proc
from monarch.runtime import client
from monarch.runtime.calls import OneCall
from monarch.runtime.cell import Cell, Event, Here, Spec, dump_error, here
from monarch.runtime.client import current_host, current_node
from monarch.runtime.failure import MeshFailure
from monarch.runtime.future import Future
from monarch.runtime.node import Host, Node, NodeDown
from monarch.wire import pickling
from monarch.wire.frames import CONTROL, ERROR, Frame

T = TypeVar("T")


class ControllerCell(Cell):
    """The hidden owner of all controllers: handles their failures by remembering them."""

    def __init__(self, node: Node) -> None:
        root = client.root()
        spec = Spec(
            "controllers", "controllers-0", "monarch.Controllers", (), (), node.id, tuple(current_host()), root.id,
            root.display, None, False, None,
        )  # fmt: skip
        super().__init__(node, 3, 0, spec)
        self.state = "running"
        self.known: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.requests: queue.SimpleQueue[tuple[Frame, str]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="monarch-controllers", daemon=True).start()

    def deliver(self, frame: Frame) -> None:
        self.node.reply_dead(frame, "this is not an actor")

    def pending(self) -> list[Frame]:
        return []

    def post_event(self, event: Event) -> None:
        if not isinstance(event, MeshFailure):
            return
        for name, mesh in self.known.items():
            if mesh._full_name == event.mesh_name:
                self.failed.setdefault(name, event.report())

    def request_stop(self, reason: str, drain: bool = True) -> Future[None]:
        return Future._of(None)

    def _serve(self) -> None:
        here.set(Here(self, (), (), 0))
        while True:
            frame, name = self.requests.get()
            try:
                if name in self.failed:
                    raise RuntimeError(f"Failure on {name}: {self.failed[name]}")
                if name not in self.known:
                    cls, args, kwargs = pickling.loads(frame.parts[2], frame.parts[3:])
                    self.known[name] = own_proc().spawn(name, cls, *args, **kwargs)
                self.node.reply(frame, 0, (b"", pickling.dump_bytes(self.known[name])))
            except BaseException as e:
                self.node.reply(frame, ERROR, (b"", dump_error(e, f"Controller {name!r} cannot be had.")))


_lock = threading.Lock()


def install(node: Node) -> None:
    """In the client: answers requests for controllers."""

    def controller(frame: Frame, name: str) -> None:
        with _lock:
            cell = node.cells.get(3)
            if cell is None:
                cell = node.cells[3] = ControllerCell(node)
        assert isinstance(cell, ControllerCell)
        cell.requests.put((frame, name))

    node.control["controller"] = controller


def get_or_spawn_controller(name: str, Class: type[T], *args: Any, **kwargs: Any) -> Future[T]:
    """The one actor called `name` in the whole job; the first call spawns it in the client's process.

    Later calls return the same actor and ignore class and arguments. The future raises ActorError for a bad class or
    arguments, and for a name whose controller failed.
    """
    node = current_node()
    root, host = client.orders().get("root") or (node.id, tuple(current_host()))
    payload = pickling.dumps((Class, args, kwargs))
    port = OneCall(node, root, lambda n: "<root>", f"get_or_spawn_controller({name!r})")
    body = pickling.dump_bytes(("controller", name))
    frame = Frame(CONTROL, root, node.id, 0, (b"", body, payload.stream(), *payload.buffers), reply=port.ident)
    try:
        node.send(frame, Host(*host))
    except NodeDown as e:
        port.node_down(root, e.exit)
    return port.future
