"""One workbench for several gateway processes: the first keeps it, the others pass its visitors on over a unix socket.

A page lives in one process, and the system gives each connection to any of them. So the page of a fleet uses plain
requests only, no socket: whichever process gets one hands it to the keeper. The keeper's page looks at the keeper.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from modelyard.core.errors import Unavailable
from modelyard.processes.supervisor import INDEX_VARIABLE, SOCKET_VARIABLE

_NAME = "workbench"
_PATIENCE_S = 60.0  # a page's question waits for news a third as long
_GOODBYE_S = 2.0
_IDLE_S = 75  # longer than those who come through a door keep theirs: who closes first makes the other's request fail
_HOP = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})


def meeting_place(env: Mapping[str, str] = os.environ) -> str:
    """The keeper's socket, beside the fleet's own: in a folder that only this user may enter. Empty: no fleet."""
    return str(Path(env[SOCKET_VARIABLE]).with_name(_NAME)) if env.get(SOCKET_VARIABLE) else ""


def own_place(env: Mapping[str, str] = os.environ) -> str:
    """This process's own socket, beside those of its siblings. Empty: no fleet."""
    return f"{meeting_place(env)}-{env.get(INDEX_VARIABLE, '0')}" if env.get(SOCKET_VARIABLE) else ""


def is_keeper(env: Mapping[str, str] = os.environ) -> bool:
    return env.get(INDEX_VARIABLE, "0") == "0"


class Door:
    """A second way in: the whole server, for its siblings, and the keeper's for its own page."""

    def __init__(self, path: str) -> None:
        self._path, self._state = path, ServerState()
        self._server: asyncio.Server | None = None

    async def open(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_IDLE_S,
        )
        config.load()
        self._clear()  # a keeper that died may have left one
        loop = asyncio.get_running_loop()
        made = lambda: HttpToolsProtocol(config, self._state, {})  # noqa: E731
        self._server = await loop.create_unix_server(made, self._path)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_GOODBYE_S)
        self._clear()

    def _clear(self) -> None:
        Path(self._path).unlink(missing_ok=True)


class Relay:
    """Hands a visitor's request to the keeper, and its reply back as it comes."""

    def __init__(self, path: str) -> None:
        transport = httpx.AsyncHTTPTransport(uds=path)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://keeper", timeout=_PATIENCE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1013})
            return
        try:
            reply = await self._client.send(self._request(scope, receive), stream=True)
        except httpx.HTTPError as error:
            raise Unavailable(f"the process that keeps the workbench does not answer: {error}", retry_after=1) from None
        headers = [(name, value) for name, value in reply.headers.raw if name.lower() not in _HOP]
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        try:
            async for data in reply.aiter_raw():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await reply.aclose()
        await send({"type": "http.response.body", "body": b""})

    def _request(self, scope: Scope, receive: Receive) -> httpx.Request:
        query = scope["query_string"].decode("latin-1")
        url = scope["path"] + (f"?{query}" if query else "")
        body = _body(receive) if scope["method"] not in ("GET", "HEAD") else None
        return self._client.build_request(scope["method"], url, headers=scope["headers"], content=body)

    async def close(self) -> None:
        await self._client.aclose()


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        yield message.get("body", b"")
        if not message.get("more_body"):
            return
