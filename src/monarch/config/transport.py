"""Which kind of socket processes talk over."""

from __future__ import annotations

import enum
import re


class ChannelTransport(enum.Enum):
    """How processes reach each other. Pass a member, its short name or an address to `enable_transport`."""

    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    Tls = "tls"
    Local = "local"
    Unix = "unix"

    def __str__(self) -> str:
        return self.value


_NAMES = {
    "tcp": ChannelTransport.TcpWithHostname,
    "ipc": ChannelTransport.Unix,
    "unix": ChannelTransport.Unix,
    "tls": ChannelTransport.Tls,
    "local": ChannelTransport.Local,
    "metatls": ChannelTransport.MetaTlsWithIpV6,
    "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
    **{t.value: t for t in ChannelTransport},
}
_URL = re.compile(r"(tcp|tls|metatls|ipc|unix|inproc)://.+")


class BindSpec:
    """A transport, or an explicit address to bind. Equal for equal specs.

    TypeError for something that is neither a ChannelTransport nor text; ValueError for text that names neither.
    """

    __slots__ = ("spec",)
    spec: ChannelTransport | str

    def __init__(self, spec: ChannelTransport | str | BindSpec) -> None:
        if isinstance(spec, BindSpec):
            spec = spec.spec
        if isinstance(spec, str):
            if spec in _NAMES:
                spec = _NAMES[spec]
            elif not _URL.fullmatch(spec):
                raise ValueError(
                    f"unknown transport {spec!r}: expected one of {', '.join(sorted(_NAMES))}, or an address such as "
                    "tcp://10.0.0.1:0"
                )
        elif not isinstance(spec, ChannelTransport):
            raise TypeError(f"a transport is a ChannelTransport or a string, not {type(spec).__name__}")
        self.spec = spec

    @property
    def over_network(self) -> bool:
        """True when it is not for one machine's unix sockets or memory only."""
        return str(self).startswith(("tcp", "tls", "metatls"))

    def __str__(self) -> str:
        return str(self.spec)

    def __repr__(self) -> str:
        return f"BindSpec({self.spec!s})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BindSpec) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)
