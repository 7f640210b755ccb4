"""Source lines for tracebacks through code that travelled by value.

A class of the script, or of a notebook cell, may fail in a process whose machine does not have its file. Before such a
traceback is formatted, the lines are fetched from the client, once per file, and put where Python looks for them.
"""

from __future__ import annotations

import linecache
import os
import sys

from monarch.runtime import cell, client
from monarch.runtime.calls import OneCall
from monarch.runtime.client import current_node
from monarch.runtime.node import Host, Node, NodeDown
from monarch.wire import pickling
from monarch.wire.frames import CONTROL, Frame

_SECONDS = 2.0
_asked: set[str] = set()


def fetch(error: BaseException) -> None:
    """Fetches what the tracebacks of `error` and its causes need. Never raises; waits at most two seconds a file."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        todo += [e.__cause__, e.__context__]
        trace = e.__traceback__
        while trace is not None:
            filename = trace.tb_frame.f_code.co_filename
            if filename not in _asked and filename not in linecache.cache and not os.path.exists(filename):
                _asked.add(filename)
                _fetch_one(filename)
            trace = trace.tb_next


def _fetch_one(filename: str) -> None:
    node = current_node()
    root, host = client.orders()["root"]
    port = OneCall(node, root, lambda n: "<root>", "source")
    body = pickling.dump_bytes(("source", filename))
    try:
        node.send(Frame(CONTROL, root, node.id, 0, (b"", body), reply=port.ident), Host(*host))
        lines = port.future.get(timeout=_SECONDS)
    except (NodeDown, TimeoutError, RuntimeError):
        return
    finally:
        node.close_port(port.ident)
    if lines:
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)


def install(node: Node) -> None:
    """In the client: answers requests for lines. In a worker: fetches before errors are formatted."""
    if client.is_worker():
        cell.fetch_sources = fetch
        return

    def source(frame: Frame, filename: str) -> None:
        # Only what this program runs: files its modules came from, and what the interpreter itself keeps (notebooks).
        known = filename in linecache.cache or any(
            getattr(m, "__file__", None) == filename for m in list(sys.modules.values())
        )
        lines = linecache.getlines(filename) if known else []
        node.reply(frame, 0, (b"", pickling.dump_bytes(lines)))

    node.control["source"] = source
