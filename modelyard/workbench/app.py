"""The workbench as an ASGI app, and as a separate server (`modelyard workbench --url …`).

NiceGUI and the pages are imported at the first visit, not at the start.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Router, request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.accounts.keys import KeyRing
from modelyard.accounts.owner import OwnerProof
from modelyard.core.errors import InvalidRequest, TooLarge, Unauthenticated
from modelyard.http.auth import Authenticator
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.request_context import CONTEXT_KEY, RequestContext
from modelyard.http.routes import OPEN, RouteTable
from modelyard.http.server import loop_factory, make_server
from modelyard.http.settings import HttpSettings
from modelyard.processes.ports import listen
from modelyard.telemetry.metrics import Metrics
from modelyard.workbench.peer_proxy import (
    CLIENT_HEADER,
    FORWARDED_USER,
    ServerAddress,
    UnixSocketServer,
    WorkbenchProxy,
)

PREFIX = "/workbench"
LOGIN = PREFIX + "/login"
USER_KEY = "modelyard.user"  # in the scope
_MAX_BODY_BYTES = 32 * 1024**2  # enough for an uploaded image
# NiceGUI compiles its templates in the browser, so inline scripts and eval must be allowed; other origins are not.
_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data:; font-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_SECURITY_HEADERS = (
    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


def local_address(scope: Scope) -> ServerAddress:
    """The server that received the request, as it can be reached from this machine."""
    host, port = scope.get("server") or ("127.0.0.1", None)
    if port is None:  # a unix socket: show the host name that the visitor uses
        return ServerAddress(f"http://{dict(scope['headers']).get(b'host', b'localhost').decode('latin-1')}")
    host = f"[{host}]" if ":" in host else host
    secure = scope.get("scheme") in ("https", "wss")
    return ServerAddress(f"{'https' if secure else 'http'}://{host}:{port}", verify=not secure)


class WorkbenchApp:
    """`address` gives the server that the pages use, `owner` its token. With several gateway processes, all have the
    same `host_socket`, one `is_host`, and each listens at its own `process_socket`."""

    def __init__(
        self,
        address: Callable[[Scope], ServerAddress] = local_address,
        *,
        owner: OwnerProof | None = None,
        host_socket: str = "",
        is_host: bool = True,
        process_socket: str = "",
    ) -> None:
        self._address, self._host_socket, self._process_socket = address, host_socket, process_socket
        self._owner = owner
        self._opening: asyncio.Future[ASGIApp] | None = None
        self._resources = AsyncExitStack()
        self._proxy = WorkbenchProxy(host_socket) if host_socket and not is_host else None

    async def listen(self, app: ASGIApp) -> None:
        """Serve `app`, the whole server, on the unix sockets of this process, if it has any."""
        paths = [self._process_socket]
        if self._proxy is not None:
            self._resources.push_async_callback(self._proxy.close)
        else:
            paths.append(self._host_socket)
        for path in filter(None, paths):
            server = UnixSocketServer(path)
            await server.open(app)
            self._resources.push_async_callback(server.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_body_size(scope)
        if self._proxy is not None:
            await self._proxy(scope, receive, send)
            return
        is_link = scope["type"] == "http" and scope["path"] == PREFIX and b"code=" in scope["query_string"]
        if self._owner is not None and is_link:
            await _open_as_owner(scope, self._owner)(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"] == LOGIN and scope["method"] in ("POST", "DELETE"):
            await (await self._log_in_or_out(scope))(scope, receive, send)
            return
        app = await self._nicegui(scope)
        path = scope["path"] if scope["path"] != PREFIX else PREFIX + "/"
        # NiceGUI would take its prefix from these headers; no proxy in front of us knows it better.
        headers = [(name, value) for name, value in scope["headers"] if not name.startswith(b"x-forwarded-")]
        scope = {**scope, "path": path, "headers": headers, "client": _visitor(scope), USER_KEY: _user(scope)}
        await app(scope, receive, _with_security_headers(scope, send))

    async def _log_in_or_out(self, scope: Scope) -> Response:
        """Exchange a key for a cookie that no script can read and no other site sends, or end it. What the cookie has
        is a secret of its own, of which the server keeps the hash: it outlives a restart, and ends with its key."""
        from modelyard.workbench.api_client import ApiClient  # httpx is slow to import

        request, address = Request(scope), replace(self._address(scope), socket=self._host_socket)
        name = key_cookie(request.headers.get("host", ""))
        key = request.headers.get("authorization", "").partition(" ")[2].strip() or request.cookies.get(name, "")
        client = ApiClient(address.url, key, verify=address.verify, socket=address.socket)
        is_login, reply = scope["method"] == "POST", Response(status_code=204, headers={"cache-control": "no-store"})
        rules: dict[str, Any] = {"path": PREFIX, "httponly": True, "samesite": "strict"}
        rules["secure"] = scope.get("scheme") == "https"
        try:
            made = await client.send("POST" if is_login else "DELETE", "login")
        except Unauthenticated:
            if is_login:
                raise
        finally:
            await client.close()
        if is_login:
            reply.set_cookie(name, made["secret"], max_age=max(0, int(made["expires"] - time.time())), **rules)
        else:
            reply.delete_cookie(name, **rules)
        return reply

    async def _nicegui(self, scope: Scope) -> ASGIApp:
        """Opened once, by the first visit. After a failure the next visit tries again."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            address = replace(self._address(scope), socket=self._host_socket, owner=self._owner)
            self._opening = asyncio.ensure_future(self._open(address))
        return await asyncio.shield(self._opening)

    async def _open(self, address: ServerAddress) -> ASGIApp:
        """The import takes about a second, so it runs in a thread."""
        module = await asyncio.to_thread(importlib.import_module, "modelyard.workbench.nicegui_app")
        app: ASGIApp = await self._resources.enter_async_context(module.open_app(address, PREFIX))
        return app

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._resources.aclose()


