"""Infer Server (seed 2): a gateway that has a port, a scheduler and a tokenizer, and no engine of its own.

The scheduler runs SmolLM2 on llama.cpp under the seed's name, llama3-8b.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modelyard.cli.run import free_port
from modelyard.library import default_model
from tests.cli_process import DEADLINE, MODELYARD, run, serve
from tests.cli_process import ServerProcess as Gateway
from tests.e2e.protocols import parse_events
from tests.engines.fake_upstream import Answer, chat_stream, fake_upstream
from tests.live_server import demo_config, live_server
from tests.seeds.processes import is_healthy, process, scheduler, until

SCHEDULER = """
[models.llama3-8b]
path = "{path}"
[caches.chats]
model = "llama3-8b"
n_ctx = 2048
parallel = 2
"""
# config.rs: HttpConfig, SchedulerConfig, ModelConfig and LogConfig, every field of them.
GATEWAY = """
[http]
port = 8000
cors_enabled = true

[scheduler]
endpoint = "{endpoint}"
timeout_ms = 30000

[model]
model_name = "llama3-8b"
tokenizer_path = "{tokenizer}"

[log]
level = "info"
"""
REQUEST: dict[str, Any] = {
    "model": "llama3-8b",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
    ],
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 1024,
    "stream": True,
}
CHUNK = {
    "id": "123",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "llama3-8b",
    "choices": [{"index": 0, "delta": {"content": "Hello!"}, "finish_reason": None}],
}


CORS = "access-control-allow-origin"


@pytest.fixture(scope="module")
def tokenizer() -> Path:
    return default_model.fetch()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scheduler")
    folder.chmod(0o700)
    address = f"ipc://{folder}/scheduler"
    with scheduler(folder, address, SCHEDULER.format(path=tokenizer)):
        until((folder / "scheduler").exists)
        yield address


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, endpoint: str, tokenizer: Path) -> Iterator[Gateway]:
    config = GATEWAY.format(endpoint=endpoint, tokenizer=tokenizer)
    with serve(tmp_path_factory.mktemp("gateway"), config=config) as started:
        until(lambda: is_healthy(started.url))
        yield started


def post(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE)


# --- 核心模块 1: the configuration ------------------------------------------------------------------------------------


def test_the_configuration_as_a_file_starts_a_gateway_that_takes_the_model_from_its_scheduler(
    gateway: Gateway,
) -> None:
    reply = post(gateway.url, REQUEST | {"stream": False, "max_tokens": 8}).json()
    assert reply["model"] == "llama3-8b"
    assert reply["usage"]["completion_tokens"] > 0
    (listed,) = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    assert (listed["id"], listed["context_length"]) == ("llama3-8b", 2048), "the window is the scheduler's"


def test_the_configuration_as_variables_starts_the_same_gateway(tmp_path: Path, endpoint: str, tokenizer: Path) -> None:
    port = free_port()
    variables = {
        "MODELYARD_HTTP_PORT": str(port),
        "MODELYARD_HTTP_CORS_ENABLED": "true",
        "MODELYARD_SCHEDULER_ENDPOINT": endpoint,
        "MODELYARD_SCHEDULER_TIMEOUT_MS": "30000",
        "MODELYARD_MODEL_MODEL_NAME": "llama3-8b",
        "MODELYARD_MODEL_TOKENIZER_PATH": str(tokenizer),
        "MODELYARD_LOG_LEVEL": "info",
    }
    with process([*MODELYARD, "serve"], tmp_path, **variables):
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_healthy(url))
        assert post(url, REQUEST | {"stream": False, "max_tokens": 2}).status_code == 200
        assert httpx.get(f"{url}/models", headers={"origin": "https://chat.example"}).headers[CORS] == "*"


@pytest.mark.parametrize(
    ("before", "after", "setting"),
    [
        ("port = 8000", "port = 70000", "http.port"),
        ("cors_enabled = true", 'cors_enabled = "perhaps"', "http.cors_enabled"),
        ("timeout_ms = 30000", "timeout_ms = -1", "scheduler.timeout_ms"),
        ('level = "info"', 'level = "loud"', "log.level"),
    ],
    ids=lambda value: value.partition(" ")[0],
)
def test_a_setting_that_is_not_valid_is_named(tmp_path: Path, before: str, after: str, setting: str) -> None:
    text = GATEWAY.format(endpoint="tcp://scheduler-host:5555", tokenizer="/models/llama3-8b")
    (tmp_path / "modelyard.toml").write_text(text.replace(before, after))
    checked = run("check", cwd=tmp_path)
    assert checked.returncode == 1
    assert setting in checked.stdout + checked.stderr


def test_a_gateway_without_a_tokenizer_path_fetches_the_tokenizer_from_the_worker(
    tmp_path: Path, endpoint: str
) -> None:
    config = f'[scheduler]\nendpoint = "{endpoint}"\n[model]\nmodel_name = "llama3-8b"\n'
    with serve(tmp_path, config=config) as started:
        until(lambda: is_healthy(started.url))
        assert post(started.url, REQUEST | {"stream": False, "max_tokens": 2}).status_code == 200


def test_a_gateway_that_starts_before_its_scheduler_takes_the_model_when_it_is_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/scheduler"
    config = f'[scheduler]\nendpoint = "{address}"\n[model]\nmodel_name = "llama3-8b"\n'
    fake = '[models.llama3-8b]\nbackend = "fake"\nscript = [{ steps = [{ text = "Hello!" }] }]\n'
    with serve(tmp_path, config=config) as started:
        refused = post(started.url, REQUEST)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
        assert "waits for a scheduler" in refused.text
        with scheduler(tmp_path / "other", address, fake):
            until(lambda: is_healthy(started.url))
            until(lambda: post(started.url, REQUEST | {"stream": False}).status_code == 200)


def test_a_model_without_engine_and_scheduler_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "modelyard.toml").write_text('[model]\nmodel_name = "llama3-8b"\n')
    checked = run("check", cwd=tmp_path)
    assert checked.returncode == 1
    assert "neither backend nor path is set" in checked.stdout + checked.stderr


def test_a_scheduler_address_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "modelyard.toml").write_text(GATEWAY.format(endpoint="scheduler-host:5555", tokenizer="t"))
    checked = run("check", cwd=tmp_path)
    assert checked.returncode == 1
    assert "scheduler.endpoint" in checked.stdout + checked.stderr


def test_uvicorn_runs_the_gateway_of_a_scheduler_and_loads_no_engine(
    tmp_path: Path, endpoint: str, tokenizer: Path
) -> None:
    (tmp_path / "modelyard.toml").write_text(GATEWAY.format(endpoint=endpoint, tokenizer=tokenizer))
    command = [sys.executable, "-m", "uvicorn", "modelyard.app:create_app", "--factory", "--uds", f"{tmp_path}/socket"]
    with (
        process(command, tmp_path, HOME=str(tmp_path)) as started,
        httpx.Client(transport=httpx.HTTPTransport(uds=f"{tmp_path}/socket"), base_url="http://localhost") as client,
    ):
        until((tmp_path / "socket").exists)
        until(lambda: client.get("/health").json()["status"] == "healthy")
        assert client.get("/health").json()["scheduler_connected"]
        answer = client.post(
            "/v1/chat/completions", json=REQUEST | {"stream": False, "max_tokens": 2}, timeout=DEADLINE
        )
        assert answer.status_code == 200
        mapped = Path(f"/proc/{started.pid}/maps")
        if mapped.exists():
            weights = [line for line in mapped.read_text().splitlines() if re.search(r"(^|\s)\d+.*\.gguf$", line)]
            assert sum(_size(line) for line in weights) < tokenizer.stat().st_size // 2, "the weights are elsewhere"


def _size(mapping: str) -> int:
    start, _, end = mapping.split()[0].partition("-")
    return int(end, 16) - int(start, 16)


# --- API 规范: POST /v1/chat/completions ------------------------------------------------------------------------------


def test_the_request_of_the_document_streams_chunks_of_its_shape(gateway: Gateway) -> None:
    events = parse_events(post(gateway.url, REQUEST | {"max_tokens": 8}).text)
    assert events[-1].data == "[DONE]"
    chunks = [event.data for event in events[:-1]]
    assert all(chunk.keys() >= CHUNK.keys() for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"][0]["delta"] == {}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", 2),
        ("top_p", 1),
        ("max_tokens", 4),
        ("stream", False),
        ("stop", ["\n"]),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
    ],
)
def test_every_parameter_of_the_table_is_accepted(gateway: Gateway, parameter: str, value: Any) -> None:
    assert post(gateway.url, REQUEST | {"max_tokens": 4, "stream": False, parameter: value}).status_code == 200


@pytest.mark.parametrize("parameter", ["model", "messages"])
def test_a_required_parameter_that_is_missing_is_named(gateway: Gateway, parameter: str) -> None:
    body = {key: value for key, value in REQUEST.items() if key != parameter}
    refused = post(gateway.url, body, **{"x-modelyard-dialect": "infer_server"})
    assert refused.status_code == 400
    assert parameter in refused.json()["error"]["message"]


def test_finish_reason_stop_and_length(gateway: Gateway) -> None:
    long, short = REQUEST | {"stream": False, "max_tokens": 2}, REQUEST | {"stream": False, "max_tokens": 200}
    assert post(gateway.url, long).json()["choices"][0]["finish_reason"] == "length"
    assert post(gateway.url, short | {"stop": [" "]}).json()["choices"][0]["finish_reason"] == "stop"


async def test_finish_reason_content_filter() -> None:
    """Only an upstream filters; its reason reaches the client."""
    body = [chunk.replace(b'"stop"', b'"content_filter"') for chunk in chat_stream("Not that.")]
    async with fake_upstream(Answer(body=body)) as upstream:
        remote = {"backend": "openai_remote", "remote_base_url": f"{upstream.url}/v1", "remote_model": "llama3-8b"}
        with live_server({"models": {"llama3-8b": remote}}) as server:
            consent = {"x-modelyard-allow-remote": "true"}
            reply = await asyncio.to_thread(post, server.url, REQUEST | {"stream": False}, **consent)
    assert reply.json()["choices"][0]["finish_reason"] == "content_filter"


SAYS_AND_FAILS = [
    {"steps": [{"text": "So far"}, {"delay": 0.1}, {"fail": "the engine is lost", "kind": "unavailable"}]}
]
WITHOUT_STREAM = {key: value for key, value in REQUEST.items() if key != "stream"}


def compatible(script: list[dict[str, Any]]) -> dict[str, Any]:
    return demo_config(script) | {"http": {"chat_dialect": "infer_server"}}


def test_finish_reason_error_where_the_compatibility_mode_is_on() -> None:
    with live_server(compatible(SAYS_AND_FAILS)) as server:
        *_, finish, error = [event.data for event in parse_events(post(server.url, REQUEST).text)]
        assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "error"}]
        assert error["error"]["message"] == "the engine is lost"
        with pytest.raises(openai.APIError, match="the engine is lost"):
            for _ in sdk(server.url).chat.completions.create(**REQUEST):
                pass
        assert 'finish_reason":"error' not in post(server.url, REQUEST, **{"x-modelyard-dialect": "openai"}).text


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_stream_is_true_by_default_where_the_compatibility_mode_is_on_but_not_for_openai_clients() -> None:
    with live_server(compatible([{"steps": [{"text": "Hello!"}]}])) as server:
        assert post(server.url, WITHOUT_STREAM).headers["content-type"].startswith("text/event-stream")
        assert post(server.url, REQUEST | {"stream": False}).json()["choices"][0]["message"]["content"] == "Hello!"
        answer = sdk(server.url).chat.completions.create(**WITHOUT_STREAM)
        assert answer.choices[0].message.content == "Hello!"
        assert post(server.url, WITHOUT_STREAM, **{"x-modelyard-dialect": "openai"}).json()["object"]


def test_stream_is_false_by_default_otherwise_and_a_header_chooses_for_one_request() -> None:
    with live_server(demo_config(SAYS_AND_FAILS[:1])) as server:
        assert post(server.url, WITHOUT_STREAM).status_code == 503
        chosen = post(server.url, WITHOUT_STREAM, **{"x-modelyard-dialect": "infer-server"})
        assert '"finish_reason":"error"' in chosen.text
        refused = post(server.url, REQUEST, **{"x-modelyard-dialect": "klingon"})
        assert refused.status_code == 400
        assert "auto, openai, infer_server" in refused.json()["error"]["message"]


# --- 核心模块 4, 5; 通信协议: what streams, what is cancelled --------------------------------------------------------


def test_a_character_of_several_tokens_is_never_cut(gateway: Gateway) -> None:
    said = [
        {"role": "user", "content": "Repeat: 你好 你好 你好 你好"},
        {"role": "assistant", "content": "你好 你好 你"},
    ]
    body = REQUEST | {"messages": said, "temperature": 0, "max_tokens": 24}
    events = [event.data for event in parse_events(post(gateway.url, body).text)[:-1]]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert any(ord(character) > 127 for character in "".join(pieces))
    assert not any("\ufffd" in piece for piece in pieces)
    whole = post(gateway.url, body | {"stream": False}).json()["choices"][0]["message"]["content"]
    assert "".join(pieces) == whole


def test_a_request_whose_client_leaves_is_aborted_at_the_scheduler(gateway: Gateway) -> None:
    def active() -> int:
        return int(httpx.get(f"{gateway.url}/health").json()["active_requests"])

    body = REQUEST | {"max_tokens": 1900, "ignore_eos": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=DEADLINE) as reply:
        next(reply.iter_lines())
        assert active() == 1
    until(lambda: active() == 0)
    assert post(gateway.url, REQUEST | {"max_tokens": 2}).status_code == 200


def test_a_request_that_the_model_cannot_take_is_a_400_and_a_lost_scheduler_a_503(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/scheduler"
    fake = '[models.llama3-8b]\nbackend = "fake"\nn_ctx = 256\nscript = [{ steps = [{ text = "Hello!" }] }]\n'
    with serve(tmp_path, config=f'[scheduler]\nendpoint = "{address}"\n[model]\nmodel_name = "llama3-8b"\n') as started:
        with scheduler(tmp_path / "other", address, fake):
            until(lambda: is_healthy(started.url))
            long = [{"role": "user", "content": "word " * 400}]
            assert post(started.url, REQUEST | {"messages": long}).status_code == 400
            assert post(started.url, REQUEST | {"temperature": "hot"}).status_code == 400
        until(lambda: not httpx.get(f"{started.url}/health").json()["scheduler_connected"])
        until(lambda: post(started.url, REQUEST).status_code == 503)  # its workers end with it


# --- 扩展指南: what the document would add ----------------------------------------------------------------------------


def test_repetition_penalty_embeddings_and_a_lora_adapter_are_known(gateway: Gateway) -> None:
    short = REQUEST | {"max_tokens": 2, "stream": False}
    assert post(gateway.url, short | {"repetition_penalty": 1.1}).status_code == 200
    refused = post(gateway.url, short | {"lora_adapter": "mine"})
    assert refused.status_code == 400
    assert "mine" in refused.json()["error"]["message"]
    body = {"model": "llama3-8b", "input": "Hello"}
    assert httpx.post(f"{gateway.url}/v1/embeddings", json=body).json()["error"]["code"] == "embeddings_unsupported"


# --- API 规范: GET /models, GET /health, GET /metrics -----------------------------------------------------------------


def test_get_models_has_the_fields_of_the_document(gateway: Gateway) -> None:
    listed = httpx.get(f"{gateway.url}/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model.keys() >= {"id", "object", "created", "owned_by"}
    assert (model["id"], model["object"]) == ("llama3-8b", "model")


def test_get_health_has_the_fields_of_the_document(gateway: Gateway) -> None:
    health = httpx.get(f"{gateway.url}/health").json()
    assert health.keys() >= {"status", "version", "scheduler_connected", "tokenizer_loaded", "active_requests"}
    assert (health["status"], health["scheduler_connected"], health["tokenizer_loaded"]) == ("healthy", True, True)


@pytest.mark.parametrize(
    "line",
    [
        r'^http_requests_total{endpoint="/v1/chat/completions",method="POST",status="200"} \d',
        r'^http_request_duration_seconds_bucket{endpoint="/v1/chat/completions",le="0\.1"} \d',
        r'^http_request_duration_seconds_bucket{endpoint="/v1/chat/completions",le="0\.5"} \d',
        r'^http_request_duration_seconds_bucket{endpoint="/v1/chat/completions",le="\+Inf"} \d',
        r"^# TYPE active_requests_current gauge$",
        r"^# TYPE cpu_usage_percent gauge$",
        r"^# TYPE memory_usage_bytes gauge$",
        r"^# TYPE http_requests_total counter$",
        r"^# TYPE http_request_duration_seconds histogram$",
    ],
)
def test_get_metrics_has_the_lines_of_the_document(gateway: Gateway, line: str) -> None:
    post(gateway.url, REQUEST | {"max_tokens": 1, "stream": False})
    scraped = httpx.get(f"{gateway.url}/metrics", headers=gateway.owner).text
    assert re.search(line, scraped, re.MULTILINE), scraped[:3000]


def test_cors_is_enabled(gateway: Gateway) -> None:
    reply = httpx.get(f"{gateway.url}/v1/models", headers={"origin": "https://chat.example"})
    assert reply.headers[CORS] == "*"
