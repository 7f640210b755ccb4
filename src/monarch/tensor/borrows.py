"""Borrows: a tensor of one stream, used on another for a while."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

from monarch.tensor import checks, sites
from monarch.tensor.codes import GIVE_BACK, LEND, RESUME, TAKE
from monarch.tensor.handle import DROPPED, FROZEN, LENT, UNUSED, Group, Tensor, make

_numbers = itertools.count(1)


class Loan:
    """What both sides of a borrow know. `origin`: the owner's group; `group`: the borrower's."""

    def __init__(self, stream: Any, t: Tensor, mutable: bool, site: int) -> None:
        self.stream, self.tensor, self.mutable, self.site = stream, t, mutable, site
        self.ident = next(_numbers)
        self.origin = t._group
        self.lane = self.origin.lane.engine.lane(self.origin.lane.mesh, stream)
        self.group = Group(self.lane)
        self.group.origin = self
        self.group.flags = UNUSED | (0 if mutable else FROZEN)
        self.used = self.dropped = False
        self.value = 0  #: the borrower's first value id

    def first_use(self) -> None:
        """The borrower's stream waits for the owner's work up to the borrow."""
        if self.used:
            return
        self.used = True
        self.group.flags &= ~UNUSED
        lane = self.lane
        lane.engine.emit(lane, (TAKE, sites.here(), (), (self.value,), lane.take_dead(), self.ident))

    def end(self) -> None:
        if self.dropped:
            return
        self.dropped = True
        recording = self.lane.engine.recording
        if recording is not None:
            recording.check_drop(self.group, loan=self)
        origin, site = self.origin, sites.here()
        engine = self.lane.engine
        if self.used and not engine.closed:
            written = tuple(self.group.members) or ((self.value,) if not self.group.flags & DROPPED else ())
            engine.emit(self.lane, (GIVE_BACK, site, written[:1], (), self.lane.take_dead(), self.ident, self.mutable))
        self.group.drop(site)
        origin.lent.remove(self)
        if not origin.lent:
            # an immutably borrowed tensor that was lent on stays frozen by its own borrow
            origin.flags &= ~(LENT | FROZEN)
            if origin.origin is not None and not origin.origin.mutable:
                origin.flags |= FROZEN
        if not engine.closed:
            lane = origin.lane
            ids = (self.tensor._ref.ident,)
            engine.emit(lane, (RESUME, site, ids, (), lane.take_dead(), self.ident, self.used, self.mutable))
        self.tensor = None  # type: ignore[assignment]


class Borrow:
    """The right to use a tensor on another stream; ends with `drop()` or its `with` block."""

    def __init__(self, loan: Loan) -> None:
        self._loan = loan

    def drop(self) -> None:
        """Ends the borrow: the borrowed tensor and its aliases are dropped, the owner may go on. Idempotent."""
        self._loan.end()

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.drop()

    def __del__(self) -> None:
        loan = getattr(self, "_loan", None)
        if loan is None or loan.dropped:
            return
        try:
            engine = loan.lane.engine
            if not engine.closed:
                warnings.warn(
                    "a Borrow was destroyed without drop(). It was taken at:\n"
                    f"{sites.text(loan.site)}and is dropped now, at:\n{sites.text(sites.here())}",
                    UserWarning,
                    stacklevel=2,
                )
            engine.later(loan.end)
        except (TypeError, AttributeError, ImportError):  # the interpreter is ending
            pass


def borrow(stream: Any, t: Any, mutable: bool) -> tuple[Tensor, Borrow]:
    """See `Stream.borrow`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"borrow: expected a distributed tensor, not {type(t).__name__}")
    group = t._group
    if group.flags & DROPPED:
        error = checks.refusal(borrow, [t], {}, group.lane, ())
        assert error is not None
        raise error
    if group.flags & LENT:
        where = "".join(sites.text(b.site) for b in group.lent)
        raise RuntimeError(f"Cannot borrow this tensor: it is borrowed mutably. That borrow was taken at:\n{where}")
    if mutable and group.flags & FROZEN:
        live = list(group.lent) or [group.origin]
        where = "".join(sites.text(b.site) for b in live)
        raise RuntimeError(f"Cannot borrow this tensor mutably: it is borrowed already, at:\n{where}")
    if group.flags & UNUSED:
        group.origin.first_use()
    loan = Loan(stream, t, mutable, sites.here())
    out = make(t._meta, loan.group)
    loan.value = out._ref.ident
    lane = group.lane
    lane.engine.emit(lane, (LEND, loan.site, (t._ref.ident,), (), lane.take_dead(), loan.ident))
    group.lent.append(loan)
    group.flags |= LENT if mutable else FROZEN
    return out, Borrow(loan)
