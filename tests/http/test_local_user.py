"""Whose end of a loopback connection it is."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from contextlib import closing
from typing import NoReturn

import pytest

from modelyard.core.errors import Unavailable
from modelyard.http import local_user as module
from modelyard.http.local_user import local_user

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell it")
CONNECT = """
import encodings.idna, os, socket, sys  # before it loses the right to read them
os.setgid(65534), os.setuid(65534)
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as client:
    client.recv(1)
"""


def no_netlink() -> socket.socket:
    raise PermissionError


def no_descriptors(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture(params=["sock_diag", "proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "proc":
        monkeypatch.setattr(module, "_netlink", no_netlink)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_own_user_has_no_name_and_one_that_is_gone_is_unknown(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()[:2]
        with socket.create_connection(address) as client, closing(server.accept()[0]):
            assert local_user(client.getsockname()[:2], address) == ""
        assert local_user((host, 1), address) == "uid:unknown"


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_another_user_is_named_by_its_id(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()[:2]
        server.settimeout(60)
        command = [sys.executable, "-c", CONNECT, *map(str, address)]
        with subprocess.Popen(command), closing(server.accept()[0]) as accepted:
            assert local_user(accepted.getpeername()[:2], address) == "uid:65534"


def test_what_is_no_address_is_one_user() -> None:
    assert local_user(None, ("/tmp/gateway.sock", 0)) == ""
    assert local_user(("testclient", 50000), ("testserver", 80)) == ""


def test_nobody_is_the_servers_own_user_because_descriptors_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_netlink", no_descriptors)
    monkeypatch.setattr("builtins.open", no_descriptors)
    with pytest.raises(Unavailable, match="Too many open files"):
        local_user(("127.0.0.1", 1), ("127.0.0.1", 2))


def test_a_client_that_a_header_has_named_is_not_the_servers_own_user() -> None:
    assert local_user(("nonsense", 0), ("127.0.0.1", 8000)) == "uid:unknown"


def test_a_kernel_that_finds_no_connections_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ask", lambda *_: None)
    module._has_tcp_diag.cache_clear()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address) as client, closing(server.accept()[0]):
                assert local_user(client.getsockname(), address) == ""
    finally:
        module._has_tcp_diag.cache_clear()
