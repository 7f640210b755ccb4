"""The ownership tree, as data: who owns what here, and what follows from each event.

The contract

    Every mesh has one owner: the actor whose code spawned it. No hand-over.
    An actor leaves "running" once: to "failed" (its owner is told) or to "stopped" (its owner asked, or is gone).
    When an actor ends, what it owns is stopped first, actors before processes, newest first; then it cleans up.
    A failure of a rank is handled once, by the owner's handler; unhandled, it is the owner's own failure.
    A mesh that its owner is stopping has no failures any more. A mesh whose processes are all gone is forgotten.

Each process holds the part of the tree that concerns it: the actors that live in it (`Member`) and the meshes that
they own (`Mesh`), wherever the ranks of those meshes live. The roots are members without an owner.

A method is a transition: it takes an event, changes the tree, and returns what must be done (`Effect`s), in order.
Nothing here waits, sends, or reads a clock: tests run whole clusters of these trees against each other in memory,
and the runtime (cell.py) only feeds events in and carries effects out. Callers hold `lock`.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Union


class Owner(NamedTuple):
    """An actor somewhere: its process, and its id there."""

    node: int
    actor: int


class Mesh:
    """A mesh owned by an actor of this process. `ranks` maps each process to the rank that lives there."""

    __slots__ = ("failed", "gone", "handle", "hosts", "is_procs", "key", "owner", "ranks", "stopping")

    def __init__(
        self, key: int, owner: int, ranks: dict[int, int], is_procs: bool, handle: Any, hosts: dict[int, set[int]]
    ) -> None:
        self.key, self.owner, self.ranks, self.is_procs, self.handle = key, owner, ranks, is_procs, handle
        self.hosts = hosts  #: another host -> the processes there; empty when all are on this host
        self.stopping = False
        self.failed: set[int] = set()  #: ranks
        self.gone: set[int] = set()  #: processes that ended


class Member:
    """An actor that lives in this process."""

    __slots__ = ("ident", "owned", "owner", "state")

    def __init__(self, ident: int, owner: Owner | None) -> None:
        self.ident, self.owner = ident, owner
        self.state = "running"
        self.owned: dict[int, Mesh] = {}  #: by key, oldest first


# -- effects


class Ask(NamedTuple):
    """Ask the handler of `actor` about the failure of `rank` of its mesh."""

    actor: int
    mesh: Mesh
    rank: int


class Report(NamedTuple):
    """Tell the owner that `actor` failed."""

    actor: int
    to: Owner


class Stop(NamedTuple):
    """Stop a mesh, all ranks."""

    mesh: Mesh


class End(NamedTuple):
    """End an actor of this process, as stopped: its owner is gone."""

    actor: int


class CleanUp(NamedTuple):
    """Nothing that `actor` owned is left: its own cleanup may run."""

    actor: int


Effect = Union[Ask, Report, Stop, End, CleanUp]


class OwnerEnded(RuntimeError):
    """An actor that is ending cannot own new meshes."""


class Tree:
    """The part of the ownership tree that one process holds. See the module's text."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.lock = threading.RLock()
        self.poisoned: set[int] = set()  #: processes on which an actor owned here failed

    # -- growth

    def add(self, ident: int, owner: Owner | None) -> None:
        """An actor starts in this process; None makes it a root."""
        self.members[ident] = Member(ident, owner)

    def own(
        self,
        owner: int,
        key: int,
        ranks: dict[int, int],
        is_procs: bool,
        handle: Any = None,
        hosts: dict[int, set[int]] | None = None,
    ) -> Mesh:
        """`owner` spawns a mesh, from now on its own. Raises OwnerEnded when it is ending."""
        member = self.members.get(owner)
        if member is None or member.state != "running":
            raise OwnerEnded("an actor that is ending cannot spawn: nobody would own the new mesh")
        mesh = member.owned[key] = Mesh(key, owner, ranks, is_procs, handle, hosts or {})
        return mesh

    # -- failures

    def failed(self, owner: int, key: int, rank: int) -> list[Effect]:
        """Rank `rank` of a mesh said that it failed."""
        member = self.members.get(owner)
        mesh = member.owned.get(key) if member is not None and member.state == "running" else None
        if mesh is None or mesh.stopping or rank in mesh.failed:
            return []
        mesh.failed.add(rank)
        for node, r in mesh.ranks.items():
            if r == rank:
                self.poisoned.add(node)
        return [Ask(owner, mesh, rank)]

    def process_ended(self, node: int, failed: bool) -> list[Effect]:
        """A process is gone. Owners are asked about its ranks, unless its end was an orderly one.

        An owner of both a process and actors on it is asked about the actors only: it is one death.
        """
        self.poisoned.discard(node)
        effects: list[Effect] = []
        for member in list(self.members.values()):
            if member.owner is not None and member.owner.node == node and member.state == "running":
                effects.append(End(member.ident))
                continue
            asked = False
            for mesh in sorted(member.owned.values(), key=lambda m: m.is_procs):
                rank = mesh.ranks.get(node)
                if rank is None or node in mesh.gone:
                    continue
                mesh.gone.add(node)
                if failed and member.state == "running" and not mesh.stopping and rank not in mesh.failed:
                    mesh.failed.add(rank)
                    if not (mesh.is_procs and asked):
                        effects.append(Ask(member.ident, mesh, rank))
                        asked = True
                if len(mesh.gone) == len(mesh.ranks):
                    effects += self._forget(member, mesh)
        return effects

    def health(self, owner: int, key: int) -> set[int]:
        """The ranks of a mesh that are known to have failed. KeyError for a mesh that is not owned here."""
        return set(self.members[owner].owned[key].failed)

    # -- ends

    def stop(self, owner: int, key: int) -> list[Effect]:
        """The owner wants a mesh stopped. Nothing the second time."""
        member = self.members.get(owner)
        mesh = member.owned.get(key) if member is not None else None
        if mesh is None or mesh.stopping:
            return []
        mesh.stopping = True
        return [Stop(mesh)]

    def stopped(self, owner: int, key: int) -> list[Effect]:
        """A mesh is gone, all ranks: the last answer to a stop came, or nobody waits any longer."""
        member = self.members.get(owner)
        mesh = member.owned.get(key) if member is not None else None
        return [] if member is None or mesh is None else self._forget(member, mesh)

    def end(self, ident: int, failed: bool) -> list[Effect]:
        """An actor leaves "running": by its own failure, or because it was told to stop. Nothing the second time."""
        member = self.members.get(ident)
        if member is None or member.state != "running":
            return []
        member.state = "failed" if failed else "stopped"
        effects: list[Effect] = []
        if failed and member.owner is not None:
            effects.append(Report(ident, member.owner))
        newest_first = list(member.owned.values())[::-1]
        for mesh in sorted(newest_first, key=lambda m: m.is_procs):
            effects += self.stop(ident, mesh.key)
        if not member.owned:
            effects.append(CleanUp(ident))
        return effects

    def closed(self, ident: int) -> None:
        """An actor's cleanup is done, or nobody waits for it any longer."""
        self.members.pop(ident, None)

    def _forget(self, member: Member, mesh: Mesh) -> list[Effect]:
        del member.owned[mesh.key]
        return [CleanUp(member.ident)] if member.state != "running" and not member.owned else []

    # -- questions

    def failures_of(self, key: int) -> set[int]:
        """The failed ranks of a mesh that some actor of this process owns; empty for the meshes of others."""
        for member in self.members.values():
            mesh = member.owned.get(key)
            if mesh is not None:
                return mesh.failed
        return set()

    def on_host(self, host: int) -> set[int]:
        """The processes on another host that meshes owned here need; they are lost when the host is."""
        meshes = [mesh for member in self.members.values() for mesh in member.owned.values()]
        return {node for mesh in meshes for node in mesh.hosts.get(host, set()) - mesh.gone}

    def is_running(self, ident: int) -> bool:
        member = self.members.get(ident)
        return member is not None and member.state == "running"

    def is_live(self, owner: int, key: int) -> bool:
        """The mesh is owned here by a running actor, and nobody asked for its end."""
        member = self.members.get(owner)
        mesh = member.owned.get(key) if member is not None and member.state == "running" else None
        return mesh is not None and not mesh.stopping

    def owned_by(self, ident: int) -> list[Mesh]:
        """What an actor owns and is not stopping, oldest first."""
        member = self.members.get(ident)
        return [] if member is None else [m for m in member.owned.values() if not m.stopping]
