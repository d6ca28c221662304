"""Gemini's Interactions with the official SDK: whole, streamed, continued, in the background, fetched and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import types

from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, demo_config, live_server

SCRIPT: list[dict[str, Any]] = [
    {"result": "sunny", "steps": [{"text": "It is sunny."}]},
    {
        "when": "^weather",
        "steps": [{"think": "Let me see."}, {"call": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
    },
    {"when": "^again", "steps": [{"text": "You said hello."}]},
    {"when": "^slow", "steps": [{"text": "One"}, {"delay": 30}, {"text": " two."}]},
    {"steps": [{"text": "Hello there."}]},
]
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
KEYS = [{"name": "ada", "key": "sk-ada"}, {"name": "bob", "key": "sk-bob"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(demo_config(SCRIPT) | {"keys": KEYS}) as running:
        yield running


_CLIENTS: dict[tuple[str, str], Any] = {}  # a client that is collected closes its connections


def client(server: LiveServer, key: str = "sk-ada") -> Any:
    options = types.HttpOptions(base_url=server.url)
    made = _CLIENTS.setdefault((server.url, key), genai.Client(api_key=key, http_options=options))
    return made.interactions


def texts(interaction: Any) -> str:
    return "".join(part.text for step in interaction.steps if step.type == "model_output" for part in step.content)


def test_an_interaction_is_answered_continued_fetched_and_deleted(server: LiveServer) -> None:
    ada = client(server)
    first = ada.create(model="demo", input="hello", system_instruction="Be brief.")
    assert (first.status, texts(first)) == ("completed", "Hello there.")
    assert first.usage.total_tokens == first.usage.total_input_tokens + first.usage.total_output_tokens
    second = ada.create(model="demo", input="again", previous_interaction_id=first.id)
    assert (texts(second), second.previous_interaction_id) == ("You said hello.", first.id)
    assert second.usage.total_input_tokens > first.usage.total_input_tokens
    found = ada.get(second.id)
    assert (found.id, found.status, texts(found)) == (second.id, "completed", "You said hello.")
    assert found.usage.total_tokens == second.usage.total_tokens
    ada.delete(second.id)
    with pytest.raises(Exception, match="no interaction"):
        ada.get(second.id)


def test_an_interaction_of_another_key_does_not_exist(server: LiveServer) -> None:
    first, bob = client(server).create(model="demo", input="hello"), client(server, "sk-bob")
    for attempt in (
        lambda: bob.get(first.id),
        lambda: bob.delete(first.id),
        lambda: bob.create(model="demo", input="again", previous_interaction_id=first.id),
    ):
        with pytest.raises(Exception, match="no interaction"):
            attempt()
    url = f"{server.url}/v1beta/interactions"
    sent = {"model": "demo", "input": "x", "previous_interaction_id": "resp_unknown"}
    replies = [
        httpx.get(f"{url}/x", headers={"x-goog-api-key": "sk-bob"}),
        httpx.post(url, json=sent, headers={"x-goog-api-key": "sk-bob"}),
    ]
    assert [(reply.status_code, reply.json()["error"]["status"]) for reply in replies] == [(404, "NOT_FOUND")] * 2
    assert httpx.get(f"{url}/{first.id}").status_code == 401


def test_a_streamed_interaction_has_the_events_of_its_steps(server: LiveServer) -> None:
    events = list(client(server).create(model="demo", input="weather", tools=[WEATHER], stream=True))
    kinds = [event.event_type for event in events]
    assert kinds[0] == "interaction.created"
    assert kinds[-1] == "interaction.completed"
    assert events[-1].interaction.status == "requires_action"
    starts = [event.step.type for event in events if event.event_type == "step.start"]
    assert starts == ["thought", "function_call"]
    arguments = "".join(
        e.delta.arguments for e in events if e.event_type == "step.delta" and e.delta.type == "arguments_delta"
    )
    assert arguments.replace(" ", "") == '{"city":"Rome"}'
    assert kinds.count("step.start") == kinds.count("step.stop") == 2
    assert client(server).get(events[0].interaction.id).status == "requires_action"


def test_a_function_s_result_continues_the_interaction(server: LiveServer) -> None:
    ada = client(server)
    asked = ada.create(model="demo", input="weather", tools=[WEATHER])
    assert asked.status == "requires_action"
    call = asked.steps[-1]
    assert (call.name, call.arguments) == ("get_weather", {"city": "Rome"})
    result = {"type": "function_result", "call_id": call.id, "name": call.name, "result": "sunny"}
    answer = ada.create(model="demo", input=[result], previous_interaction_id=asked.id, tools=[WEATHER])
    assert texts(answer) == "It is sunny."
    history = [{"type": "user_input", "content": [{"type": "text", "text": "weather"}]}, call.model_dump(), result]
    assert texts(ada.create(model="demo", input=history, tools=[WEATHER], store=False)) == "It is sunny."


def test_an_interaction_in_the_background_is_fetched_and_cancelled(server: LiveServer) -> None:
    ada = client(server)
    begun = ada.create(model="demo", input="hello", background=True)
    assert begun.status in ("queued", "in_progress")
    wait_until(lambda: ada.get(begun.id).status == "completed", "it ended")
    assert texts(ada.get(begun.id)) == "Hello there."
    slow = ada.create(model="demo", input="slow", background=True)
    assert ada.cancel(slow.id).status == "cancelled"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "x"}, "model"),
        ({"model": "demo"}, "input"),
        ({"agent": "deep-research", "input": "x"}, "agent"),
        ({"model": "demo", "input": [{"type": "video", "uri": "x"}]}, "video"),
        ({"model": "demo", "input": [{"type": "function_result", "result": "x"}]}, "call_id"),
        ({"model": "demo", "input": "x", "stream": True, "background": True}, "background"),
        ({"model": "demo", "input": "x", "generation_config": {"tool_choice": "often"}}, "tool_choice"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server: LiveServer, body: dict[str, Any], reason: str) -> None:
    reply = httpx.post(f"{server.url}/v1beta/interactions", json=body, headers={"x-goog-api-key": "sk-ada"})
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]
