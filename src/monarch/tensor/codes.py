"""Codes of commands that are not operators, and what workers report of failures.

A command is `(code, site, inputs, outputs, dead, *rest)`: `site` is the number of the client's stack, inputs and
outputs are value ids, `dead` are ids to free first. Codes from 0 up are operator templates.
"""

from __future__ import annotations

from typing import NamedTuple

DELETE = -1
CONSTANT = -2  #: rest: the tensor
RANK = -3  #: rest: labels and slice of a mesh, dims to combine (None: the process index)
CALL = -4  #: rest: function id, packed arguments, mutated inputs, number of leaves, which of them are tensors
REDUCE = -5  #: rest: dims, reduction, scatter, where the result goes, its shape, dtype and device
SEND = -6  #: rest: token, (sender, receiver) pairs
LEND = -7  #: rest: borrow id; the owner's stream says how far it is
TAKE = -8  #: rest: borrow id; the borrower's stream waits for it
GIVE_BACK = -9  #: rest: borrow id; the borrower's stream says it is done
RESUME = -10  #: rest: borrow id; the owner's stream waits for it
REPLAY = -11
PIN = -12
ADOPT = -13
RECEIVE = -14  #: rest: token, pairs, device


class Failure(NamedTuple):
    """What a worker says of a value that is an error. `text` is empty where only the fact is known."""

    order: int
    site: int
    rank: int
    text: str
