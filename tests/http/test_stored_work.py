"""Background responses and batches when a server stops, and over WebSockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from websockets.sync.client import connect

from modelyard.gateway.batches import OpenBatch
from modelyard.server.app import ServerApp
from tests.e2e.helpers import config
from tests.http.app_client import URL, load_all, make_app
from tests.live_server import live_server

LINE = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "endless stream"}]}


@asynccontextmanager
async def endless_work(folder: Path) -> AsyncIterator[tuple[ServerApp, str, str]]:
    """An app that runs an endless background response and a batch with an endless line, and their ids."""
    app = make_app(config(store={"objects": str(folder / "objects.sqlite")}))
    await load_all(app)
    app.objects.batches.open()
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        body: dict[str, Any] = {"model": "demo", "input": "endless stream", "background": True}
        response = (await client.post("/v1/responses", json=body)).json()["id"]
        requests = {"requests": [{"custom_id": "a", "params": LINE}]}
        batch = (await client.post("/v1/messages/batches", json=requests)).json()["id"]
        async with asyncio.timeout(60):
            while app.scheduler.status()["demo"].running < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
    yield app, response, batch
    await app.stop()
    await app.gateway.close()
    await app.objects.close()


async def assert_put_back(app: ServerApp, batch: str) -> None:
    """No process owns it, and its line has no result."""
    entry = await app.objects.store.get("open-batches", batch)
    assert entry is not None
    assert msgspec.msgpack.decode(entry, type=OpenBatch) == OpenBatch("anthropic", "", "")
    assert [
        row async for row in app.objects.batches.results(await app.objects.batches.get("anthropic", batch, ""), "")
    ] == []


async def test_a_server_that_stops_says_so_and_puts_its_batches_back(tmp_path: Path) -> None:
    async with endless_work(tmp_path) as (app, id, batch):
        await app.stop()
        record = await app.objects.background.find(id, "")
        assert record is not None
        response = json.loads(record.stored.response)
        assert (record.status, response["error"]["message"]) == ("failed", "the server is shutting down")
        await assert_put_back(app, batch)


async def test_a_server_that_drains_puts_its_batches_back_and_lets_other_requests_go_on(tmp_path: Path) -> None:
    async with endless_work(tmp_path) as (app, id, batch):
        await app.drain()
        await assert_put_back(app, batch)
        record = await app.objects.background.find(id, "")
        assert record is not None
        assert (record.status, app.is_busy()) == ("in_progress", True)


def test_a_socket_runs_background_responses_and_conversations(tmp_path: Path) -> None:
    with live_server(config(store={"objects": str(tmp_path / "objects.sqlite")})) as server:
        conversation = httpx.post(server.url + "/v1/conversations", json={}).json()["id"]
        with connect(server.url.replace("http", "ws") + "/v1/responses") as socket:
            message = {"type": "response.create", "model": "demo", "input": "text"}
            socket.send(json.dumps(message | {"background": True, "conversation": conversation}))
            events = [json.loads(socket.recv(timeout=60))]
            while events[-1]["type"] != "response.completed":
                events.append(json.loads(socket.recv(timeout=60)))
        assert events[1]["type"] == "response.queued"
        assert events[-1]["response"]["conversation"] == {"id": conversation}
        items = httpx.get(f"{server.url}/v1/conversations/{conversation}/items").json()["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]
        body = {"model": "demo", "conversation": conversation}
        compacted = httpx.post(server.url + "/v1/responses/compact", json=body).json()
        assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
        counted = httpx.post(server.url + "/v1/responses/input_tokens", json=body | {"input": "text"}).json()
        assert counted["input_tokens"] > events[-1]["response"]["usage"]["input_tokens"]
