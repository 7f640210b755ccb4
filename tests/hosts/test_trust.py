"""Who may attach, and how hosts prove themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from certificates import Authority
from daemons import Daemon, Echo

from conftest import WAIT
from monarch.actor import attach_to_workers, run_worker_loop_forever
from monarch.config import configured
from monarch.wire import trust

KEY = "k" * 32
ANYBODY = "trust_all_connections"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def member(authority):
    return authority.member()


def use(address, **how):
    """Attaches, calls an actor, shuts the daemon down; what the call returned."""
    hosts = attach_to_workers(workers=[address], **how)
    out = hosts.spawn_procs().spawn("e", Echo).echo.call_one(os.urandom(1 << 20)).get(timeout=WAIT)
    hosts.shutdown().get(timeout=WAIT)
    return out


def refused(address, **how):
    hosts = attach_to_workers(workers=[address], **how)
    with pytest.raises(RuntimeError, match="attach failed") as e:
        hosts.initialized.get(timeout=WAIT)
    assert address.partition("://")[2] in str(e.value)
    return str(e.value)


def test_tls_with_certificates_of_one_authority(authority, member):
    with Daemon("tls", authority.ca, member) as d:
        assert len(use(d.address, ca=authority.ca, private_key=member)) == 1 << 20
        assert d.process.wait(WAIT) == 0


def test_tls_from_pem_in_memory_over_a_tcp_address(authority, member):
    with Daemon("tcp", authority.ca, member) as d:
        assert use(d.address, ca=authority.ca.read_bytes(), private_key=member.read_bytes())


def test_tls_from_configured_files(authority, member):
    files = {
        "HYPERACTOR_TLS_CERT": str(authority.folder / "host.crt"),
        "HYPERACTOR_TLS_KEY": str(authority.folder / "host.key"),
        "HYPERACTOR_TLS_CA": str(authority.ca),
    }
    keys = {f"hyperactor_{k[11:].lower()}": v for k, v in files.items()}
    with Daemon("tls", **files) as d, configured(**keys):
        assert use(d.address, ca=ANYBODY)


def test_tls_refuses_a_foreign_certificate_and_goes_on(authority, member, tmp_path):
    foreign = Authority(tmp_path / "foreign", "foreign")
    with Daemon("tls", authority.ca, member) as d:
        assert "TLS" in refused(d.address, ca=authority.ca, private_key=foreign.member())
        assert "TLS" in refused(d.address, ca=foreign.ca, private_key=foreign.member())
        assert use(d.address, ca=authority.ca, private_key=member)


def test_tls_refuses_an_expired_certificate(authority, member):
    old = authority.member("old", expired=True)
    with Daemon("tls", authority.ca, member) as d:
        assert "expired" in refused(d.address, ca=authority.ca, private_key=old)
    with Daemon("tls", authority.ca, old) as d:
        assert "expired" in refused(d.address, ca=authority.ca, private_key=member)


def test_tls_and_plain_do_not_talk(authority, member):
    with Daemon("tls", authority.ca, member) as d:
        refused(d.address.replace("tls", "tcp"), ca=ANYBODY)
    with Daemon() as d, configured(mesh_attach_config_timeout="5s"):
        refused(d.address.replace("tcp", "tls"), ca=authority.ca, private_key=member)


def test_a_shared_key(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    with Daemon(MONARCH_AUTH_KEY_FILE=str(path)) as d:
        with configured(auth_key="x" * 32):
            refused(d.address, ca=ANYBODY)
        assert "shared secret" in refused(d.address, ca=ANYBODY)
        with configured(auth_key=KEY):
            assert use(d.address, ca=ANYBODY)


def test_a_daemon_without_the_key_is_refused_too():
    with Daemon() as d, configured(auth_key=KEY):
        assert "shared secret" in refused(d.address, ca=ANYBODY)


def test_keys_that_protect_nothing_are_refused(tmp_path):
    with configured(auth_key="short"), pytest.raises(ValueError, match="at least 16"):
        trust.configured_secret()
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o644)
    with configured(auth_key_file=str(path)), pytest.raises(ValueError, match="chmod 600"):
        trust.configured_secret()


def test_nothing_is_open_beyond_loopback_unless_asked_for():
    with pytest.raises(trust.Untrusted, match="MONARCH_AUTH_KEY"):
        run_worker_loop_forever(address="tcp://0.0.0.0:0", ca=ANYBODY)
    open_ = trust.of(ANYBODY)
    open_.check("127.0.0.9", "here")
    open_.check("::1", "here")
    with pytest.raises(trust.Untrusted, match="10.1.2.3"):
        open_.check("10.1.2.3", "connecting to tcp://10.1.2.3:1")
    with configured(trust_remote_connections=True), pytest.warns(UserWarning, match="anybody"):
        open_.check("10.1.2.3", "connecting to tcp://10.1.2.3:1")
    with configured(auth_key=KEY):
        trust.of(ANYBODY).check("10.1.2.3", "with a key")


def test_files_that_cannot_be_used_are_named(authority, tmp_path):
    for ca, key, text in [
        (tmp_path / "none", authority.folder / "host.pem", "none"),
        (authority.ca, tmp_path / "nokey", "nokey"),
        (authority.key, authority.folder / "host.pem", "ca.key"),
    ]:
        with pytest.raises(ValueError, match=text):
            attach_to_workers(ca=ca, private_key=key, workers=["tls://127.0.0.1:1"])


def test_a_key_never_reaches_processes_by_configuration():
    with configured(auth_key=KEY):
        from monarch.config import store

        assert "auth_key" not in store.snapshot_for_children()
    code = "import monarch.config as c; print(c.get_global_config()['auth_key'])"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "MONARCH_AUTH_KEY": KEY}, capture_output=True, text=True
    )
    assert KEY not in shown.stdout + shown.stderr