def cookie_name(host: str, kind: str = "owner") -> str:
    """Browsers send a cookie to all ports of a host: two servers of a machine each need a name."""
    return f"modelyard-{kind}-{host.rpartition(':')[2] if host[-1:].isdigit() else 'default'}"


def key_cookie(host: str) -> str:
    return cookie_name(host, "key")


def _open_as_owner(scope: Scope, owner: OwnerProof) -> Response:
    """Exchange the one-time code of a link for a cookie."""
    request = Request(scope)
    code = request.query_params.get("code", "")
    if not owner.redeem(code, time.time()):
        message = (
            "This link was used before, or is too old. The command\n\n    modelyard workbench\n\nprints a new one.\n"
        )
        return PlainTextResponse(message, 403)
    reply = RedirectResponse(PREFIX, 303, {"cache-control": "no-store"})
    reply.set_cookie(
        cookie_name(request.headers.get("host", "")),
        owner.cookie,
        path=PREFIX,
        secure=scope.get("scheme") == "https",
        httponly=True,
        samesite="strict",
    )
    return reply


def _visitor(scope: Scope) -> tuple[str, int]:
    """The address of the visitor. Another gateway process forwards it over a unix socket, which has no addresses."""
    if scope.get("client") is not None:
        host, port = scope["client"]
        return host, port
    return dict(scope["headers"]).get(CLIENT_HEADER, b"").decode("latin-1"), 0


def _user(scope: Scope) -> str:
    """The user of this machine who opens the page of a server without keys."""
    if scope.get("client") is not None:
        return RequestContext.of(scope).key if CONTEXT_KEY in scope else ""
    return str(dict(scope["headers"]).get(FORWARDED_USER, b""), "latin-1")


def _check_body_size(scope: Scope) -> None:
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
        return
    length = dict(scope["headers"]).get(b"content-length", b"")
    if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
        raise TooLarge(f"the workbench requires a Content-Length of at most {_MAX_BODY_BYTES} bytes")


def _with_security_headers(scope: Scope, send: Send) -> Send:
    if scope["type"] != "http":
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_SECURITY_HEADERS]}
        await send(message)

    return send_with_headers


# --- a separate server, for a Modelyard on another machine ------------------------------------------------------------

log = logging.getLogger("modelyard.workbench")

HOST = "127.0.0.1"  # fixed: with a server that needs no key, the page gives every visitor its models


def check_url(url: str) -> str:
    """The root URL of the server, without /v1."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{url!r} is not the URL of a server; an example is http://127.0.0.1:8000", param="url")
    return url.rstrip("/").removesuffix("/v1")


def serve(url: str, port: int) -> int:
    settings = HttpSettings(host=HOST, port=port)
    app = _build_app(check_url(url), settings)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(app, settings, url))


def _build_app(url: str, settings: HttpSettings) -> ASGIApp:
    """Behind the same middleware as the server's own workbench, so the same rules for Host and Origin apply."""
    workbench = WorkbenchApp(lambda _: ServerAddress(url))

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await workbench.close()

    async def home(_: Any) -> RedirectResponse:
        return RedirectResponse(PREFIX)

    pages: dict[str, ASGIApp] = {"/": request_response(home), PREFIX: workbench}
    table = RouteTable((row, pages[row.path]) for row in OPEN if row.path in pages)
    return RequestMiddleware(table, Router(lifespan=lifespan), settings, Authenticator(settings, KeyRing()), Metrics())


async def _serve(app: ASGIApp, settings: HttpSettings, url: str) -> int:
    socket = listen(settings.host, settings.port, shared=False)
    log.info("the workbench of %s is at http://%s:%s%s", url, HOST, socket.getsockname()[1], PREFIX)
    server = make_server(app, settings)
    await server.serve(sockets=[socket])
    return 0 if server.started else 1
