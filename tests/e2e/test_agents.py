"""An agent's session on the real engine with one place: its errands and sub-agents cost its conversation nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.library import default_model
from tests.live_server import LiveServer, live_server

TOOLS = [{"name": "Bash", "description": "Runs a command. " * 20, "input_schema": {"type": "object", "properties": {}}}]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"},
    {"type": "text", "text": "You are a coding agent. Be brief and exact. " * 10},
]
TITLE = {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"t": {"const": "Fix"}}}}}
QUESTION = {"role": "user", "content": "Fix the tests."}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    default_model.fetch()
    caches = {"main": {"n_ctx": 1024, "parallel": 1}, "fast": {"n_ctx": 256, "parallel": 1}}
    with pytest.MonkeyPatch.context() as patch:
        # Whatever this machine takes to read a token.
        patch.setattr(
            "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved >= 8
        )
        with live_server({"models": {"smollm2": {"n_threads": 1}}, "caches": caches}) as running:
            yield running


def send(server: LiveServer, agent: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {"x-claude-code-session-id": "s1"} | ({"x-claude-code-agent-id": agent} if agent else {})
    full = {"model": "smollm2", "max_tokens": 8, "temperature": 0, "messages": [QUESTION]} | body
    reply = httpx.post(server.url + "/v1/messages", json=full, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def prompt_tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_background_requests_do_not_evict_the_conversation_of_an_agent(server: LiveServer) -> None:
    first = send(server, system=SYSTEM, tools=TOOLS)
    send(server, system="Explore the code.", tools=TOOLS, agent="a1")
    send(server, output_config=TITLE, max_tokens=32)
    send(server, system="Block or not? " * 40, stop_sequences=["</block>"], thinking={"type": "disabled"})
    send(server, system="Explore more.", tools=TOOLS, agent="a2")
    history = [QUESTION, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And now?"}]
    changed = [SYSTEM[0] | {"text": "x-anthropic-billing-header: cc_version=1; cch=11111;"}, SYSTEM[1]]
    second = send(server, system=changed, tools=TOOLS, messages=history)
    assert second["usage"]["cache_read_input_tokens"] >= prompt_tokens(first["usage"])
