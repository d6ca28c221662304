"""Engines in this process behind the server: CTranslate2 with a real model, ExLlamaV3 with an imitated library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines.ct2.helpers import model_folder
from tests.live_server import LiveServer, live_server

CAPITAL = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def ct2_server() -> Iterator[LiveServer]:
    options = {"device": "cpu", "compute_type": "float32", "intra_threads": 1, "decoding": {"temperature": 0}}
    model = {"path": str(model_folder()), "n_ctx": 512, "parallel": 2, **options}
    with live_server({"models": {"smollm2-ct2": model}}) as ct2_server:
        yield ct2_server


def post(ct2_server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(ct2_server.url + path, json={"model": "smollm2-ct2", **body}, timeout=120)


def chat(ct2_server: LiveServer, *messages: dict[str, str], **fields: Any) -> httpx.Response:
    return post(ct2_server, "/v1/chat/completions", messages=list(messages), **{"max_tokens": 24} | fields)


def test_ct2_ends_a_reply_at_the_end_token(ct2_server: LiveServer):
    (choice,) = chat(ct2_server, CAPITAL).json()["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_ct2_renders_several_turns_with_the_template_of_the_folder(ct2_server: LiveServer):
    question = {"role": "user", "content": "Repeat the name of that city."}
    reply = chat(ct2_server, CAPITAL, {"role": "assistant", "content": "It is Paris."}, question).json()
    assert "Paris" in reply["choices"][0]["message"]["content"]


def test_ct2_streams_the_same_text(ct2_server: LiveServer):
    whole = chat(ct2_server, CAPITAL).json()["choices"][0]["message"]["content"]
    lines = chat(ct2_server, CAPITAL, stream=True).text.splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"]]
    assert "".join(pieces) == whole
    assert sum(map(bool, pieces)) > 1


def test_ct2_returns_logprobs_with_alternatives(ct2_server: LiveServer):
    first = chat(ct2_server, CAPITAL, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 3
    assert first["top_logprobs"][0]["token"] == first["token"]


def test_ct2_refuses_a_schema(ct2_server: LiveServer):
    reply = chat(ct2_server, CAPITAL, response_format={"type": "json_object"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "structured_unsupported")


def test_ct2_supports_beam_search(ct2_server: LiveServer):
    reply = post(ct2_server, "/v1/responses", input=CAPITAL["content"], decoding={"beam_size": 2, "max_new_tokens": 24})
    assert reply.status_code == 200
    assert "Paris" in reply.text


def test_ct2_refuses_a_prompt_longer_than_the_window(ct2_server: LiveServer):
    reply = chat(ct2_server, {"role": "user", "content": "word " * 600})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_ct2_refuses_required_calls_and_accepts_optional_ones(ct2_server: LiveServer):
    function = {"name": "now", "strict": True, "parameters": {"type": "object", "properties": {}}}
    required, optional = [
        chat(ct2_server, CAPITAL, tools=[{"type": "function", "function": function}], tool_choice=choice)
        for choice in ("required", "auto")
    ]
    assert (required.status_code, required.json()["error"]["code"]) == (400, "structured_unsupported")
    assert optional.status_code == 200
