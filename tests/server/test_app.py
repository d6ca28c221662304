"""The composed server, in this process and in a separate one."""

from __future__ import annotations

import asyncio
import gc
import signal
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.accounts.keys import Key
from modelyard.cli.models import explain_model
from modelyard.config.load import load_config
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.server.app import ServerApp, collect_garbage, compose
from tests import cli_process
from tests.live_server import demo_config, live_server

HANG = """
[http]
drain_s = 0

[models.demo]
backend = "fake"
script = [{ steps = [{ text = "so far" }, { hang = true }] }]

[caches.main]
model = "demo"
n_ctx = 4096
parallel = 4
"""
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    "/v1/responses": {"input": "hi"},
}
LAST_EVENTS = {
    "/v1/chat/completions": 'data: {"error":{"message":"the server is shutting down"',
    "/v1/messages": "event: error",
    "/v1/responses": "event: response.failed",
}


def test_a_public_bind_address_needs_a_key():
    config = load_config(env={}, overrides={"http": {"host": "0.0.0.0"}}).config
    with pytest.raises(InvalidRequest, match="without an API key"):
        compose(config, {})


def test_keys_come_from_the_given_environment():
    env = {"MODELYARD_API_KEY": "secret"}
    server_app = compose(load_config(env=env, overrides={"http": {"host": "0.0.0.0"}}).config, env)
    assert [type(key) for key in server_app.accounts.ring.keys] == [Key]
    assert [key.name for key in server_app.accounts.ring.keys] == ["env"]


def test_a_broken_model_fails_alone_with_its_reason(tmp_path: Path):
    config = demo_config()
    config["models"]["odd"] = {"backend": "fake", "tokenizer_path": str(tmp_path / "nowhere")}
    config["routes"] = [{"match": "odd", "model": "odd"}, {"match": "*", "cache": "main"}]
    with live_server(config) as served:
        bad = httpx.post(served.url + "/v1/chat/completions", json={"model": "odd", **REQUESTS["/v1/chat/completions"]})
        good = httpx.post(
            served.url + "/v1/chat/completions", json={"model": "demo", **REQUESTS["/v1/chat/completions"]}
        )
        health = httpx.get(served.url + "/health").json()
    assert bad.status_code == 503
    assert "nowhere" in bad.json()["error"]["message"]
    assert good.status_code == 200
    assert health["status"] == "degraded"
    assert health["models"]["odd"]["state"] == "failed"
    assert "nowhere" in health["models"]["odd"]["reason"]


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(NotFound, match="there are demo"):
        explain_model(load_config(env={}, overrides=demo_config()).config, "domo")


async def test_stop_refuses_new_requests_and_is_idempotent():
    server_app = compose(load_config(env={}, overrides=demo_config()).config, {})
    server_app.scheduler.load("demo")
    await server_app.stop()
    await server_app.stop()
    transport = httpx.ASGITransport(server_app.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.post("/v1/messages", json={"model": "demo", **REQUESTS["/v1/messages"]})
    assert reply.status_code == 529
    assert reply.json()["error"]["message"] == "the server is shutting down"
    assert reply.headers["retry-after"]


def _active_requests(server_app: ServerApp) -> int:
    status = server_app.scheduler.status()["demo"]
    return status.running + status.waiting


async def test_stop_ends_running_and_queued_requests():
    server_app = compose(
        load_config(
            env={},
            overrides={
                **demo_config([{"steps": [{"hang": True}]}]),
                "caches": {"main": {"model": "demo", "n_ctx": 4096}},
                "routes": [],
            },
        ).config,
        {},
    )
    transport = httpx.ASGITransport(server_app.app)
    server_app.scheduler.load("demo")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        tasks = [
            asyncio.create_task(client.post(path, json={"model": "demo", **body})) for path, body in REQUESTS.items()
        ]
        async with asyncio.timeout(cli_process.DEADLINE):
            while _active_requests(server_app) < len(tasks):  # noqa: ASYNC110  the scheduler has no notification for this
                await asyncio.sleep(0)
        await server_app.stop()
        replies = await asyncio.gather(*tasks)
    assert ["shutting down" in reply.text for reply in replies] == [True] * len(tasks)
    assert {reply.status_code for reply in replies} <= {503, 529}


# --- in a separate process --------------------------------------------------------------------------------------------


def _open_stream(stack: ExitStack, client: httpx.Client) -> dict[str, tuple[httpx.Response, Iterator[str]]]:
    """A stream of each protocol, read until its first text."""
    streams = {}
    for path, body in REQUESTS.items():
        reply = stack.enter_context(client.stream("POST", path, json={"model": "demo", "stream": True, **body}))
        lines = reply.iter_lines()
        while "so far" not in next(lines):
            pass
        streams[path] = (reply, lines)
    return streams


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_streams_with_the_error_of_the_protocol_and_exits_cleanly(tmp_path: Path, number: int):
    with cli_process.serve(tmp_path, config=HANG) as server, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=cli_process.DEADLINE))
        streams = _open_stream(stack, client)
        assert server.stop(number) == 0
        ends = {path: "\n".join(lines) for path, (_, lines) in streams.items()}
    for path, ending in ends.items():
        assert LAST_EVENTS[path] in ending
        assert "the server is shutting down" in ending
    assert not [line for line in server.lines if line["logger"].startswith("uvicorn")]
    assert "Traceback" not in "".join(server.raw)


def test_a_single_server_logs_its_url_and_does_not_share_its_port(tmp_path: Path):
    with cli_process.serve(tmp_path, *cli_process.DEMO) as server:
        port = server.url.rpartition(":")[2]
        second = cli_process.run("serve", "--port", port, *cli_process.DEMO, cwd=tmp_path)
    first = server.lines[0]
    assert first["message"].startswith("listening on http://localhost:")
    assert first["models"] == "demo"
    assert second.returncode == 2
    assert second.stdout == ""
    assert second.stderr.splitlines()[-1].startswith(f"error Modelyard runs already at http://127.0.0.1:{port}")
    assert "Traceback" not in second.stderr


async def test_cycles_that_requests_leave_are_collected_soon() -> None:
    """Those that outlived a pass of the collector too: by themselves they would wait for hours."""

    class Node:
        other: Node

    one, other = Node(), Node()
    one.other, other.other = other, one
    gc.collect()  # they are old now
    is_gone = asyncio.Event()
    watched = weakref.ref(one, lambda _: is_gone.set())
    del one, other
    server = compose(load_config(env={}, overrides=demo_config()).config, {})
    collecting = asyncio.create_task(collect_garbage(server.gateway, every_s=0.001))
    await asyncio.wait_for(is_gone.wait(), 60)
    assert watched() is None
    collecting.cancel()
    await server.stop()
