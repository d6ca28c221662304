"""A client that sends again may reach another gateway than before: its answer is made once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.config.load import load_config
from modelyard.server.app import compose
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.worker import HostedEngine
from tests.serving import demo
from tests.workers.test_split import Yard, gateway, until, yard

CHAT = "/v1/chat/completions"
ENDLESS = [{"steps": [{"text": "so far"}, {"hang": True}]}]


@asynccontextmanager
async def gateways(folder: Path) -> AsyncIterator[tuple[Yard, list[httpx.AsyncClient]]]:
    """Two whole gateways at one scheduler and one worker."""
    loaded = load_config(env={}, overrides=demo(ENDLESS))
    async with yard(folder, parallel=4, script=ENDLESS) as there, AsyncExitStack() as stack:
        clients = []
        for name in ("a", "b"):
            pool: RemotePool = await stack.enter_async_context(gateway(there, name))
            await until(lambda pool=pool: pool.engine("demo") is not None)  # type: ignore[misc]
            made = compose(loaded.config, {}, pool=pool)
            transport = httpx.ASGITransport(made.app)
            clients.append(
                await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
            )
            stack.push_async_callback(made.gateway.close)
        yield there, clients


def body(**more: Any) -> dict[str, Any]:
    return {"model": "x", "messages": [{"role": "user", "content": "Hi."}], "temperature": 0} | more


@pytest.mark.parametrize(
    ("second", "runs"),
    [
        ({}, 1),
        ({"stream": True}, 1),
        ({"max_tokens": 7}, 2),
        ({"temperature": 0.5, "seed": 3}, 2),
    ],
    ids=["the same", "the same, streamed", "another length", "another sampling"],
)
async def test_the_same_request_at_two_gateways_is_one_run(tmp_path: Path, second: dict[str, Any], runs: int) -> None:
    async with gateways(tmp_path) as (there, clients):
        (worker,) = there.workers
        (hosted,) = worker.engines
        asked = [
            asyncio.create_task(client.post(CHAT, json=body(**more)))
            for client, more in zip(clients, ({}, second), strict=True)
        ]
        try:
            await until(lambda: hosted.running == 2)
            await until(lambda: _running(hosted) == runs)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: (hosted.running, _running(hosted)) == (0, 0))


def _running(hosted: HostedEngine) -> int:
    assert hosted.engine is not None
    return hosted.engine.stats().running
