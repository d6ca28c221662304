"""One workbench for several gateway processes: the first hosts it, the others forward requests over a unix socket.

A page lives in one process, but the kernel gives each connection to any of them. So with several processes the page
uses plain HTTP polling instead of a WebSocket, and every process forwards the polls to the host. The page uses the
admin API of the host.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import uvicorn
from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from modelyard.accounts.owner import OwnerProof
from modelyard.core.errors import Unavailable
from modelyard.http.request_context import CONTEXT_KEY
from modelyard.processes.supervisor import FOLDER_VARIABLE, INDEX_VARIABLE

_SOCKET_NAME = "workbench"
_TIMEOUT_S = 60.0  # a poll waits up to a third of this for news
_CLOSE_TIMEOUT_S = 2.0
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections: if the server closed first, a request would fail
# The visitor's address and user, on the way to the host process, whose unix socket has neither.
CLIENT_HEADER, FORWARDED_USER = b"x-modelyard-client", b"x-modelyard-visitor"
_HOP_HEADERS = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})


def host_socket_path(env: Mapping[str, str] = os.environ) -> str:
    """The socket of the host process, in a folder that only this user may enter. Empty if there is a single process."""
    return str(Path(env[FOLDER_VARIABLE]) / _SOCKET_NAME) if env.get(FOLDER_VARIABLE) else ""


def process_socket_path(env: Mapping[str, str] = os.environ) -> str:
    """The socket of this process, beside those of its peers. Empty if there is a single process."""
    return f"{host_socket_path(env)}-{env.get(INDEX_VARIABLE, '0')}" if env.get(FOLDER_VARIABLE) else ""


def is_host_process(env: Mapping[str, str] = os.environ) -> bool:
    return env.get(INDEX_VARIABLE, "0") == "0"


class ServerAddress(Struct, frozen=True):
    """The server that a page uses. `verify` is off for this server's own certificate. `socket` is its unix socket if it
    has one for the workbench, and `owner` the token that pages of its owner use."""

    url: str
    verify: bool = True
    socket: str = ""
    owner: OwnerProof | None = None


class UnixSocketServer:
    """Serves the whole application a second time, on a unix socket, for the peer processes and the workbench."""

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
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        self._unlink()  # a killed process leaves its socket behind
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: HttpToolsProtocol(config, self._state, {}), self._path
        )

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_CLOSE_TIMEOUT_S)
        self._unlink()

    def _unlink(self) -> None:
        Path(self._path).unlink(missing_ok=True)


class WorkbenchProxy:
    """Forwards requests for the workbench to the host process."""

    def __init__(self, path: str) -> None:
        import httpx  # slow to import, and only several processes need it

        transport = httpx.AsyncHTTPTransport(uds=path)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://workbench", timeout=_TIMEOUT_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1013})
            return
        import httpx

        query = scope["query_string"].decode("latin-1")
        url = scope["path"] + (f"?{query}" if query else "")
        body = _read_body(receive) if scope["method"] not in ("GET", "HEAD") else None
        headers = [each for each in scope["headers"] if each[0] not in (CLIENT_HEADER, FORWARDED_USER)]
        headers.append((CLIENT_HEADER, (scope.get("client") or ("",))[0].encode("latin-1")))
        user = scope[CONTEXT_KEY].key if CONTEXT_KEY in scope else ""
        headers.append((FORWARDED_USER, user.encode("latin-1", "replace")))
        request = self._client.build_request(scope["method"], url, headers=headers, content=body)
        try:
            reply = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise Unavailable(f"the process that hosts the workbench does not answer: {error}", retry_after=1) from None
        kept = [(name, value) for name, value in reply.headers.raw if name.lower() not in _HOP_HEADERS]
        await send({"type": "http.response.start", "status": reply.status_code, "headers": kept})
        try:
            async for data in reply.aiter_raw():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await reply.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        await self._client.aclose()


async def _read_body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        yield message.get("body", b"")
        if not message.get("more_body"):
            return
