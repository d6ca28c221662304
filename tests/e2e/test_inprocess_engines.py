"""Engines in this process behind the server: CTranslate2 with a real model, ExLlamaV3 with an imitated library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

import modelyard_exllamav3 as exllamav3
from modelyard.telemetry import system
from modelyard.telemetry.system import GpuMemory
from modelyard_exllamav3.engine import ExllamaEngine
from tests.engines.ct2.helpers import model_folder
from tests.engines.exllamav3.fake_library import FakeLibrary
from tests.engines.exllamav3.helpers import write_model
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


# --- ExLlamaV3 --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exllama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = {
        "backend": "exllamav3",
        "path": str(write_model(tmp_path_factory.mktemp("exl3") / "tiny")),
        "prompt_format": "generic",
        "placement": "inline",
        "n_ctx": 1024,
        "parallel": 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        create = lambda spec: ExllamaEngine(spec, FakeLibrary().load)  # noqa: E731
        patch.setattr(exllamav3, "ENGINE", replace(exllamav3.ENGINE, verify=lambda: None, create=create))
        gpu = GpuMemory(uuid="GPU-1", name="stand-in", total=8 << 30, used=0, free=8 << 30)
        for module in (exllamav3, system):
            patch.setattr(module, "read_gpus", lambda: (gpu,))
        with live_server({"models": {"tiny": model}}) as running:
            yield running


def complete(exllama_server: LiveServer, **fields: Any) -> httpx.Response:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    return httpx.post(exllama_server.url + "/v1/chat/completions", json=body | fields, timeout=60)


def test_exllamav3_reports_output_and_cached_tokens(exllama_server: LiveServer) -> None:
    first, second = (complete(exllama_server).json() for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    usage = second["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_exllamav3_supports_json_schema(exllama_server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    choice = complete(exllama_server, response_format=response_format, max_tokens=30).json()["choices"][0]
    assert json.loads(choice["message"]["content"])["ok"] in (True, False)
    assert choice["finish_reason"] == "stop"


def test_exllamav3_refuses_a_prompt_longer_than_the_window(exllama_server: LiveServer) -> None:
    reply = complete(exllama_server, messages=[{"role": "user", "content": "word " * 2000}])
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_exllamav3_streams_messages(exllama_server: LiveServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    with httpx.stream("POST", exllama_server.url + "/v1/messages", json=body, timeout=60) as reply:
        events = [line.removeprefix("event: ") for line in reply.iter_lines() if line.startswith("event: ")]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


def test_exllamav3_memory_is_estimated_for_the_gpu(exllama_server: LiveServer) -> None:
    (choice,) = httpx.get(exllama_server.url + "/v1/admin/gpu-memory", timeout=60).json()["models"]
    assert choice["estimate"]["device"] == "gpu"
    assert choice["estimate"]["kv"] > 0
