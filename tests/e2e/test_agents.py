"""An agent with one slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.library import default_model
from tests.live_server import LiveServer, live_server

AGENT_TOOLS = [{"name": "Bash", "description": "Runs a command. " * 20, "input_schema": {"type": "object", "properties": {}}}]
AGENT_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"},
    {"type": "text", "text": "You are a coding agent. Be brief and exact. " * 10},
]
TITLE_FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"t": {"const": "Fix"}}}}}
TASK = {"role": "user", "content": "Fix the tests."}


@pytest.fixture(scope="module")
def agent_server() -> Iterator[LiveServer]:
    default_model.fetch()
    caches = {"main": {"n_ctx": 1024, "parallel": 1}, "fast": {"n_ctx": 256, "parallel": 1}}
    with pytest.MonkeyPatch.context() as patch:
        # Independent of the speed of this machine.
        patch.setattr(
            "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved >= 8
        )
        with live_server({"models": {"smollm2": {"n_threads": 1}}, "caches": caches}) as running:
            yield running


def send(agent_server: LiveServer, agent: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {"x-claude-code-session-id": "s1"} | ({"x-claude-code-agent-id": agent} if agent else {})
    full = {"model": "smollm2", "max_tokens": 8, "temperature": 0, "messages": [TASK]} | body
    reply = httpx.post(agent_server.url + "/v1/messages", json=full, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def prompt_tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_background_requests_do_not_evict_the_conversation_of_an_agent(agent_server: LiveServer) -> None:
    first = send(agent_server, system=AGENT_SYSTEM, tools=AGENT_TOOLS)
    send(agent_server, system="Explore the code.", tools=AGENT_TOOLS, agent="a1")
    send(agent_server, output_config=TITLE_FORMAT, max_tokens=32)
    send(agent_server, system="Block or not? " * 40, stop_sequences=["</block>"], thinking={"type": "disabled"})
    send(agent_server, system="Explore more.", tools=AGENT_TOOLS, agent="a2")
    history = [TASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And now?"}]
    changed = [AGENT_SYSTEM[0] | {"text": "x-anthropic-billing-header: cc_version=1; cch=11111;"}, AGENT_SYSTEM[1]]
    second = send(agent_server, system=changed, tools=AGENT_TOOLS, messages=history)
    assert second["usage"]["cache_read_input_tokens"] >= prompt_tokens(first["usage"])
