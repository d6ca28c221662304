"""A reply that repeats itself: nudged where the engine has DRY, then ended with the length reason of the protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from google import genai
from ollama import Client
from openai import OpenAI

from modelyard.library import default_model
from tests.live_server import LiveServer, demo_config, live_server

LOOP = [{"steps": [{"text": "I will fix it. " * 400}]}]
APPLES = "apple" + " apple" * 11


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config(LOOP, token_delay=0.0002)
    config["models"]["chat"] = {"backend": "fake", "kind": "chat", "token_delay": 0.0002, "script": LOOP}
    config["models"]["free"] = config["models"]["demo"] | {"decoding": {"max_repeated_tokens": 0}}
    with live_server(config) as running:
        yield running


def openai_chat(url: str, model: str) -> tuple[Any, int]:
    with OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        raw = client.chat.completions.with_raw_response
        reply = raw.create(model=model, messages=[{"role": "user", "content": "Fix it"}])
    assert reply.headers["x-modelyard-stopped"] == "repetition"
    parsed = reply.parse()
    assert parsed.usage is not None
    assert parsed.choices[0].model_dump()["stop_reason"] == "repetition_detected"
    return parsed.choices[0].finish_reason, parsed.usage.completion_tokens


def openai_responses(url: str, model: str) -> tuple[Any, int]:
    with OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        reply = client.responses.create(model=model, input="Fix it")
    assert reply.usage is not None
    assert reply.incomplete_details is not None
    return reply.incomplete_details.reason, reply.usage.output_tokens


def anthropic_messages(url: str, model: str) -> tuple[Any, int]:
    message: Any = {"role": "user", "content": "Fix it"}
    with (
        Anthropic(base_url=url, api_key="-") as client,
        client.messages.stream(model=model, max_tokens=3000, messages=[message]) as read,
    ):
        reply = read.get_final_message()
    return reply.stop_reason, reply.usage.output_tokens


def gemini(url: str, model: str) -> tuple[Any, int]:
    with genai.Client(api_key="-", http_options={"base_url": url}) as client:
        reply = client.models.generate_content(model=model, contents="Fix it")
    assert reply.candidates is not None
    assert reply.candidates[0].finish_reason is not None
    assert reply.usage_metadata is not None
    return reply.candidates[0].finish_reason.value, reply.usage_metadata.candidates_token_count or 0


def ollama(url: str, model: str) -> tuple[Any, int]:
    with Client(url) as client:
        reply = client.chat(model, [{"role": "user", "content": "Fix it"}])
    return reply.done_reason, reply.eval_count or 0


SDKS: dict[str, tuple[Callable[[str, str], tuple[Any, int]], str]] = {
    "chat": (openai_chat, "length"),
    "responses": (openai_responses, "max_output_tokens"),
    "messages": (anthropic_messages, "max_tokens"),
    "gemini": (gemini, "MAX_TOKENS"),
    "ollama": (ollama, "length"),
}


@pytest.mark.parametrize("name", SDKS)
@pytest.mark.parametrize("model", ["demo", "chat"])
def test_each_sdk_gets_its_length_reason(server: LiveServer, name: str, model: str) -> None:
    ask, reason = SDKS[name]
    stopped, tokens = ask(server.url, model)
    assert stopped == reason
    assert 500 <= tokens < 1000  # of 2,000


def test_a_stream_says_why_in_a_comment_before_its_end(server: LiveServer) -> None:
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "Fix it"}]}
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body).text
    *_, comment, done, _ = text.split("\n\n")
    assert (comment, done) == (": x-modelyard-stopped: repetition", "data: [DONE]")


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"model": "free"}, {"response_format": {"type": "json_object"}}]
)
def test_what_may_repeat_itself_is_left_alone(server: LiveServer, more: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Fix it"}], "max_tokens": 1500, **more}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert "x-modelyard-stopped" not in reply.headers
    assert "stop_reason" not in reply.json()["choices"][0]


def test_it_is_counted(server: LiveServer) -> None:
    ollama(server.url, "demo")
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'modelyard_repetitions_total{action="ended",model="demo"}' in metrics
    assert 'modelyard_finish_reasons_total{reason="repetition"}' in metrics


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LiveServer]:
    default_model.fetch()
    decoding = {"max_repeated_tokens": 48, "temperature": 0}
    with live_server({"models": {"smollm2": {"n_threads": 1, "n_ctx": 1024, "decoding": decoding}}}) as running:
        yield running


def test_a_nudge_lets_a_real_model_find_its_way(smollm2: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "Count apples"}, {"role": "assistant", "content": APPLES}]
    with OpenAI(base_url=f"{smollm2.url}/v1", api_key="-") as client:
        reply = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=80)
    text, usage = reply.choices[0].message.content, reply.usage
    assert text is not None
    assert usage is not None
    assert text.startswith(" apple" * 40)
    assert not text.endswith(" apple" * 4)
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert usage.prompt_tokens < 60, "what was generated before the nudge is no prompt"
    assert 'repetitions_total{action="nudged",model="smollm2"} 1.0' in httpx.get(f"{smollm2.url}/metrics").text


def test_a_real_model_that_goes_on_is_ended(smollm2: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "Count apples"}, {"role": "assistant", "content": APPLES}]
    weak = {"dry_multiplier": 0.001, "dry_base": 1.0}  # its own DRY, which is too weak: there is no other nudge
    with (
        Anthropic(base_url=smollm2.url, api_key="-") as client,
        client.messages.stream(model="smollm2", max_tokens=400, messages=messages, extra_body=weak) as stream,
    ):
        reply = stream.get_final_message()
    assert reply.stop_reason == "max_tokens"
    assert 64 <= reply.usage.output_tokens < 192


def test_a_client_that_leaves_during_the_nudge_frees_the_slot(smollm2: LiveServer) -> None:
    body = {"model": "smollm2", "prompt": APPLES, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{smollm2.url}/v1/completions", json=body, timeout=120) as reply:
        chunks = 0
        for line in reply.iter_lines():
            chunks += line.startswith("data: {")
            if chunks > 66:
                break
    short = {"model": "smollm2", "prompt": "Hello", "max_tokens": 1}
    done = httpx.post(f"{smollm2.url}/v1/completions", json=short, timeout=120)
    assert json.loads(done.content)["usage"]["completion_tokens"] == 1
