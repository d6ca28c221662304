"""A real vLLM behind the gateway: every protocol, tools, schemas, overflow, and a killed replica."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.helpers import stream_events, wait_until
from tests.e2e.protocols import CHAT, MESSAGES, RESPONSES, Protocol, parse_events, send
from tests.e2e.test_managed_engines import NO_END_TOKENS, count_tokens, is_content, managed_server
from tests.engines.vllm_serve.real_server import TOOLS_TEMPLATE, fields
from tests.live_server import LiveServer

pytestmark = pytest.mark.vllm
WINDOW = 1024


def vllm_config(**more: Any) -> dict[str, Any]:
    model = {
        "backend": "vllm_serve",
        "chat_template": TOOLS_TEMPLATE,
        "vllm_max_model_len": WINDOW,
        "parallel": 8,
        "decoding": {"temperature": 0},
    }
    return {"models": {"demo": model | fields() | more}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with managed_server(vllm_config()) as running:
        wait_until(lambda: running.status("demo").state == "ready", "the model is loaded", 300)
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def test_every_protocol_works_and_prompt_tokens_match_our_count(
    server: LiveServer, client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    parsed = send(client, protocol, stream, "What is the capital of France?", limit=12)
    assert parsed.text
    assert parsed.usage.prompt == count_tokens(server.url, "What is the capital of France?")
    assert 1 <= parsed.usage.output <= 12


def test_an_overflow_is_refused_before_the_first_byte_in_each_protocol(
    server: LiveServer, client: httpx.Client
) -> None:
    long = "word " * 1200
    tokens = count_tokens(server.url, long)
    message = client.post("/v1/messages", json=MESSAGES.body(long)).json()["error"]["message"]
    assert message == f"prompt is too long: {tokens} tokens > {WINDOW} maximum"
    error = client.post("/v1/chat/completions", json=CHAT.body(long, stream=True)).json()["error"]
    assert (error["code"], error["n_prompt_tokens"]) == ("context_length_exceeded", tokens)
    failed = parse_events(client.post("/v1/responses", json=RESPONSES.body(long, stream=True)).text)[-1]
    assert failed.data["response"]["error"]["code"] == "context_length_exceeded"


def test_a_reply_that_fills_the_window_has_that_stop_reason(client: httpx.Client) -> None:
    parsed = send(client, MESSAGES, True, "count " * 980, limit=32000, logit_bias=NO_END_TOKENS)
    assert parsed.stop == "model_context_window_exceeded"
    assert parsed.usage.prompt + parsed.usage.output >= WINDOW - 1


def test_a_named_call_fits_the_schema_of_its_tool(client: httpx.Client, stream: bool) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"name": "get_weather", "parameters": city | {"additionalProperties": False}}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    offered = {"tools": [{"type": "function", "function": tool}], "tool_choice": choice}
    parsed = send(client, CHAT, stream, "Weather in Rome?", limit=60, **offered)
    ((name, arguments),) = parsed.calls
    assert name == "get_weather"
    jsonschema.validate(arguments, city)


def test_a_call_in_the_output_is_parsed(client: httpx.Client, stream: bool) -> None:
    """The tiny model makes no calls by itself; a regex forces one."""
    words = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Rome"\}\}\n</tool_call>'
    parsed = send(client, CHAT, stream, "Weather in Rome?", tools=True, limit=60, regex=words)
    assert parsed.calls == [("get_weather", {"city": "Rome"})]
    assert parsed.stop == "tool_calls"


def test_a_reply_fits_the_requested_schema(client: httpx.Client, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    parsed = send(client, CHAT, stream, "Give a number.", limit=60, response_format=form)
    jsonschema.validate(json.loads(parsed.text), schema)


def test_one_of_two_replicas_is_killed_and_the_other_continues() -> None:
    with managed_server(vllm_config(replicas=2, parallel=1)) as server:
        wait_until(lambda: len(_ready(server)) == 2, "both replicas are loaded", 400)
        engines = _ready(server)
        # Two texts, because identical deterministic requests share one reply.
        long = CHAT.body("Count.", limit=WINDOW - 200, logit_bias=NO_END_TOKENS, stream=True)
        short = CHAT.body("Tell a story.", limit=20, logit_bias=NO_END_TOKENS, stream=True)
        with stream_events(server, CHAT.path, long) as first_stream:
            next(event for event in first_stream if is_content(event))
            (first,) = [engine for engine in engines if engine.stats().running]
            (second,) = [engine for engine in engines if engine is not first]
            with stream_events(server, CHAT.path, short) as second_stream:
                # On few cores its first token may wait until the other replica is gone.
                wait_until(lambda: second.stats().running == 1, "the other replica has a request", 60)
                os.kill(first.pid, signal.SIGKILL)
                ends = [list(stream)[-1].data for stream in (first_stream, second_stream)]
        assert not second.lost.done(), second.log_tail(20)
        assert "was killed by SIGKILL" in str(ends[0]), ends
        assert ends[1] == "[DONE]", ends
        with httpx.Client(base_url=server.url, timeout=120) as client:
            assert send(client, CHAT, False, "Hello!", limit=4).text


def _ready(server: LiveServer) -> list[Any]:
    """The engines, once all of them accept requests."""
    scheduler = server.app.scheduler
    engines = list(scheduler.engines("demo"))
    return engines if scheduler.metrics()["model_replicas"]["demo"] == len(engines) else []
