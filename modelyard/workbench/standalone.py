"""`modelyard workbench --url …`: the page as a server of its own, in front of a Modelyard that runs elsewhere."""

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
from modelyard.http import server as front
from modelyard.http.auth import Authenticator
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.settings import HttpSettings
from modelyard.processes.ports import listen
from modelyard.telemetry.metrics import Metrics
from modelyard.workbench.mount import PREFIX, Address, Workbench

log = logging.getLogger("modelyard.workbench")

HOST = "127.0.0.1"  # only ever here: whoever reaches the page may do what a server without keys lets anybody do


def checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{url!r} is not an address of a server; it looks like http://127.0.0.1:8000", param="url")
    return url.rstrip("/").removesuffix("/v1")


def build(url: str, settings: HttpSettings) -> ASGIApp:
    """Behind the same guard as the server's own page: its rules for Host and Origin hold here, too."""
    address = Address(checked(url))
    workbench = Workbench(lambda _: address)

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        yield
        await workbench.close()

    async def home(_: Any) -> RedirectResponse:
        return RedirectResponse(PREFIX)

    app = Starlette(routes=[Route("/", home)], lifespan=life)
    return RequestMiddleware(app, {}, settings, Authenticator(settings, ()), Metrics(), workbench)


def serve(url: str, port: int) -> int:
    settings = HttpSettings(host=HOST, port=port)
    app = build(url, settings)
    with asyncio.Runner(loop_factory=front.loop_factory()) as runner:
        return runner.run(_serve(app, settings, url))


async def _serve(app: ASGIApp, settings: HttpSettings, url: str) -> int:
    listening = listen(settings.host, settings.port, shared=False)
    log.info("the workbench of %s is at http://%s:%s%s", url, HOST, listening.getsockname()[1], PREFIX)
    server = front.make_server(app, settings)
    await server.serve(sockets=[listening])
    return 0 if server.started else 1
