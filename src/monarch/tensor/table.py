"""A device mesh as a grid of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.tensor.mesh import DeviceMesh


def to_table(mesh: DeviceMesh) -> str:
    """The last dimension across, the others down; each cell is `<host>.gpu[<i>]`."""
    names, sizes = mesh.names, mesh.processes.sizes
    per_host = mesh._engine.per_host
    cells = [f"{mesh._engine.host_name(r // per_host)}.gpu[{r % per_host}]" for r in mesh.processes]
    across = sizes[-1] if sizes else 1
    rows = [cells[i : i + across] for i in range(0, len(cells), across)]
    heads = []
    for r in range(len(rows)):
        parts, rest = [], r
        for name, n in reversed(list(zip(names[:-1], sizes[:-1]))):
            rest, at = divmod(rest, n)
            parts.append(f"{name} {at}")
        heads.append(" ".join(reversed(parts)))
    left = max((len(h) for h in heads), default=0)
    width = max([len(c) for c in cells] + [len(str(across))])
    body = [" " * left + "  " + "  ".join(str(i).center(width) for i in range(across)).rstrip()]
    body += [h.ljust(left) + "  " + "  ".join(c.center(width) for c in row).rstrip() for h, row in zip(heads, rows)]
    line = max(map(len, body))
    title = (names[-1] if names else "").center(line).rstrip()
    return "\n".join([title, *body])
