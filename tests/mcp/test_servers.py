from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import Forbidden, InvalidRequest, NotFound
from modelyard.core.request import ToolServer
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings

URL = "https://tools.example.com/mcp"


def servers(**more: Any) -> McpServers:
    configured = {"docs": {"url": URL}, "local": {"command": "x"}, "hidden": {"command": "x", "by_request": False}}
    return McpServers(McpSettings.model_validate({"servers": configured, **more}), {})


@pytest.mark.parametrize(
    "named",
    [
        ToolServer(label="docs"),
        ToolServer(label="mine", url="mcp://docs"),
        ToolServer(label="mine", url=URL),
    ],
)
def test_a_request_names_a_configured_server_by_its_label_or_url(named: ToolServer) -> None:
    known = servers()
    assert known.find(named) is known.named("docs")


async def test_a_url_must_be_allowed() -> None:
    with pytest.raises(Forbidden, match=r"mcp\.allow_urls"):
        servers().find(ToolServer(label="x", url="https://other.example.com/mcp"))
    allowed = servers(allow_urls=["*.example.com"])
    assert allowed.find(ToolServer(label="x", url="https://other.example.com/mcp")).name == "x"
    for url in ("https://example.org/mcp", "https://example.com.evil.org/mcp", "https://other.example.com@10.0.0.1/"):
        with pytest.raises(Forbidden):
            allowed.find(ToolServer(label="x", url=url))


@pytest.mark.parametrize("url", ["file:///bin/sh", "stdio:sh", "https://", "mcp:docs", "https://\udc80/"])
def test_nothing_but_http_is_a_url(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the http"):
        servers(allow_urls=["*"]).find(ToolServer(label="x", url=url))


@pytest.mark.parametrize("label", ["nobody", "hidden"])
def test_an_unknown_server_is_not_found(label: str) -> None:
    with pytest.raises(NotFound, match="those that requests may name: docs, local"):
        servers().find(ToolServer(label=label))


def test_a_client_brings_no_credentials_for_a_configured_server() -> None:
    with pytest.raises(InvalidRequest, match="its own credentials"):
        servers().find(ToolServer(label="docs", headers={"authorization": "Bearer x"}))


async def test_connections_by_url_are_kept_for_the_same_credentials_only() -> None:
    known = servers(allow_urls=["*"])
    mine = ToolServer(label="x", url="https://a.example.com/", headers={"authorization": "Bearer 1"})
    other = ToolServer(label="x", url="https://a.example.com/", headers={"authorization": "Bearer 2"})
    assert known.find(mine) is known.find(mine)
    assert known.find(mine) is not known.find(other)
    assert known.metric_name(known.find(mine)) == "by_url"
    assert known.metric_name(known.named("docs")) == "docs"
    for number in range(40):
        known.find(ToolServer(label="x", url=f"https://a.example.com/{number}"))
    assert len(known._by_url) <= 32
    with pytest.raises(InvalidRequest, match="may not set 'Host'"):
        known.find(ToolServer(label="x", url="https://a.example.com/", headers={"Host": "b"}))
    await known.close()


async def test_a_changed_server_gets_a_new_connection() -> None:
    known = servers()
    docs, local = known.named("docs"), known.named("local")
    settings = known.settings.model_copy(deep=True)
    settings.servers["docs"].headers = {"x": "y"}
    known.reconfigure(settings)
    assert known.named("docs") is not docs
    assert known.named("local") is local
    await known.close()
