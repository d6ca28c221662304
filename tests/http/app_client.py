"""The whole front door in the test's own process and loop: no socket, and nothing loaded unless the test asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from modelyard.config.load import load_config
from modelyard.server.app import ServerApp, compose
from tests.live_server import demo_config

URL = "http://localhost"


def make_app(config: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> ServerApp:
    return compose(load_config(env=env or {}, overrides=config or demo_config()).config, env or {})


@asynccontextmanager
async def app_client(
    config: dict[str, Any] | None = None, env: dict[str, str] | None = None, *, loaded: bool = False
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of its own server. A bug is an answer here, as it is on a socket: nothing is raised through."""
    made = make_app(config, env)
    if loaded:
        await load_all(made)
    transport = httpx.ASGITransport(made.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        yield client
    await made.stop()
    await made.gateway.close()


async def load_all(made: ServerApp) -> None:
    for name in made.config.models:
        made.scheduler.load(name)
    async with asyncio.timeout(60):
        while any(status.state == "loading" for status in made.scheduler.status().values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
