from __future__ import annotations

import socket
from contextlib import closing

import pytest

from modelyard.processes.ports import PortUnusable, listen, reserve_port


def test_several_listeners_share_a_reserved_port() -> None:
    with closing(reserve_port("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with closing(listen("127.0.0.1", port)), closing(listen("127.0.0.1", port)):
            for _ in range(20):
                socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_a_reservation_accepts_no_connections() -> None:
    with closing(reserve_port("127.0.0.1", 0)) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname(), timeout=60)


def test_a_shared_port_of_another_server_is_refused() -> None:
    with closing(listen("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortUnusable, match=f"port {port} on 127.0.0.1 is in use .* --port"):
            reserve_port("127.0.0.1", port)


def test_a_port_in_use_is_reported() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other, pytest.raises(PortUnusable, match="is in use"):
        listen("127.0.0.1", other.getsockname()[1])


def test_an_address_of_another_machine_is_reported() -> None:
    with pytest.raises(PortUnusable, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        reserve_port("192.0.2.1", 0)


def test_an_invalid_host_is_reported() -> None:
    with pytest.raises(PortUnusable, match="the host 'no such host' is not an address"):
        reserve_port("no such host", 8000)
