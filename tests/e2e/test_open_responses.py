"""The published Open Responses specification (openresponses.org): the six behaviours that its compliance page checks,
whole and streamed, with the required fields of its response object and the rules for its events."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.e2e.protocols import parse_events
from tests.live_server import LiveServer, demo_config, live_server

pytestmark = pytest.mark.compliance

# field → its types in the specification, where every one of them is required
NULL: type = type(None)
REQUIRED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), (str,)),
    **dict.fromkeys(("created_at", "top_logprobs"), (int,)),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, NULL)),
    **dict.fromkeys(
        ("previous_response_id", "instructions", "user", "safety_identifier", "prompt_cache_key"), (str, NULL)
    ),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, NULL)),
    **dict.fromkeys(("top_p", "temperature", "presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), (bool,)),
    **dict.fromkeys(("output", "tools"), (list,)),
    **dict.fromkeys(("text", "metadata"), (dict,)),
    "tool_choice": (str, dict),
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f00050001ff"
        "89993d1d0000000049454e44ae426082"
    )
).decode()
SCRIPT = [
    {"when": "weather", "steps": [{"call": {"name": "get_weather", "arguments": {"city": "Rome"}}}]},
    {"when": "hard", "steps": [{"think": "Let me see."}, {"text": "42."}]},
    {"steps": [{"text": "Hello there."}]},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "a text": {"input": [{"type": "message", "role": "user", "content": "Say hello in three words."}]},
    "a system prompt": {
        "input": [{"type": "message", "role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    },
    "a tool": {"input": [{"type": "message", "role": "user", "content": "The weather?"}], "tools": [WEATHER]},
    "an image": {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is it?"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
                ],
            }
        ]
    },
    "several turns": {
        "input": [
            {"type": "message", "role": "user", "content": "I am Ada."},
            {"type": "message", "role": "assistant", "content": "Hello Ada."},
            {"type": "message", "role": "user", "content": "Who am I?"},
        ]
    },
    "reasoning": {"input": "A hard question", "reasoning": {"effort": "low", "summary": "auto"}},
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config(SCRIPT, modalities=["text", "image"]) | {"keys": []}
    with live_server(config) as running:
        yield running


def check_response(response: Any, kind: str) -> None:
    for field, types in REQUIRED.items():
        assert type(response[field]) in types, field
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["created_at"] <= response["completed_at"] < response["created_at"] + 60
    Response.model_validate(response, strict=True)
    assert (response["output"][-1]["type"] == "function_call") == (kind == "a tool")


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_whole_response_has_every_required_field(server: LiveServer, kind: str) -> None:
    reply = httpx.post(server.url + "/v1/responses", json={"model": "demo", **REQUESTS[kind]})
    assert reply.status_code == 200, reply.text
    check_response(reply.json(), kind)


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_stream_is_numbered_nested_and_ends_with_the_whole_response(server: LiveServer, kind: str) -> None:
    reply = httpx.post(server.url + "/v1/responses", json={"model": "demo", "stream": True, **REQUESTS[kind]})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [event.data for event in parse_events(reply.text)]
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    check_response(events[-1]["response"], kind)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert all(item["status"] == "in_progress" for item in added)
    assert done == events[-1]["response"]["output"]
    check_deltas(events)


def check_deltas(events: list[Any]) -> None:
    """The deltas of each part, joined, are the text of its `done` event."""
    texts: dict[tuple[str, str], str] = {}
    for event in events:
        kind, _, end = event["type"].rpartition(".")
        if end == "delta":
            texts[kind, event["item_id"]] = texts.get((kind, event["item_id"]), "") + event["delta"]
        elif end == "done" and "item_id" in event and "part" not in event:
            assert texts.pop((kind, event["item_id"])) == event.get("text", event.get("arguments"))
    assert not texts


def test_a_refused_request_has_an_error_object(server: LiveServer) -> None:
    for body, code in (
        ({"model": "demo"}, 400),
        ({"model": "demo", "input": "x", "previous_response_id": "resp_0"}, 400),
    ):
        reply = httpx.post(server.url + "/v1/responses", json=body)
        assert reply.status_code == code
        assert {"message", "type", "param", "code"} <= set(reply.json()["error"])


def test_an_error_names_the_field_that_the_client_sent(server: LiveServer) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}]
    error = httpx.post(server.url + "/v1/responses", json={"model": "demo", "input": image}).json()["error"]
    assert (error["code"], error["param"]) == ("image_not_allowed", "input")


@pytest.mark.parametrize(
    ("path", "body", "highest"),
    [
        ("/v1/responses", {"input": "Hello"}, 2),
        ("/v1/completions", {"prompt": "Hello"}, 2),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, 2),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}, 1),
    ],
)
def test_a_temperature_above_the_protocols_limit_is_refused(
    server: LiveServer, path: str, body: dict[str, Any], highest: int
) -> None:
    for temperature, status in ((highest, 200), (highest + 0.1, 400)):
        reply = httpx.post(server.url + path, json={"model": "demo", "temperature": temperature, **body})
        assert reply.status_code == status, reply.text
        assert status == 200 or f"temperature must be between 0 and {highest}" in reply.text
