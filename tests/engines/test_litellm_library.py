"""The LiteLLM engine with the real library, and providers on this machine: one that answers, and ports without one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

import modelyard_litellm as litellm
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import Unavailable
from modelyard.core.events import Event, Failed, Reply, collect_reply
from modelyard.core.request import Message, Request, Text, Tool

pytestmark = [pytest.mark.litellm, pytest.mark.filterwarnings("ignore")]

CLOSED = "http://127.0.0.1:9"
REQUEST = Request(model="any", messages=(Message("user", (Text("Hello"),)),), max_tokens=9)
TOOLS = (Tool("look", "looks", {"type": "object", "properties": {"at": {"type": "string"}}}),)
PROVIDERS = ("openai/x", "anthropic/x", "ollama_chat/x", "mistral/x", "hosted_vllm/x")


async def chat(model: str, address: str, tools: tuple[Tool, ...]) -> list[Event]:
    options = litellm.Options(litellm_model=model, litellm_api_base=address, litellm_params={"api_key": "sk-local"})
    engine = litellm.create(EngineSpec("any", options, {"any": CacheInfo(4096)}))
    await engine.open(lambda *_: None)
    request = Request(model="any", messages=REQUEST.messages, tools=tools, max_tokens=9)
    try:
        return [event async for batch in engine.chat(request) for event in batch]
    finally:
        await engine.close()


@pytest.fixture
async def provider() -> AsyncIterator[str]:
    """An OpenAI server that calls the first tool it is offered."""

    async def answer(http: web.Request) -> web.StreamResponse:
        name = (await http.json())["tools"][0]["function"]["name"]
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": '{"at":"sea"}'}}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for delta, finish in (({"role": "assistant", "tool_calls": [call]}, None), ({}, "tool_calls")):
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "x", "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_tools_are_offered_and_called(provider: str) -> None:
    reply: Reply = collect_reply(await chat("openai/x", provider, TOOLS))
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("look", {"at": "sea"})]


@pytest.mark.parametrize("model", PROVIDERS)
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
async def test_unreachable_provider_is_unavailable(model: str, tools: tuple[Tool, ...]) -> None:
    (last,) = await chat(model, CLOSED, tools)
    assert isinstance(last, Failed)
    assert isinstance(last.error, Unavailable)
    assert (last.error.code, last.error.retry_after) == ("upstream_unreachable", 1.0)
    assert last.error.message.startswith("the provider of 'any' cannot be reached: Connect call failed")
