"""Labels and identifiers: what people call things, and what is unique."""

from __future__ import annotations

import random
import re
from typing import Any


def label_of(name: str) -> str:
    """A spawn name as a label: lower case, `[a-z0-9_-]`, a letter first, at most 63 characters, else `nil`."""
    kept = re.sub(r"[^a-z0-9_-]", "", name.lower())
    return re.sub(r"^[^a-z]+", "", kept)[:63] or "nil"


def suffix() -> str:
    alphabet = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
    rng = random.SystemRandom()
    return "".join(rng.choice(alphabet) for _ in range(12))


class Uid:
    """An identifier: an instance (`label<suffix>` or `<suffix>`) or a singleton (`label`)."""

    __slots__ = ("_suffix", "label")

    def __init__(self, label: str | None, suffix: str | None) -> None:
        self.label = label
        self._suffix = suffix

    @classmethod
    def anonymous(cls) -> Uid:
        return cls(None, suffix())

    @classmethod
    def instance(cls, label: str | None = None) -> Uid:
        return cls(None if label is None else label_of(label), suffix())

    @classmethod
    def from_string(cls, text: str) -> Uid:
        match = re.fullmatch(r"([A-Za-z][\w-]*)?(?:<([0-9A-Za-z]+)>)?", text) if isinstance(text, str) else None
        if match is None or not text:
            raise ValueError(f"bad identifier {text!r}: expected label<suffix>, <suffix> or label")
        return cls(match[1], match[2])

    @property
    def is_instance(self) -> bool:
        return self._suffix is not None

    @property
    def is_singleton(self) -> bool:
        return self._suffix is None

    def __str__(self) -> str:
        return f"{self.label or ''}<{self._suffix}>" if self._suffix is not None else str(self.label)

    def __repr__(self) -> str:
        return f"Uid({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uid) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return Uid, (self.label, self._suffix)


class ProcId:
    """The identifier of a process: a Uid."""

    __slots__ = ("uid",)

    def __init__(self, uid: Uid) -> None:
        self.uid = uid

    @classmethod
    def from_string(cls, text: str) -> ProcId:
        return cls(Uid.from_string(text))

    @property
    def label(self) -> str | None:
        return self.uid.label

    def __str__(self) -> str:
        return str(self.uid)

    def __repr__(self) -> str:
        return f"ProcId({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcId) and self.uid == other.uid

    def __hash__(self) -> int:
        return hash(self.uid)

    def __reduce__(self) -> Any:
        return ProcId, (self.uid,)


class ActorAddr:
    """The address of one actor: opaque, unique and stable. `str` is `<actor>.<proc>@<location>`."""

    __slots__ = ("actor_name", "addr", "proc_name")

    def __init__(self, *, addr: str, proc_name: str, actor_name: str) -> None:
        if addr.startswith("local:"):
            addr = "inproc://" + addr[6:]
        self.addr, self.proc_name, self.actor_name = addr, proc_name, actor_name

    @classmethod
    def from_string(cls, text: str) -> ActorAddr:
        match = re.fullmatch(r"([^.@]+)\.([^@]+)@(.+)", text)
        if match is None:
            raise ValueError(f"bad actor address {text!r}: expected <actor>.<proc>@<location>")
        return cls(addr=match[3], proc_name=match[2], actor_name=match[1])

    @property
    def uid(self) -> Uid | str:
        return self.actor_name if "<" not in self.actor_name else Uid.from_string(self.actor_name)

    pid = uid

    @property
    def label(self) -> str:
        return self.actor_name.partition("<")[0]

    @property
    def proc_label(self) -> str:
        return self.proc_name.partition("<")[0]

    @property
    def proc_id(self) -> str:
        return f"{self.proc_name}@{self.addr}"

    @property
    def is_root(self) -> bool:
        return "<" not in self.actor_name

    def __str__(self) -> str:
        return f"{self.actor_name}.{self.proc_name}@{self.addr}"

    def __repr__(self) -> str:
        return f"ActorAddr({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorAddr) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return ActorAddr.from_string, (str(self),)
