"""llm-pool (seed 3): its smallest requests keep its shape, whatever else /v1/responses speaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modelyard.config.load import load_config
from modelyard.core.engine import CacheInfo
from modelyard.library import default_model
from modelyard_exllamav3.options import ExllamaOptions, cache_tokens
from tests.cli_process import DEADLINE, ROOT
from tests.live_server import LiveServer, demo_config, live_server

MODELS = {"demo": demo_config()["models"]["demo"] | {"enabled": True, "gguf_n_ctx": 512}}
SMALLEST: dict[str, Any] = {"model": "demo", "input": "Hello"}


@pytest.fixture(scope="module")
def pool() -> Iterator[LiveServer]:
    """A configuration as settings.json has it."""
    with live_server({"engine": {"models": MODELS}}) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    """A configuration in our own style."""
    with live_server(demo_config()) as server:
        yield server


def post(server: LiveServer, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=DEADLINE)


def is_pools(reply: httpx.Response) -> bool:
    body = reply.json()
    return bool(body["output"][0]["type"] == "output_text" and body.keys() >= {"id", "object", "model", "metrics"})


def is_openais(reply: httpx.Response) -> bool:
    body = reply.json()
    return bool(body["output"][0]["type"] == "message" and "usage" in body)


def test_model_and_input_alone_are_answered_in_the_pools_shape(pool: LiveServer) -> None:
    reply = post(pool, SMALLEST)
    assert is_pools(reply)
    assert reply.json()["output_text"] == "Hello there."
    assert reply.json()["metrics"].keys() >= {"pool_total_wall_ms", "engine_output_tokens"}


def test_a_stream_of_model_and_input_alone_has_the_pools_events(pool: LiveServer) -> None:
    text = post(pool, SMALLEST | {"stream": True}).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[0] == "response.created"
    assert names[-2:] == ["response.metrics", "response.completed"]
    assert set(names[1:-2]) == {"response.output_text.delta"}


def test_allow_remote_selects_the_pools_shape_in_every_configuration(plain: LiveServer, pool: LiveServer) -> None:
    for server in (plain, pool):
        assert is_pools(post(server, SMALLEST | {"allow_remote": True}))


@pytest.mark.parametrize(
    "field",
    [
        {"decoding": {}},
        {"thinking": "default"},
        {"allow_remote": False},
        {"input": [{"type": "text", "text": "Hello"}]},
        {"input": None, "messages": [{"role": "user", "content": "Hello"}]},
    ],
    ids=json.dumps,
)
def test_every_field_that_only_the_pool_has_selects_its_shape(plain: LiveServer, field: dict[str, Any]) -> None:
    body = {key: value for key, value in (SMALLEST | field).items() if value is not None}
    assert is_pools(post(plain, body))


def test_model_and_input_alone_are_openais_in_our_own_style(plain: LiveServer) -> None:
    assert is_openais(post(plain, SMALLEST))


def test_openais_clients_get_openais_shape_from_a_pool(pool: LiveServer) -> None:
    answer = openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none").responses.create(model="demo", input="Hello")
    assert answer.output[0].type == "message"
    for name, value in (
        ("user-agent", "codex_cli_rs/0.50.0 (Linux)"),
        ("openai-organization", "org-1"),
        ("x-stainless-lang", "js"),
    ):
        assert is_openais(post(pool, SMALLEST, **{name: value}))


@pytest.mark.parametrize(
    "field",
    [
        {"max_output_tokens": 16},
        {"store": False},
        {"tools": []},
        {"reasoning": {"effort": "low"}},
        {"input": [{"role": "user", "content": "Hello"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
    ],
    ids=json.dumps,
)
def test_a_field_that_only_openai_has_is_never_dropped_by_a_pool(pool: LiveServer, field: dict[str, Any]) -> None:
    assert is_openais(post(pool, SMALLEST | field))


def test_the_header_chooses_for_one_request(pool: LiveServer, plain: LiveServer) -> None:
    assert is_openais(post(pool, SMALLEST, **{"x-modelyard-dialect": "openai"}))
    assert is_openais(post(pool, SMALLEST, **{"x-modelyard-dialect": "auto"}))
    assert is_pools(post(plain, SMALLEST, **{"x-modelyard-dialect": "pool"}))
    refused = post(plain, SMALLEST, **{"x-modelyard-dialect": "klingon"})
    assert refused.status_code == 400
    assert "auto, openai, pool" in refused.json()["error"]["message"]


def test_the_setting_chooses_for_all() -> None:
    with live_server({"engine": {"models": MODELS}, "http": {"responses_dialect": "auto"}}) as server:
        assert is_openais(post(server, SMALLEST))
    with live_server(demo_config() | {"http": {"responses_dialect": "pool"}}) as server:
        assert is_pools(post(server, SMALLEST))
    with live_server(demo_config() | {"http": {"responses_dialect": "openai"}}) as server:
        assert is_openais(post(server, SMALLEST | {"allow_remote": True}))


def test_exllama_cache_size_is_the_window_unless_another_is_set(tmp_path: Path) -> None:
    """One page of the cache holds the next token, so that the window is one token less."""
    settings = json.loads((ROOT / "tests/importing/sources/llm-pool/settings.json").read_text())
    model = settings["engine"]["models"]["some-exl3-model"]

    def window(**more: Any) -> int | None:
        file = tmp_path / "settings.json"
        file.write_text(json.dumps({"engine": {"models": {"exl3": model | more}}}))
        return load_config(file, env={}).config.models["exl3"].n_ctx

    assert window() == 8191
    assert window(n_ctx=2048) == 2048
    assert window(exllama_cache_size=None) is None
    assert cache_tokens(ExllamaOptions(path="x", exllama_cache_size=8192), {"exl3": CacheInfo(8191, 1)}) == {
        "exl3": 8192
    }


# --- the document's requests, on llama.cpp ----------------------------------------------------------------------------

GEMMA, QWEN = "google_gemma-4-26B-A4B-it-Q4_K_M-gguf", "qwen2.5-vl-3b"
TRANSLATE = {
    "model": GEMMA,
    "input": "The weather is pleasant today, and I would like to take a walk in the park after lunch.",
    "instructions": "Translate to Dutch. Return only the translation.",
    "stream": False,
    "decoding": {
        "beam_size": 1,
        "top_k": 1,
        "top_p": 1.0,
        "temperature": 0.1,
        "repetition_penalty": 1.0,
        "max_tokens": 8,  # 256 in the document
    },
}
CONVERSATION = {
    "model": QWEN,
    "instructions": "You are concise.",
    "messages": [
        {"role": "user", "content": "My favorite color is teal."},
        {"role": "assistant", "content": "Got it."},
        {"role": "user", "content": "What is my favorite color?"},
    ],
    "stream": False,
    "decoding": {"temperature": 0, "max_tokens": 8},
}
METRICS = {
    "backend_inference_wall_ms",
    "engine_total_wall_ms",
    "engine_outside_backend_wall_ms",
    "pool_total_wall_ms",
    "engine_tokenize_ms",
    "engine_queue_wait_ms",
    "gpu_time_to_first_token_ms",
    "gpu_generate_total_ms",
    "gpu_decode_after_first_token_ms",
    "engine_prompt_tokens",
    "engine_output_tokens",
    "engine_tokens_per_second",
}


@pytest.fixture(scope="module")
def documented() -> Iterator[LiveServer]:
    """Two enabled models on one file, and one that an administrator loads; a service section and decoding defaults."""
    model = {"backend": "llama_cpp", "model_path": str(default_model.fetch()), "gguf_n_ctx": 512}
    models = {
        GEMMA: model | {"enabled": True},
        QWEN: model | {"enabled": True},
        "some-gguf-model": model | {"enabled": False},
    }
    with live_server({"engine": {"decoding": {"max_tokens": 4}, "models": models}}) as server:
        yield server


def test_the_request_of_the_document_gets_its_response(documented: LiveServer) -> None:
    reply = post(documented, TRANSLATE).json()
    assert (reply["object"], reply["model"]) == ("response", GEMMA)
    (output,) = reply["output"]
    assert output == {"type": "output_text", "text": reply["output_text"]}
    assert reply["metrics"].keys() >= METRICS
    assert reply["metrics"]["engine_output_tokens"] <= 8
    walls = [
        reply["metrics"][name] for name in ("backend_inference_wall_ms", "engine_total_wall_ms", "pool_total_wall_ms")
    ]
    assert walls == sorted(walls)


def test_the_conversation_of_the_document_is_answered(documented: LiveServer) -> None:
    reply = post(documented, CONVERSATION)
    assert reply.status_code == 200
    assert reply.json()["output_text"]


def test_omitted_decoding_fields_fall_back_to_the_engines(documented: LiveServer) -> None:
    reply = post(documented, {"model": GEMMA, "input": "Count to one hundred.", "decoding": {}}).json()
    assert reply["metrics"]["engine_output_tokens"] <= 4


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": "nobody"}, "model_not_found"),
        ({"model": "some-gguf-model"}, "model_not_loaded"),
        (
            {"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
            "modality_unsupported",
        ),
    ],
    ids=["an unknown model", "a model that is not loaded", "an image to a text model"],
)
def test_what_the_document_refuses_is_refused(documented: LiveServer, change: dict[str, Any], code: str) -> None:
    refused = post(documented, TRANSLATE | change)
    assert 400 <= refused.status_code < 504
    assert refused.json()["error"]["code"] == code


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    ],
    ids=["the last is not the user's", "a system message"],
)
def test_messages_follow_the_rules_of_the_document(documented: LiveServer, messages: list[dict[str, Any]]) -> None:
    assert post(documented, CONVERSATION | {"messages": messages}).status_code == 400


def test_the_endpoints_of_the_table(documented: LiveServer) -> None:
    def get(path: str) -> Any:
        return httpx.get(f"{documented.url}{path}", headers=documented.owner, timeout=DEADLINE).json()

    def order(verb: str) -> int:
        path = f"/v1/admin/models/some-gguf-model/{verb}"
        return httpx.post(f"{documented.url}{path}", headers=documented.owner, timeout=DEADLINE).status_code

    assert {model["id"] for model in get("/v1/models")["data"]} == {GEMMA, QWEN}
    assert {model["id"] for model in get("/v1/admin/models")["data"]} == {GEMMA, QWEN, "some-gguf-model"}
    assert "models" in get("/v1/admin/gpu-memory")
    assert order("load") < 300
    assert post(documented, SMALLEST | {"model": "some-gguf-model"}).status_code == 200
    assert order("unload") < 300
