"""Tool search over deferred tools, through a whole server with the official SDKs: whole, streamed, and sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import ResponseToolSearchCall, ResponseToolSearchOutputItem

from tests.live_server import LiveServer, live_server

SCRIPT: list[dict[str, Any]] = [
    {"result": "lovely", "steps": [{"text": "It is lovely in Rome."}]},
    {"result": "From here on", "steps": [{"call": {"name": "get_weather", "arguments": {"city": "Rome"}}}]},
    {"result": "cannot be used", "steps": [{"text": "That was no pattern."}]},
    {"when": "^bad", "steps": [{"call": {"name": "tool_search_tool_regex", "arguments": {"query": "("}}}]},
    {"when": "^regex", "steps": [{"call": {"name": "tool_search_tool_regex", "arguments": {"query": "^get_w.*"}}}]},
    {"when": "^openai", "steps": [{"call": {"name": "tool_search", "arguments": {"query": "weather"}}}]},
    {"steps": [{"text": "Looking."}, {"call": {"name": "tool_search_tool_bm25", "arguments": {"query": "weather"}}}]},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = {"get_weather": "The weather of a city.", "send_mail": "Send a letter.", "add": "Add two numbers."}
ANTHROPIC: Any = [
    {"name": name, "description": text, "input_schema": CITY, "defer_loading": True} for name, text in NAMES.items()
]
OPENAI: Any = [
    {"type": "function", "name": name, "description": text, "parameters": CITY, "defer_loading": True}
    for name, text in NAMES.items()
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = {"backend": "fake", "token_delay": 0, "script": SCRIPT, "n_ctx": 16384}
    with live_server({"models": {"demo": model}}) as running:
        yield running


@pytest.fixture(scope="module")
def messages(server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client.messages


@pytest.fixture(scope="module")
def responses(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def search(kind: str) -> dict[str, str]:
    return {"type": f"tool_search_tool_{kind}_20251119", "name": f"tool_search_tool_{kind}"}


def asked(text: str, kind: str = "bm25") -> dict[str, Any]:
    history = [{"role": "user", "content": text}]
    return {"model": "demo", "max_tokens": 200, "messages": history, "tools": [search(kind), *ANTHROPIC]}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("text", "kind"), [("Rome?", "bm25"), ("regex", "regex")])
def test_a_message_finds_a_deferred_tool_and_calls_it(messages: Any, text: str, kind: str, streamed: bool) -> None:
    body = asked(text, kind)
    if streamed:
        with messages.stream(**body) as stream:
            reply = stream.get_final_message()
    else:
        reply = messages.create(**body)
    use, result, call = reply.content[-3:]
    assert (use.type, use.name) == ("server_tool_use", f"tool_search_tool_{kind}")
    assert (result.type, result.tool_use_id) == ("tool_search_tool_result", use.id)
    assert [found.tool_name for found in result.content.tool_references] == ["get_weather"]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
    assert reply.stop_reason == "tool_use"
    answered = {"type": "tool_result", "tool_use_id": call.id, "content": "lovely"}
    history = [
        *body["messages"],
        {"role": "assistant", "content": [block.to_dict() for block in reply.content]},
        {"role": "user", "content": [answered]},
    ]
    assert messages.create(**body | {"messages": history}).content[0].text == "It is lovely in Rome."


def test_a_deferred_tool_costs_nothing_until_it_is_found(server: LiveServer, messages: Any) -> None:
    def count(tools: Any) -> int:
        return int(
            messages.count_tokens(model="demo", messages=[{"role": "user", "content": "Hi"}], tools=tools).input_tokens
        )

    assert count([search("bm25"), *ANTHROPIC]) < count([{**tool, "defer_loading": False} for tool in ANTHROPIC])


def test_a_bad_pattern_is_a_result_that_the_model_reads(messages: Any) -> None:
    reply = messages.create(**asked("bad", "regex"))
    assert reply.content[1].content.error_code == "invalid_tool_input"
    assert reply.content[-1].text == "That was no pattern."


TOOLS: Any = [{"type": "tool_search"}, *OPENAI]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_finds_a_deferred_tool_and_calls_it(responses: Any, streamed: bool) -> None:
    if streamed:
        events = list(responses.create(model="demo", input="openai", tools=TOOLS, stream=True))
        reply = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == reply.output
    else:
        reply = responses.create(model="demo", input="openai", tools=TOOLS)
    call, found, function = reply.output
    assert isinstance(call, ResponseToolSearchCall)
    assert (call.execution, call.arguments) == ("server", {"query": "weather"})
    assert isinstance(found, ResponseToolSearchOutputItem)
    assert found.call_id == call.call_id
    assert [(tool.name, tool.defer_loading) for tool in found.tools] == [("get_weather", True)]
    output = {"type": "function_call_output", "call_id": function.call_id, "output": "lovely"}
    history = [{"role": "user", "content": "openai"}, *(item.to_dict() for item in reply.output), output]
    for more in ({"input": history}, {"input": [output], "previous_response_id": reply.id}):
        assert responses.create(model="demo", tools=TOOLS, **more).output_text == "It is lovely in Rome."


def test_a_search_that_the_client_runs_goes_to_the_client(responses: Any) -> None:
    tools = [{"type": "tool_search", "execution": "client", "description": "Find.", "parameters": CITY}]
    reply = responses.create(model="demo", input="openai", tools=tools)
    (call,) = reply.output
    assert (call.type, call.execution) == ("tool_search_call", "client")
    found = {"type": "tool_search_output", "call_id": call.call_id, "execution": "client", "tools": OPENAI[:1]}
    history = [{"role": "user", "content": "openai"}, call.to_dict(), found]
    answer = responses.create(model="demo", input=history, tools=tools)
    assert [(item.type, item.name) for item in answer.output] == [("function_call", "get_weather")]


def test_wrong_results_in_a_history_are_refused(server: LiveServer) -> None:
    block = {"type": "tool_search_tool_result", "tool_use_id": "x", "content": {"tool_references": [{"tool_name": 7}]}}
    body = asked("Hi") | {"messages": [{"role": "assistant", "content": [block]}]}
    reply = httpx.post(server.url + "/v1/messages", content=json.dumps(body))
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
