"""Who may reach the page: anybody here, no page of elsewhere; and what it costs while nobody does: nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from modelyard.workbench.mount import Address, own_address
from tests.commands import DEMO, Serving, environment, serve
from tests.serving import Served, demo, serving

SOCKET = "/workbench/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
POLLING = "/workbench/_nicegui_ws/socket.io/?EIO=4&transport=polling"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Nobody is let in here: the page itself is never made in the tests' own process."""
    with serving({**demo(), "http": {"cors_enabled": True}}) as running:
        yield running


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(tmp_path_factory.mktemp("own"), *DEMO, MODELYARD_API_KEY="secret") as running:
        yield running


def handshake(url: str, path: str = SOCKET, **headers: str) -> str:
    """The status line of the reply to a browser that wants a socket."""
    host, port = url.removeprefix("http://").split(":")
    told = {"Host": f"{host}:{port}", "Origin": url, **headers}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    lines += ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    with socket.create_connection((host, int(port)), timeout=60) as wire:
        wire.sendall("\r\n".join([*lines, "Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==", "", ""]).encode())
        return wire.makefile("rb").readline().decode().strip()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},  # another server on this machine is another site
        {"Host": "evil.example", "Origin": "http://evil.example"},  # a name that was rebound to this machine
    ],
)
def test_a_page_of_elsewhere_gets_no_socket_even_where_cors_is_open(served: Served, headers: dict[str, str]) -> None:
    assert handshake(served.url, **headers).startswith("HTTP/1.1 403")


def test_there_are_sockets_for_the_workbench_alone(served: Served) -> None:
    assert handshake(served.url, "/v1/messages").startswith("HTTP/1.1 403")


@pytest.mark.parametrize("path", ["/workbench", POLLING])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_of_elsewhere_reaches_nothing_of_it(served: Served, method: str, path: str) -> None:
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        assert httpx.request(method, served.url + path, headers=headers).status_code == 403


def test_our_own_page_gets_its_socket_and_cannot_be_framed(own: Serving) -> None:
    page = httpx.get(own.url + "/workbench")
    assert page.status_code == 200
    assert page.headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "secret" not in page.text
    assert handshake(own.url).startswith("HTTP/1.1 101")
    assert httpx.get(own.url + POLLING, headers={"origin": own.url}).status_code == 200


def test_the_page_opens_without_a_key_and_the_admin_api_does_not(own: Serving) -> None:
    assert httpx.get(own.url + "/workbench/requests").status_code == 200
    assert httpx.get(own.url + "/v1/admin/requests").status_code == 401
    assert httpx.get(own.url + "/workbenches").status_code == 401


def test_what_does_not_say_its_size_is_not_read(own: Serving) -> None:
    def forever() -> Iterator[bytes]:
        yield b"x"

    assert httpx.post(own.url + "/workbench/_nicegui/upload", content=forever()).status_code == 413
    host, port = own.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as wire:
        wire.sendall(f"POST /workbench HTTP/1.1\r\nHost: {host}\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert wire.makefile("rb").readline().startswith(b"HTTP/1.1 413")


def test_a_server_that_nobody_visits_has_imported_none_of_it(tmp_path: Path) -> None:
    code = "import sys, modelyard.server.serve, modelyard.workbench.mount; sys.exit('nicegui' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("server", "scheme", "address"),
    [
        (("127.0.0.1", 8000), "http", Address("http://127.0.0.1:8000")),
        (("::1", 80), "ws", Address("http://[::1]:80")),
        (("10.0.0.1", 443), "https", Address("https://10.0.0.1:443", verify=False)),
    ],
)
def test_the_page_works_with_the_server_that_was_reached(
    server: tuple[str, int], scheme: str, address: Address
) -> None:
    assert own_address({"server": server, "scheme": scheme}) == address
