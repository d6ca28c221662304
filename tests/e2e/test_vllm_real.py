"""A real vLLM behind the gateway: every protocol, tools, forms, overflow, and two replicas of which one is killed."""

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
from tests.e2e.protocols import PROTOCOLS, Protocol, parse_events
from tests.e2e.test_llama_server import ENDLESS, count, is_content, serving_well
from tests.e2e.test_matrix import ask
from tests.engines.vllm_serve.real_server import TOOLS_TEMPLATE, fields
from tests.live_server import LiveServer

pytestmark = pytest.mark.vllm
WINDOW = 1024
MESSAGES, CHAT, RESPONSES = PROTOCOLS.values()


def config(**more: Any) -> dict[str, Any]:
    model = {
        "backend": "vllm_serve",
        "chat_template": TOOLS_TEMPLATE,
        "vllm_max_model_len": WINDOW,
        "parallel": 8,
        "decoding": {"temperature": 0},
    }
    return {"models": {"demo": model | fields() | more}}


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with serving_well(config()) as running:
        wait_until(lambda: running.status("demo").state == "ready", "the model is loaded", 300)
        yield running


@pytest.fixture(scope="module")
def client(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


def test_it_answers_in_every_protocol_and_counts_as_we_do(
    served: LiveServer, client: httpx.Client, wire: Protocol, stream: bool
) -> None:
    seen = ask(client, wire, stream, "What is the capital of France?", limit=12)
    assert seen.text
    assert seen.usage.prompt == count(served.url, "What is the capital of France?")
    assert 1 <= seen.usage.output <= 12


def test_an_overflow_is_told_before_the_first_byte_in_each_dialect(served: LiveServer, client: httpx.Client) -> None:
    long = "word " * 1200
    tokens = count(served.url, long)
    told = client.post("/v1/messages", json=MESSAGES.body(long)).json()["error"]["message"]
    assert told == f"prompt is too long: {tokens} tokens > {WINDOW} maximum"
    error = client.post("/v1/chat/completions", json=CHAT.body(long, stream=True)).json()["error"]
    assert (error["code"], error["n_prompt_tokens"]) == ("context_length_exceeded", tokens)
    failed = parse_events(client.post("/v1/responses", json=RESPONSES.body(long, stream=True)).text)[-1]
    assert failed.data["response"]["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_fills_the_window_says_so(client: httpx.Client) -> None:
    seen = ask(client, MESSAGES, True, "count " * 980, limit=32000, logit_bias=ENDLESS)
    assert seen.stop == "model_context_window_exceeded"
    assert seen.usage.prompt + seen.usage.output >= WINDOW - 1


def test_a_call_that_is_demanded_has_the_form_of_its_tool(client: httpx.Client, stream: bool) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"name": "get_weather", "parameters": city | {"additionalProperties": False}}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    offered = {"tools": [{"type": "function", "function": tool}], "tool_choice": choice}
    seen = ask(client, CHAT, stream, "Weather in Rome?", limit=60, **offered)
    ((name, arguments),) = seen.calls
    assert name == "get_weather"
    jsonschema.validate(arguments, city)


def test_a_call_among_its_words_is_read_as_one(client: httpx.Client, stream: bool) -> None:
    """The tiny model writes none of its own accord: its words are laid into its mouth."""
    words = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Rome"\}\}\n</tool_call>'
    seen = ask(client, CHAT, stream, "Weather in Rome?", tools=True, limit=60, regex=words)
    assert seen.calls == [("get_weather", {"city": "Rome"})]
    assert seen.stop == "tool_calls"


def test_an_answer_has_the_form_that_was_asked_for(client: httpx.Client, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    seen = ask(client, CHAT, stream, "Give a number.", limit=60, response_format=form)
    jsonschema.validate(json.loads(seen.text), schema)


def test_one_replica_of_two_is_killed_and_the_other_answers_on() -> None:
    with serving_well(config(replicas=2, parallel=1)) as served:
        wait_until(lambda: len(_ready(served)) == 2, "both replicas are loaded", 400)
        first, second = _ready(served)
        # Two texts: whoever asks the same at the same time, where nothing is random, shares one answer.
        bodies = [CHAT.body(text, limit=400, logit_bias=ENDLESS, stream=True) for text in ("Count.", "Tell a story.")]
        with stream_events(served, CHAT.path, bodies[0]) as one, stream_events(served, CHAT.path, bodies[1]) as two:
            for stream in (one, two):
                next(frame for frame in stream if is_content(frame))
            assert [each.stats().running for each in (first, second)] == [1, 1]
            os.kill(first.pid, signal.SIGKILL)
            ends = [str(list(stream)[-1].data) for stream in (one, two)]
        assert not second.lost.done(), second.log_tail(20)
        assert sum("was killed by SIGKILL" in end for end in ends) == 1, ends
        with httpx.Client(base_url=served.url, timeout=120) as client:
            assert ask(client, CHAT, False, "Hello!", limit=4).text


def _ready(served: LiveServer) -> list[Any]:
    """Engines that take work; one that is only being loaded has a process, too."""
    if served.status("demo").state != "ready":
        return []
    return [each for each in served.app.scheduler.engines("demo") if getattr(each, "_watching", None) is not None]
