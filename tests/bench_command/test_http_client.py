"""The load generator's HTTP client: bodies of every framing, proxies."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from modelyard_bench.http_client import HttpClient, HttpResponse
from tests.bench_command.raw_server import responding

OK = b"HTTP/1.1 200 OK\r\n"


async def send(url: str, method: str = "GET", body: bytes = b"", path: str = "/") -> HttpResponse:
    async with aclosing(HttpClient(url)) as client:
        return await client.send(method, path, body, 10.0)


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"content-length: 5\r\n\r\nhello",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        OK + b"connection: close\r\n\r\nhello",
    ],
    ids=["content-length", "chunked", "until the connection ends"],
)
async def test_a_body_is_read_whatever_its_framing(reply: bytes) -> None:
    async with responding(reply) as url:
        response = await send(url, "POST", b"{}")
    assert (response.status, response.body, response.error) == (200, b"hello", None)
    assert response.sent <= response.parts[0][0] <= response.ended


@pytest.mark.parametrize("reply", [OK + b"content-length: 5\r\n\r\nhe", OK, b"nonsense\r\n\r\n"])
async def test_an_incomplete_response_has_an_error(reply: bytes) -> None:
    async with responding(reply) as url:
        response = await send(url)
    assert (response.error or "").startswith("the connection broke: ")


async def test_a_plain_request_goes_to_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []
    async with responding(OK + b"content-length: 2\r\n\r\nok", heads) as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("http://", "http://me:secret@"))
        monkeypatch.setenv("no_proxy", "")
        response = await send("http://example.invalid:81/v1", path="/v1/models")
    assert response.body == b"ok"
    assert heads[0].startswith(b"GET http://example.invalid:81/v1/models HTTP/1.1\r\nHost: example.invalid:81\r\n")
    assert b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n" in heads[0]


async def test_tls_goes_through_a_tunnel_and_a_refused_tunnel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []
    async with responding(b"HTTP/1.1 403 Forbidden\r\n\r\n", heads) as proxy:
        monkeypatch.setenv("https_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        response = await send("https://example.invalid/v1", path="/v1/models")
    assert heads[0].startswith(b"CONNECT example.invalid:443 HTTP/1.1\r\n")
    assert str(response.error).startswith("cannot connect: the proxy refused the connection: 403 Forbidden")


def test_this_machine_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "")
    assert HttpClient("http://127.0.0.1:8000")._proxy is None
    assert HttpClient("http://elsewhere.invalid")._proxy is not None
