"""Tokens by OAuth: `modelyard mcp login`, and what the gateway does with what it finds. The suite of MCP's conformance
(tests/e2e/test_mcp_conformance.py) checks the protocol itself."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from modelyard.cli.app import app
from modelyard.core.errors import InvalidRequest
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings
from tests.mcp.oauth_server import OAuthServer, oauth_server


@pytest.fixture(scope="module")
def running() -> Iterator[OAuthServer]:
    with oauth_server() as server:
        yield server


@pytest.fixture
def authorization(running: OAuthServer) -> OAuthServer:
    running.tokens.clear()
    running.requests.clear()
    running.clients.clear()
    running.expires_in = 3600
    return running


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def mcp(authorization: OAuthServer, **oauth: Any) -> dict[str, Any]:
    server = {"url": f"{authorization.url}/mcp", "oauth": {"redirect_port": free_port(), **oauth}}
    return {"servers": {"safe": server}}


def login(folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with a browser that follows redirects without a person."""
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    monkeypatch.setattr("webbrowser.open", lambda url: httpx.get(url, follow_redirects=True))
    file = folder / "modelyard.json"
    file.write_text(json.dumps({"models": {"demo": {"backend": "fake"}}, "mcp": settings}))
    return CliRunner().invoke(app, ["mcp", "login", "safe", "--config", str(file)])


async def tools(folder: Path, settings: dict[str, Any], **env: str) -> int:
    servers = McpServers(McpSettings.model_validate(settings), {"XDG_DATA_HOME": str(folder), **env})
    try:
        return len(await servers.named("safe").tools())
    finally:
        await servers.close()


async def test_a_gateway_without_a_login_says_which_command_to_run(authorization: OAuthServer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="modelyard mcp login safe"):
        await tools(tmp_path, mcp(authorization))
    assert not authorization.clients  # and registers nothing


def test_a_login_is_used_and_renewed_by_the_gateway(
    authorization: OAuthServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = mcp(authorization)
    authorization.expires_in = -1
    done = login(tmp_path, settings, monkeypatch)
    assert done.exit_code == 0, done.output
    assert "safe has" in done.output
    file = tmp_path / "modelyard" / "mcp" / "safe.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    authorization.expires_in = 3600
    assert asyncio.run(tools(tmp_path, settings)) > 3
    assert [request["grant_type"] for request in authorization.requests][:2] == ["authorization_code", "refresh_token"]
    authorization.tokens.clear()
    with pytest.raises(InvalidRequest, match="needs a login"):  # nobody is there to log in again
        asyncio.run(tools(tmp_path, settings))
    assert len(authorization.clients) == 1  # the client that the login registered
    elsewhere = {"servers": {"safe": settings["servers"]["safe"] | {"url": authorization.url + "/other"}}}
    with pytest.raises(InvalidRequest, match="needs a login"):
        asyncio.run(tools(tmp_path, elsewhere))
    file.write_text("{")
    with pytest.raises(InvalidRequest, match="delete it and log in again"):
        asyncio.run(tools(tmp_path, settings))


def test_a_refused_login_says_so(authorization: OAuthServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = login(tmp_path, mcp(authorization, client_id="banned"), monkeypatch)
    assert done.exit_code != 0
    assert "access_denied" in done.output
    assert not (tmp_path / "modelyard").exists()


def test_nobody_logs_in_where_no_one_must(
    authorization: OAuthServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"servers": {"safe": {"url": f"{authorization.url}/mcp"}}}
    done = login(tmp_path, settings, monkeypatch)
    assert "nobody logs in at 'safe'" in done.output


async def test_client_credentials_need_no_person(authorization: OAuthServer, tmp_path: Path) -> None:
    oauth = {"grant": "client_credentials", "client_id": "me", "client_secret_env": "S", "issuer": authorization.url}
    assert await tools(tmp_path, mcp(authorization, **oauth), S="geheim") > 3
    (request,) = authorization.requests
    assert (request["grant_type"], request["basic"]) == ("client_credentials", "me:geheim")
    with pytest.raises(InvalidRequest, match="the environment has no S"):
        await tools(tmp_path / "other", mcp(authorization, **oauth))
    other = oauth | {"issuer": "http://elsewhere.example"}
    with pytest.raises(InvalidRequest):
        await tools(tmp_path / "third", mcp(authorization, **other), S="geheim")
    assert len(authorization.requests) == 1  # no other server gets the secret
