"""A client of the ASGI app in the test's own loop: no socket, and no model is loaded unless requested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from modelyard.config.load import load_config
from modelyard.http.routes import ROWS, RouteTable, Row
from modelyard.server.app import ServerApp, compose
from tests.live_server import demo_config, owner_headers

URL = "http://localhost"
TABLE = RouteTable((row, lambda *_: asyncio.sleep(0)) for row in ROWS)


def row_of(path: str) -> Row | None:
    """Whatever its method."""
    return TABLE.find(path, "GET").row


def make_app(config: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> ServerApp:
    return compose(load_config(env=env or {}, overrides=config or demo_config()).config, env or {})


@asynccontextmanager
async def app_client(
    config: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    *,
    loaded: bool = False,
    is_owner: bool = False,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a new app, which may prove that it is the owner's. An exception in the app becomes a reply, as it
    does on a socket."""
    app = make_app(config, env)
    if loaded:
        await load_all(app)
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    headers = owner_headers(app) if is_owner else {}
    async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
        yield client
    await app.stop()
    await app.gateway.close()


async def load_all(app: ServerApp) -> None:
    for name in app.config.models:
        app.scheduler.load(name)
    async with asyncio.timeout(60):
        while any(status.state == "loading" for status in app.scheduler.status().values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
