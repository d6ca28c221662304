"""The published Open Responses specification (openresponses.org): the behaviours that its compliance page checks,
whole, streamed and over a WebSocket, against the types of its OpenAPI document, and the rules for its events."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openresponses_types.types as specification
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError
from websockets.sync.client import connect

from modelyard.protocols.openai_responses.request import ResponsesBody
from tests.e2e.protocols import parse_events
from tests.live_server import LiveServer, demo_config, live_server

pytestmark = pytest.mark.compliance

SUITE = os.environ.get("OPEN_RESPONSES", "")
# The types of the specification, by the value of `type`. The package generates them from its OpenAPI document.
SPECIFIED: dict[str, type[BaseModel]] = {
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in vars(specification).items()
    if name.endswith("StreamingEvent")
}
# The text of reasoning has the name that OpenAI's API and its clients use. None of them knows the name of the
# specification, `response.reasoning.delta`.
OPENAI_ONLY = {"response.reasoning_text.delta", "response.reasoning_text.done"}
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
    {"when": "long", "steps": [{"tokens": 100}]},
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
    "a schema": {
        "input": "Say hello.",
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}},
    },
    "every setting": {
        "input": "Say hello.",
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "parallel_tool_calls": False,
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "truncation": "disabled",
        "store": False,
        "service_tier": "auto",
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    },
    "a required tool": {"input": "The weather?", "tools": [WEATHER], "tool_choice": "required"},
    "a named tool": {
        "input": "The weather?",
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "get_weather"},
    },
    "a result": {
        "input": [
            {"type": "message", "role": "user", "content": "How warm?"},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "20 degrees"},
        ],
        "tools": [WEATHER],
    },
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
REWRITTEN = {"tools", "tool_choice", "text", "reasoning", "service_tier"}  # with the defaults that apply


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config(SCRIPT, modalities=["text", "image"]) | {"keys": []}
    with live_server(config) as running:
        yield running


def as_specified(response: Any) -> Any:
    """The document has null for the schema that a response repeats, which is an oversight."""
    text = response["text"]
    return (
        response | {"text": text | {"format": text["format"] | {"schema": None}}}
        if "schema" in text["format"]
        else response
    )


def check_response(response: Any, kind: str) -> None:
    specification.ResponseResource.model_validate(as_specified(response))
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["created_at"] <= response["completed_at"] < response["created_at"] + 60
    Response.model_validate(response, strict=True)
    is_call = REQUESTS[kind].get("tools") and kind != "a result"
    assert (response["output"][-1]["type"] == "function_call") == bool(is_call)
    repeated = {name: value for name, value in REQUESTS[kind].items() if name in response and name not in REWRITTEN}
    assert {name: response[name] for name in repeated} == repeated


def check_event(event: Any) -> None:
    EVENT.validate_python(event, strict=True)
    if event["type"] not in OPENAI_ONLY:
        given = event | {"response": as_specified(event["response"])} if "response" in event else event
        SPECIFIED[event["type"]].model_validate(given)


def test_the_types_of_the_specification_refuse_what_lacks_a_field(server: LiveServer) -> None:
    whole = httpx.post(server.url + "/v1/responses", json={"model": "demo", "input": "Hello"}).json()
    for field in specification.ResponseResource.model_fields:
        with pytest.raises(ValidationError):
            specification.ResponseResource.model_validate({k: v for k, v in whole.items() if k != field})


def test_every_field_of_a_request_is_read() -> None:
    """`service_tier`, `stream_options` and `truncation` are repeated or have no effect here; docs/api.md says so."""
    fields = set(specification.CreateResponseBody.model_fields) - {"service_tier", "stream_options", "truncation"}
    assert fields <= set(ResponsesBody.__struct_fields__)


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_requests_of_this_page_are_valid(kind: str) -> None:
    body = {"model": "demo", **REQUESTS[kind]}
    body["input"] = [item for item in body["input"] if "type" in item] if isinstance(body["input"], list) else "x"
    specification.CreateResponseBody.model_validate(body)


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
        check_event(event)
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


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_that_the_limit_cuts_off_is_the_last_one_and_incomplete(server: LiveServer, stream: bool) -> None:
    body = {"model": "demo", "input": "A long story", "max_output_tokens": 16, "stream": stream}
    reply = httpx.post(server.url + "/v1/responses", json=body)
    if not stream:
        response = reply.json()
    else:
        *events, last = [event.data for event in parse_events(reply.text)]
        assert (events[-1]["type"], last["type"]) == ("response.output_item.done", "response.incomplete")
        response = last["response"]
        assert events[-1]["item"] == response["output"][-1]
    specification.ResponseResource.model_validate(response)
    assert [item["status"] for item in response["output"]] == [response["status"]] == ["incomplete"]


def test_a_response_over_a_websocket_has_the_same_events(server: LiveServer) -> None:
    create = {"type": "response.create", "model": "demo", "input": "Say hello."}
    specification.WebSocketResponseCreateEvent.model_validate(create)
    with connect(server.url.replace("http", "ws") + "/v1/responses") as socket:
        socket.send(json.dumps(create))
        events = [json.loads(socket.recv(timeout=20))]
        while events[-1]["type"] != "response.completed":
            events.append(json.loads(socket.recv(timeout=20)))
        socket.send(json.dumps(create | {"previous_response_id": "resp_0"}))
        refused = json.loads(socket.recv(timeout=20))
    for event in events:
        check_event(event)
    check_response(events[-1]["response"], "a text")
    specification.WebSocketErrorEvent.model_validate(refused)


def test_a_compaction_is_the_specified_resource(server: LiveServer) -> None:
    body = {"model": "demo", "input": REQUESTS["several turns"]["input"]}
    specification.CompactResponseMethodPublicBody.model_validate(body)
    reply = httpx.post(server.url + "/v1/responses/compact", json=body)
    assert reply.status_code == 200, reply.text
    specification.CompactResource.model_validate(reply.json())


@pytest.mark.harness
@pytest.mark.skipif(not SUITE, reason="OPEN_RESPONSES names no checkout of the suite")
def test_the_public_suite_passes(server: LiveServer) -> None:
    """`bin/compliance-test.ts` of github.com/openresponses/openresponses, after `bun install` there."""
    folder = Path(SUITE).expanduser()
    bun = shutil.which("bun", path=f"{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}")
    assert bun, "the suite needs Bun: https://bun.sh, or npm install bun"
    options = ["--base-url", server.url + "/v1", "--api-key", "none", "--model", "demo", "--json"]
    command = [bun, "run", "bin/compliance-test.ts", *options]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout, run.stderr
    results = json.loads(run.stdout)["results"]
    assert any(result["status"] == "passed" for result in results)
    assert {result["id"]: result["errors"] for result in results if result["status"] == "failed"} == {}


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
