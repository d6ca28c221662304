"""ExLlamaV3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.engines import exllamav3
from modelyard.engines.exllamav3.engine import ExllamaEngine
from tests.engines.exllamav3.fake_library import FakeLibrary
from tests.engines.exllamav3.helpers import write_model
from tests.live_server import LiveServer, live_server


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
        patch.setattr(exllamav3, "verify", lambda: None)
        patch.setattr(exllamav3, "create", lambda spec: ExllamaEngine(spec, FakeLibrary().load))
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
