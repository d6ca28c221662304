"""Access to the workbench: only pages of the same origin, no cost before the first visit, limited uploads."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from modelyard.cli.app import app
from modelyard.core.errors import InvalidRequest
from modelyard.workbench.app import check_url, local_address
from modelyard.workbench.peer_proxy import ServerAddress
from tests.cli_process import DEADLINE, DEMO, MODELYARD, ServerProcess, environment, run, serve
from tests.live_server import LiveServer, demo_config, live_server

SOCKET = "/workbench/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
POLLING = "/workbench/_nicegui_ws/socket.io/?EIO=4&transport=polling"


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    """For refused requests only: NiceGUI is never started in the process of the tests."""
    with live_server({**demo_config(), "http": {"cors_enabled": True}}) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(tmp_path_factory.mktemp("server"), *DEMO, MODELYARD_API_KEY="secret") as running:
        yield running


def handshake(url: str, path: str = SOCKET, **headers: str) -> str:
    """The status line of the reply to a WebSocket handshake."""
    host, port = url.removeprefix("http://").split(":")
    lines = [f"GET {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {"Host": f"{host}:{port}", "Origin": url, **headers}.items()]
    lines += ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==", "", ""]).encode())
        return connection.makefile("rb").readline().decode().strip()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},  # another server on this machine is another origin
        {"Host": "evil.example", "Origin": "http://evil.example"},  # DNS rebinding
    ],
)
def test_another_origin_gets_no_websocket_even_with_cors_enabled(served: LiveServer, headers: dict[str, str]) -> None:
    assert handshake(served.url, **headers).startswith("HTTP/1.1 403")


def test_a_path_without_websockets_accepts_none(served: LiveServer) -> None:
    assert handshake(served.url, "/v1/messages").startswith("HTTP/1.1 404")


def test_another_origin_reaches_no_part_of_the_workbench(served: LiveServer) -> None:
    for method in ("GET", "POST"):
        for path in ("/workbench", POLLING):
            for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
                assert httpx.request(method, served.url + path, headers=headers).status_code == 403


def test_the_page_gets_its_websocket_and_cannot_be_framed(server: ServerProcess) -> None:
    page = httpx.get(server.url + "/workbench")
    assert page.status_code == 200
    assert page.headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "secret" not in page.text
    assert handshake(server.url).startswith("HTTP/1.1 101")
    assert httpx.get(server.url + POLLING, headers={"origin": server.url}).status_code == 200


def test_the_page_needs_no_key_but_the_admin_api_does(server: ServerProcess) -> None:
    assert httpx.get(server.url + "/workbench/requests").status_code == 200
    assert httpx.get(server.url + "/v1/admin/requests").status_code == 401
    assert httpx.get(server.url + "/workbenches").status_code == 401


def test_an_address_can_open_only_so_many_pages_and_connections(tmp_path: Path) -> None:
    forged = {"x-modelyard-client": "10.1.1.1", "x-forwarded-for": "10.1.1.1"}
    with serve(tmp_path, *DEMO, MODELYARD_API_KEY="secret") as running, httpx.Client(base_url=running.url) as client:
        for paths in ((POLLING, POLLING + "&x_sid=1"), ("/workbench", "/workbench/memory")):
            assert {client.get(path).status_code for path in paths for _ in range(20)} == {200}
            refused = client.get(paths[1], headers=forged)
            assert refused.status_code in (503, 529)
            assert "40 pages of the workbench are open from your address" in refused.text
            if POLLING in paths:  # at once: connections that send nothing end by themselves
                assert handshake(running.url).startswith("HTTP/1.1 403")
        assert client.get("/health").status_code == 200


def test_the_workbench_can_be_switched_off(tmp_path: Path) -> None:
    with serve(tmp_path, *DEMO, MODELYARD_API_KEY="secret", MODELYARD_HTTP__WORKBENCH="false") as running:
        for path in ("/workbench", "/workbench/requests", POLLING):
            assert httpx.get(running.url + path).status_code == 401
            assert httpx.get(running.url + path, headers={"x-api-key": "secret"}).status_code == 404
        assert handshake(running.url).startswith("HTTP/1.1 401")
        assert not any("the workbench is at" in line.get("message", "") for line in running.lines)


def test_a_body_that_is_too_large_or_of_unknown_length_is_refused(server: ServerProcess) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"

    assert httpx.post(server.url + "/workbench/_nicegui/upload", content=chunks()).status_code == 413
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST /workbench HTTP/1.1\r\nHost: {host}\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 413")


def test_a_server_imports_what_is_slow_to_import_at_the_first_visit(tmp_path: Path) -> None:
    code = (
        "import sys, modelyard.server.serve, modelyard.workbench.app; "
        "print({'nicegui', 'fastapi', 'httpx'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=tmp_path, timeout=60, check=False, capture_output=True
    )
    assert done.stdout == b"set()\n", done.stderr


@pytest.mark.parametrize(
    ("server_address", "scheme", "address"),
    [
        (("127.0.0.1", 8000), "http", ServerAddress("http://127.0.0.1:8000")),
        (("::1", 80), "ws", ServerAddress("http://[::1]:80")),
        (("10.0.0.1", 443), "https", ServerAddress("https://10.0.0.1:443", verify=False)),
    ],
)
def test_the_page_uses_the_server_that_was_visited(
    server_address: tuple[str, int], scheme: str, address: ServerAddress
) -> None:
    assert local_address({"server": server_address, "scheme": scheme}) == address


# The workbench as a separate server: it listens on the loopback only, with the same rules for Host and Origin.


def test_the_url_is_reduced_to_the_servers_root() -> None:
    for url in ("http://h:1/", "http://h:1/v1", "http://h:1"):
        assert check_url(url) == "http://h:1"


def test_an_invalid_url_is_refused_with_an_example() -> None:
    for url in ("h:1", "ftp://h", "http://", ""):
        with pytest.raises(InvalidRequest, match="an example is http://"):
            check_url(url)
    refused = CliRunner().invoke(app, ["workbench", "--url", "nonsense"])
    assert refused.exit_code == 2
    assert "is not the URL of a server" in " ".join(refused.stderr.split())


def test_it_serves_the_page_with_the_same_rules_as_the_server(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*MODELYARD, "workbench", "--url", "http://127.0.0.1:9", "--port", "0"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = re.search(r"is at (http://127\.0\.0\.1:\d+)/workbench", process.stderr.readline())
        assert found is not None
        url = found.group(1)
        assert httpx.get(url, follow_redirects=True).status_code == 200
        assert httpx.get(url + "/workbench", headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(url + "/v1/models").status_code == 404
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


# The link with a one-time code, which makes its visitor the owner.


def link_of(text: str) -> str:
    found = re.search(r"http://\S+/workbench\?code=\S+", text)
    assert found is not None, text
    return found[0].replace("localhost", "127.0.0.1")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_link_that_the_server_prints_opens_the_workbench_as_owner_once(tmp_path: Path, workers: str) -> None:
    with serve(tmp_path, *DEMO, "--workers", workers) as running:
        link = link_of(running.until("open it as the owner")["message"])
        opened = httpx.get(link)
        assert (opened.status_code, opened.headers["location"]) == (303, "/workbench")
        cookie = opened.headers["set-cookie"].lower()
        assert all(flag in cookie for flag in ("httponly", "samesite=strict", "path=/workbench"))
        assert httpx.get(link).status_code == 403
        assert "modelyard workbench" in httpx.get(link).text
        shown = httpx.get(f"{running.url}/v1/admin/logs", headers=running.owner).text
        assert ("the workbench is at" in shown, "code=" in shown) == (True, False)
        assert httpx.get(f"{running.url}/v1/admin/logs", cookies=opened.cookies).status_code == 403, "for pages only"
        again = run("workbench", "--url", running.url, cwd=tmp_path)
        assert httpx.get(link_of(again.stdout)).status_code == 303


def test_a_code_that_the_server_has_not_signed_opens_nothing(server: ServerProcess) -> None:
    good = httpx.URL(link_of(run("workbench", "--url", server.url, cwd=Path.cwd()).stdout))
    until, nonce, signature = good.params["code"].split("-")
    for code in ("", "x", f"{int(until) + 1}-{nonce}-{signature}", f"{until}-{nonce}-{'0' * 64}"):
        refused = httpx.get(good.copy_set_param("code", code))
        assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    assert httpx.get(good).status_code == 303
