"""Whom another host must be, before anything it sends is parsed.

Three ways, chosen by what the user configured; nothing weaker is ever fallen back to:

    tls     both ends show a certificate that the authority `ca` signed (TLS 1.3)
    secret  both ends prove that they know one key, by a challenge (`auth.py`); nothing is encrypted
    open    anybody who can connect is trusted: on loopback only, or where `trust_remote_connections` is set

Knows configuration and certificates, no sockets.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional, Union

from monarch.config import store
from monarch.wire.addresses import Address

if TYPE_CHECKING:
    import ssl  # loaded only where TLS is spoken: it takes as long to import as all of this package

ANYBODY = "trust_all_connections"
LEAST_KEY = 16  #: bytes; whoever watches a handshake can try out short keys at leisure

Pem = Union[str, bytes, "os.PathLike[str]"]


class Untrusted(RuntimeError):
    """A connection that nothing would protect, to or from another machine."""


class Trust:
    """How this process and other hosts prove who they are. Make one with `of`."""

    __slots__ = ("_contexts", "authority", "identity", "secret")

    def __init__(self, secret: bytes | None, authority: Pem | None = None, identity: Pem | None = None) -> None:
        self.secret = secret
        self.authority = authority
        self.identity = identity
        self._contexts: dict[bool, ssl.SSLContext] = {}

    @property
    def kind(self) -> str:
        return "tls" if self.authority is not None else "secret" if self.secret is not None else "open"

    def address(self, where: Address) -> Address:
        """`where`, with TLS spelt out when that is what will be spoken."""
        return where._replace(scheme="tls") if self.authority is not None and where.scheme == "tcp" else where

    def context(self, listener: bool) -> ssl.SSLContext:
        """For one end of a TLS connection. ValueError names the file that cannot be used."""
        found = self._contexts.get(listener)
        if found is None:
            found = self._contexts[listener] = _context(self.authority, self.identity, listener)
        return found

    def check(self, host: str, who: str) -> None:
        """Refuses to talk to the numeric address `host` when nothing protects that. Raises Untrusted."""
        if self.kind != "open" or is_loopback(host):
            return
        if not store.effective("trust_remote_connections"):
            raise Untrusted(
                f"{who}: this is not a loopback address, and whoever can connect there could run code as this user. "
                "Set MONARCH_AUTH_KEY (or MONARCH_AUTH_KEY_FILE) to one secret on all hosts, or pass ca= and "
                "private_key= for TLS; MONARCH_TRUST_REMOTE_CONNECTIONS=1 trusts the network instead"
            )
        warnings.warn(f"{who}: anybody who can connect there can run code as this user", stacklevel=2)


def of(ca: Any, private_key: Any = None, scheme: str = "") -> Trust:
    """What the arguments `ca` and `private_key` of a worker loop or of an attach mean.

    `ca`: "trust_all_connections", or the authority's certificates (PEM: a path, text or bytes). `private_key`: this
    host's key and certificate (PEM, likewise); without it, the files `hyperactor_tls_key` and `hyperactor_tls_cert`.
    With "trust_all_connections" a `tls` scheme takes all from the `hyperactor_tls_*` files, and the key of the
    configuration (MONARCH_AUTH_KEY) is asked for where there is one. Raises ValueError for files that cannot be used,
    and NotImplementedError, which existing programs expect, for arguments that mean nothing.
    """
    secret = configured_secret()
    if ca == ANYBODY:
        if private_key is not None:
            raise NotImplementedError("private_key is for TLS: pass the authority's certificates as ca, too")
        if scheme != "tls":
            return Trust(secret)
        return Trust(secret, store.effective("hyperactor_tls_ca"), None)
    if not isinstance(ca, (str, bytes, os.PathLike)) or not ca or (isinstance(ca, bytes) and b"-----BEGIN" not in ca):
        raise NotImplementedError(f"ca must be {ANYBODY!r}, or a path or PEM of certificates, not {ca!r}")
    if private_key is not None and not isinstance(private_key, (str, bytes, os.PathLike)):
        raise TypeError(f"private_key must be a path or PEM, not {type(private_key).__name__}")
    out = Trust(secret, ca, private_key)
    out.context(True)  # so that a bad file is found here, not by the first who connects
    out.context(False)
    return out


def configured_secret() -> bytes | None:
    """The shared secret of MONARCH_AUTH_KEY or of the file MONARCH_AUTH_KEY_FILE; None when there is neither."""
    text = str(store.effective("auth_key"))
    path = str(store.effective("auth_key_file"))
    source = "MONARCH_AUTH_KEY"
    if not text and path:
        source = f"MONARCH_AUTH_KEY_FILE ({path})"
        try:
            with open(path) as f:
                if os.fstat(f.fileno()).st_mode & 0o077:
                    raise ValueError(f"{source}: others can read it; chmod 600 {path}")
                text = f.read().strip()
        except OSError as e:
            raise ValueError(f"{source}: {e.strerror}") from e
        if not text:
            raise ValueError(f"{source}: the file is empty")
    if not text:
        return None
    if len(text.encode()) < LEAST_KEY:
        raise ValueError(
            f"{source}: at least {LEAST_KEY} characters, for example of "
            "python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text.encode()


def is_loopback(host: str) -> bool:
    """For a numeric address. Unix sockets ("") are this machine's."""
    if not host:
        return True
    try:
        found: Union[ipaddress.IPv4Address, ipaddress.IPv6Address] = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped: Optional[ipaddress.IPv4Address] = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _context(authority: Pem | None, identity: Pem | None, listener: bool) -> ssl.SSLContext:
    import ssl

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listener else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the authority vouches for members of the cluster, not for machine names
    made.verify_mode = ssl.CERT_REQUIRED
    if listener:
        made.num_tickets = 0  # connections live long: no resumption, nothing to replay
    assert authority is not None
    try:
        with _as_file(authority) as path:
            made.load_verify_locations(path)
    except (OSError, ssl.SSLError) as e:
        raise ValueError(f"ca: cannot use {_shown(authority)} as an authority's certificates: {_why(e)}") from None
    key: Pem = identity if identity is not None else str(store.effective("hyperactor_tls_key"))
    chain: Pem | None = key if identity is not None and _has_certificate(identity) else None
    if chain is None:
        chain = str(store.effective("hyperactor_tls_cert"))
    try:
        with _as_file(key) as key_path, _as_file(chain) as chain_path:
            made.load_cert_chain(chain_path, key_path, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as e:
        raise ValueError(
            f"private_key: cannot use {_shown(key)} with the certificate in {_shown(chain)}: {_why(e)}"
        ) from None
    return made


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it for unattended use")


def _why(e: BaseException) -> str:
    return getattr(e, "strerror", None) or getattr(e, "reason", None) or str(e)


def _is_pem(given: Pem) -> bool:
    return isinstance(given, bytes) or (isinstance(given, str) and "-----BEGIN" in given)


def _shown(given: Pem) -> str:
    return "the PEM given" if _is_pem(given) else repr(os.fspath(given))


def _has_certificate(given: Pem) -> bool:
    if _is_pem(given):
        text = given if isinstance(given, bytes) else str(given).encode()
    else:
        try:
            with open(given, "rb") as f:
                text = f.read()
        except OSError:
            return True  # loading it will say what is wrong
    return b"BEGIN CERTIFICATE" in text


@contextlib.contextmanager
def _as_file(given: Pem) -> Iterator[str]:
    """A path: ssl reads keys from files only."""
    if not _is_pem(given):
        yield os.fspath(given)  # type: ignore[misc]
        return
    data = given if isinstance(given, bytes) else str(given).encode()
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="monarch-pem-") as f:  # mode 0600
        f.write(data)
        f.flush()
        yield f.name
