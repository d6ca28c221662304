"""The servers that are part of the gateway: `fetch` and `search`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Text
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings

PAGE = (
    "<html><head><title>T</title><script>bad()</script></head><body><h1>News</h1><p>Rome &amp; <a href='https://a.b/c'>"
    "more</a></p><style>x</style></body></html>"
)
ROWS = '{"results": [{"title": "One", "url": "https://a.example", "content": "First."}, {"title": "Two"}]}'


class Site(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path == "/away":
            self.send_response(302)
            self.send_header("location", "http://localhost:1/secret")
            self.end_headers()
            return
        kinds = {"/page": "text/html", "/image": "image/png", "/search": "application/json", "/long": "text/plain"}
        bodies = {"/page": PAGE, "/search": ROWS, "/long": "abc" * 100}
        self.send_response(200 if path in kinds else 404)
        self.send_header("content-type", kinds.get(path, "text/plain"))
        self.end_headers()
        self.wfile.write(bodies.get(path, "").encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Site.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def call(
    builtin: str, options: dict[str, Any], tool: str, env: dict[str, str] | None = None, **values: Any
) -> Any:
    settings = McpSettings.model_validate({"servers": {"it": {"builtin": builtin, "options": options}}})
    servers = McpServers(settings, {})
    try:
        assert [tool.name for tool in await servers.named("it").tools()] == [tool]
        result = await servers.named("it").call(tool, values)
        (part,) = result.content
        assert isinstance(part, Text)
        return result.status, part.text
    finally:
        await servers.close()


async def test_a_page_is_read_as_text(site: str) -> None:
    status, text = await call("fetch", {"allow_private": True}, "fetch", url=f"{site}/page")
    assert (status, text) == ("ok", "News\n\nRome & more (https://a.b/c)")


async def test_a_long_page_is_read_in_parts(site: str) -> None:
    options = {"allow_private": True, "max_chars": 200}
    _, text = await call("fetch", options, "fetch", url=f"{site}/long")
    assert text.endswith("\n[100 more characters: call again with start=200]")
    assert await call("fetch", options, "fetch", url=f"{site}/long", start=200) == ("ok", ("abc" * 100)[200:])


async def test_an_address_of_the_operators_network_is_never_read(site: str) -> None:
    status, text = await call("fetch", {}, "fetch", url=f"{site}/page")
    assert status == "error"
    assert "private address" in text
    assert not Site.asked
    status, text = await call("fetch", {"allow_private": True, "allow_hosts": ["127.*"]}, "fetch", url=f"{site}/away")
    assert "'localhost' is not allowed" in text  # a redirect is checked, too
    assert (await call("fetch", {}, "fetch", url="file:///etc/passwd"))[0] == "error"


@pytest.mark.parametrize(("path", "reason"), [("/image", "not text"), ("/gone", "answered 404")])
async def test_what_cannot_be_read_is_a_result_with_a_reason(site: str, path: str, reason: str) -> None:
    status, text = await call("fetch", {"allow_private": True}, "fetch", url=site + path)
    assert status == "error"
    assert reason in text


async def test_a_search_lists_what_the_provider_found(site: str) -> None:
    options = {"provider": "searxng", "url": f"{site}/search"}
    assert await call("search", options, "web_search", query="Rome & co") == (
        "ok",
        "One\nhttps://a.example\nFirst.\n\nTwo\n\n",
    )
    assert Site.asked == ["/search?q=Rome+%26+co&format=json"]
    status, text = await call("search", options | {"url": f"{site}/gone"}, "web_search", query="x")
    assert (status, text.endswith("searxng answered 404")) == ("error", True)


@pytest.mark.parametrize(
    ("builtin", "options", "reason"),
    [
        ("search", {}, "provider"),
        ("search", {"provider": "searxng"}, "needs the url"),
        ("search", {"provider": "brave", "key_env": "NO_KEY"}, "the environment has no NO_KEY"),
        ("fetch", {"speed": 9}, "speed"),
        ("magic", {}, "'magic' is not one of the mcp_servers"),
    ],
)
async def test_wrong_options_are_an_error_that_names_them(builtin: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await call(builtin, options, "x")
