"""The MCP servers of a gateway: those of the configuration by name, and those that requests name by URL.

A request can use a program (`command`) only if the configuration has it. Whether it may name a URL is a setting.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from modelyard.core.errors import Forbidden, InvalidRequest, NotFound
from modelyard.core.request import ToolServer
from modelyard.mcp.connection import McpConnection, builtin, endpoint, program
from modelyard.mcp.settings import McpServerSettings, McpSettings
from modelyard.outbound import AddressGuard, host_name
from modelyard.plugins import load

SCHEME = "mcp://"  # how a request names a server of the configuration where its protocol requires a URL
_MAX_BY_URL = 32
_IDLE_S = 300.0
_OWN_HEADERS = frozenset({"host", "connection", "content-length", "content-type", "transfer-encoding", "upgrade"})

_AddressKey = tuple[str, tuple[tuple[str, str], ...]]


class Login(Protocol):
    """Shows a person the address where they log in, and waits for what the browser brings back (the library's
    `AuthorizationCodeResult`)."""

    async def show(self, url: str) -> None: ...

    async def wait(self) -> Any: ...


class McpServers:
    """`login` is how a person logs in at an authorization server; a gateway has no such person."""

    def __init__(self, settings: McpSettings, env: Mapping[str, str] = os.environ, login: Login | None = None) -> None:
        self.settings, self._env, self._login = settings, env, login
        self._configured: dict[str, McpConnection] = {}
        self._by_url: dict[_AddressKey, McpConnection] = {}
        self._guard = AddressGuard(settings.allow_urls, allow_private=settings.allow_private)
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<McpServers {[*self._configured.values(), *self._by_url.values()]}>"

    def named(self, name: str) -> McpConnection:
        """A server of the configuration."""
        connection = self._configured.get(name)
        if connection is None:
            connection = self._configured[name] = self._connect(name, self.settings.servers[name])
        return connection

    def names_by_request(self) -> list[str]:
        return [name for name, its in self.settings.servers.items() if its.by_request]

    def find(self, server: ToolServer) -> McpConnection:
        """The server that a request names."""
        name, settings = self._configured_name(server), self.settings
        if name is None:
            return self._at_url(server)
        if name not in settings.servers or not settings.servers[name].by_request:
            known = self.names_by_request()
            raise NotFound(
                f"there is no MCP server {name!r} here; those that requests may name: {', '.join(known) or 'none'}",
                code="mcp_server_unknown",
                param="mcp_servers",
            )
        if server.headers:
            raise InvalidRequest(
                f"the MCP server {name!r} is configured here with its own credentials: send no headers or token",
                param="mcp_servers",
            )
        return self.named(name)

    def tool_globs(self, connection: McpConnection) -> list[str]:
        """Which tools of a server are offered; all of one that the configuration does not have."""
        if self._configured.get(connection.name) is not connection:
            return ["*"]
        return self.settings.servers[connection.name].tools

    def metric_name(self, connection: McpConnection) -> str:
        """Labels of servers by URL are the client's, and would be without number."""
        return connection.name if self._configured.get(connection.name) is connection else "by_url"

    def _configured_name(self, server: ToolServer) -> str | None:
        if not server.url:
            return server.label
        if server.url.startswith(SCHEME):
            return server.url.removeprefix(SCHEME).rstrip("/")
        return next((name for name, its in self.settings.servers.items() if its.url == server.url), None)

    def _at_url(self, server: ToolServer) -> McpConnection:
        url, settings = server.url or "", self.settings
        parts = urlsplit(url)
        try:
            host = host_name((parts.hostname or "").encode("idna"))
        except UnicodeError:
            host = ""
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidRequest(f"{url[:200]!r} is not the http(s) URL of an MCP server", param="mcp_servers")
        if not self._guard.allows(host):
            raise Forbidden(
                f"MCP servers of {host[:200]!r} are not allowed; the setting mcp.allow_urls lists the hosts that are",
                code="mcp_url_not_allowed",
            )
        for name in server.headers:
            if name.lower() in _OWN_HEADERS:
                raise InvalidRequest(f"an MCP server's headers may not set {name!r}", param="mcp_servers")
        key = url, tuple(sorted(server.headers.items()))
        connection = self._by_url.get(key)
        if connection is None:
            self._drop_idle()
            transport = endpoint(url, server.headers, self._guard)
            connection = self._by_url[key] = McpConnection(
                server.label, transport, timeout_s=settings.timeout_s, connect_timeout_s=settings.connect_timeout_s
            )
        return connection

    def _drop_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        by_age = sorted(self._by_url.items(), key=lambda item: item[1].used)
        for number, (key, connection) in enumerate(by_age):
            if len(by_age) - number >= _MAX_BY_URL or now - connection.used > _IDLE_S:
                del self._by_url[key]
                self._close_later(connection)

    def _connect(self, name: str, server: McpServerSettings) -> McpConnection:
        settings = self.settings
        if server.command is not None:
            env = {variable: self._env[variable] for variable in server.env_from if variable in self._env}
            transport = program(server.command, server.args, env | server.env, server.cwd)
        elif server.builtin is not None:
            transport = builtin(load("mcp_servers", server.builtin), name, server.options, self._env)
        else:
            token = self._env.get(server.token_env or "")
            authorization = {"authorization": f"Bearer {token}"} if token else {}
            auth = None
            if server.oauth is not None:
                made = load("mcp", "oauth")
                auth = partial(made, name, server.url or "", server.oauth, self._env, self._login)
            transport = endpoint(server.url or "", authorization | server.headers, auth=auth)
        return McpConnection(
            name,
            transport,
            timeout_s=server.timeout_s or settings.timeout_s,
            connect_timeout_s=settings.connect_timeout_s,
            elicitation=server.elicitation,
            offered=frozenset(kind for kind in ("resources", "prompts") if getattr(server, kind)),
        )

    def reconfigure(self, settings: McpSettings) -> None:
        """Connections to servers that changed or are gone end; calls that run on them fail."""
        before, self.settings = self.settings, settings
        self._guard = AddressGuard(settings.allow_urls, allow_private=settings.allow_private)
        is_same = (before.timeout_s, before.connect_timeout_s) == (settings.timeout_s, settings.connect_timeout_s)
        for name in list(self._configured):
            if not is_same or before.servers.get(name) != settings.servers.get(name):
                self._close_later(self._configured.pop(name))
        while self._by_url:
            self._close_later(self._by_url.popitem()[1])

    def _close_later(self, connection: McpConnection) -> None:
        task = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        connections = [*self._configured.values(), *self._by_url.values()]
        self._configured, self._by_url = {}, {}
        await asyncio.gather(*(connection.close() for connection in connections), *self._closing)
