import os
import socket
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.wire import addresses
from monarch.wire.addresses import Address, dial, listen, parse, private_folder, remove_folder, same_user


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:80", Address("tcp", "127.0.0.1", 80)),
        ("tcp://[::1]:80", Address("tcp", "::1", 80)),
        ("tls://node-a:443", Address("tls", "node-a", 443)),
        ("ipc:///tmp/s", Address("ipc", "/tmp/s")),
        ("unix:///tmp/s", Address("ipc", "/tmp/s")),
        ("ipc://@name", Address("ipc", "@name")),
        ("tcp://a:1@tcp://0.0.0.0:2", Address("tcp", "a", 1, "tcp://0.0.0.0:2")),
        ("worker@tcp://a:1", Address("tcp", "a", 1)),
    ],
)
def test_an_address_is_understood(text, address):
    assert parse(text) == address


@given(st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), st.integers(0, 65535))
def test_text_and_address_are_inverse(host, port):
    address = Address("tcp", host, port)
    assert parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "tcp://", "tcp://a", "tcp://a:99999", "tcp://a:b", "http://a:1", "ipc://", "a:1"])
def test_a_bad_address_is_named_with_what_is_expected(text):
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT") as info:
        parse(text)
    assert repr(text) in str(info.value)


def test_an_address_of_another_type_is_a_type_error():
    with pytest.raises(TypeError, match="int"):
        parse(80)


def exchange(address):
    """What a dialler's bytes read like at the listener of `address`."""
    listening, given = listen(address)
    with listening, dial(given, 5) as a:
        b, _ = listening.accept()
        with b:
            a.sendall(b"hello")
            assert same_user(b)
            return given, b.recv(5)


def test_a_tcp_listener_reports_its_real_port():
    given, data = exchange(parse("tcp://127.0.0.1:0"))
    assert given.port > 0 and data == b"hello"


def test_a_listener_may_bind_elsewhere_than_it_is_dialled():
    listening, given = listen(parse("tcp://127.0.0.1:7@tcp://0.0.0.0:0"))
    with listening:
        assert listening.getsockname()[0] == "0.0.0.0" and (given.host, given.port) == ("127.0.0.1", 7)


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_unix_sockets_connect(tmp_path, kind):
    where = f"ipc://{tmp_path}/s" if kind == "path" else f"ipc://@monarch-test-{os.getpid()}"
    assert exchange(parse(where))[1] == b"hello"


def test_nobody_listening_is_an_error_at_once():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            dial(Address("tcp", "127.0.0.1", s.getsockname()[1]), 5)


def test_a_taken_port_is_named():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            listen(Address("tcp", "127.0.0.1", port))


def test_the_socket_folder_is_for_this_user_only():
    folder = private_folder()
    try:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700 and len(folder) < 80
    finally:
        remove_folder(folder)
    assert not os.path.exists(folder)


def test_keepalive_is_left_to_the_kernels():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        addresses.tune(sock)
        addresses.keep_alive(sock, 50.0)
        get = sock.getsockopt
        assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert get(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == get(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
        assert get(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
        assert get(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 50_000


def test_the_address_of_an_inherited_socket_reads_back():
    assert str(addresses.parse("tcp://127.0.0.1:fd7")) == "tcp://127.0.0.1:fd7"
