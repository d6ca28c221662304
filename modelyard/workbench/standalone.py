"""`modelyard workbench --url …`: the workbench as a separate server for a Modelyard on another machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from modelyard.core.errors import InvalidRequest
from modelyard.http.auth import Authenticator
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.server import loop_factory, make_server
from modelyard.http.settings import HttpSettings
from modelyard.processes.ports import listen
from modelyard.telemetry.metrics import Metrics
from modelyard.workbench.app import PREFIX, ServerAddress, WorkbenchApp

log = logging.getLogger("modelyard.workbench")

HOST = "127.0.0.1"  # fixed: with a server that needs no key, the page gives every visitor full control


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

    app = Starlette(routes=[Route("/", home)], lifespan=lifespan)
    return RequestMiddleware(app, {}, settings, Authenticator(settings, ()), Metrics(), workbench)


async def _serve(app: ASGIApp, settings: HttpSettings, url: str) -> int:
    socket = listen(settings.host, settings.port, shared=False)
    log.info("the workbench of %s is at http://%s:%s%s", url, HOST, socket.getsockname()[1], PREFIX)
    server = make_server(app, settings)
    await server.serve(sockets=[socket])
    return 0 if server.started else 1
