"""llm-pool (seed 3): its smallest requests keep its shape, whatever else /v1/responses speaks."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modelyard.cli.run import free_port
from modelyard.config.load import load_config
from modelyard.core.engine import CacheInfo
from modelyard.library import default_model
from modelyard_exllamav3.options import ExllamaOptions, cache_tokens
from tests.cli_process import DEADLINE, ROOT
from tests.engines.fake_upstream import Answer, chat_stream, fake_upstream
from tests.live_server import LiveServer, demo_config, live_server
from tests.seeds.processes import process, until

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


# --- the tables: request fields, decoding, content items, replicas, load overrides ------------------------------------

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SERVER, SERVE = "gemma-4-26b-a4b-it-ud-q5ks-llama-server", "gemma4-nvfp4-vllm-serve"
FAKE = MODELS["demo"] | {"modalities": ["text"]}


@pytest.fixture(scope="module")
def rows() -> Iterator[LiveServer]:
    """Small models on the fake engine, beside the definitions of the document, which nothing loads."""
    settings = json.loads((ROOT / "tests/importing/sources/llm-pool/settings.json").read_text())
    models = settings["engine"]["models"] | {
        "plain": FAKE,
        "sees": FAKE | {"modalities": ["text", "image"]},
        "twice": FAKE | {"replicas": 2, "replica_max": 3},
        "off": FAKE | {"enabled": False},
    }
    with live_server({"engine": {"models": models}}, ready=False) as server:
        for name in ("plain", "sees", "twice"):
            until(lambda name=name: server.status(name).state == "ready")
        yield server


def admin(server: LiveServer, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    url = f"{server.url}/v1/admin/{path}"
    return httpx.request(method, url, json=body, headers=server.owner, timeout=DEADLINE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"messages": [{"role": "user", "content": "Hello"}]}, "messages"),
        ({"input": 5}, "input"),
        ({"stream": "perhaps"}, "stream"),
        ({"thinking": "sometimes"}, "thinking"),
        ({"allow_remote": "perhaps"}, "allow_remote"),
        ({"decoding": {"top_k": "many"}}, "top_k"),
    ],
    ids=json.dumps,
)
def test_a_request_that_the_table_does_not_allow_is_a_400_that_names_the_field(
    rows: LiveServer, change: dict[str, Any], named: str
) -> None:
    body = {"model": "plain", "input": "Hello", "decoding": {}} | change
    refused = post(rows, {key: value for key, value in body.items() if value is not None})
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"instructions": "Be brief."},
        {"instructions": None},
        {"source_lang_code": None},
        {"target_lang_code": None},
        {"allow_remote": False},
        {"stream": False},
        {"thinking": "default"},
        {"decoding": {"beam_size": 4}},
        {"decoding": {"top_k": 1}},
        {"decoding": {"top_p": 1.0}},
        {"decoding": {"temperature": 0.1}},
        {"decoding": {"repetition_penalty": 1.0}},
        {"decoding": {"max_tokens": 256}},
        {"decoding": {"stop": ["\n"]}},
    ],
    ids=json.dumps,
)
def test_every_field_of_the_tables_is_accepted(rows: LiveServer, field: dict[str, Any]) -> None:
    reply = post(rows, {"model": "plain", "input": "Hello", "decoding": {}} | field)
    assert is_pools(reply), reply.text


def test_the_accepted_thinking_values_are_those_that_the_model_advertises(rows: LiveServer) -> None:
    modes = admin(rows, "GET", "models/plain").json()["capabilities"]["thinking_modes"]
    for mode in ("default", "enabled", "disabled"):
        status = post(rows, {"model": "plain", "input": "Hello", "thinking": mode}).status_code
        assert status == (200 if mode in modes else 400)


def test_an_array_of_texts_is_one_prompt(rows: LiveServer) -> None:
    def prompt_tokens(given: Any) -> int:
        body = {"model": "plain", "input": given, "decoding": {}}
        return int(post(rows, body).json()["metrics"]["engine_prompt_tokens"])

    assert prompt_tokens([{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]) == prompt_tokens(
        "Hello there"
    )


@pytest.mark.parametrize("detail", [{}, {"detail": "auto"}], ids=["a url", "a url and its detail"])
def test_an_image_goes_to_a_model_that_declares_images_only(rows: LiveServer, detail: dict[str, str]) -> None:
    items = [
        {"type": "text", "text": "What does this menu say?"},
        {"type": "image_url", "image_url": {"url": PICTURE} | detail},
    ]
    for where in ({"input": items}, {"messages": [{"role": "user", "content": items}]}):
        assert is_pools(post(rows, {"model": "sees", **where}))
        refused = post(rows, {"model": "plain", **where})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "modality_unsupported")


def test_modalities_and_multi_turn_are_advertised_for_each_model(rows: LiveServer) -> None:
    listed = {model["id"]: model["capabilities"] for model in admin(rows, "GET", "models").json()["data"]}
    assert listed["plain"]["modalities"] == ["text"]
    assert listed["sees"]["modalities"] == ["text", "image"]
    for name in ("qwen2.5-vl-3b", SERVE):  # that of llama-server has no projector on this machine
        assert (listed[name]["modalities"], listed[name]["multi_turn"]) == (["text", "image"], True)


def test_replicas_are_one_model_with_one_row(rows: LiveServer) -> None:
    listed = httpx.get(f"{rows.url}/v1/models").json()["data"]
    assert sorted(model["id"] for model in listed) == ["plain", "sees", "twice"]
    (row,) = [model for model in admin(rows, "GET", "models").json()["data"] if model["id"].startswith("twice")]
    assert (row["replicas"]["wanted"], row["replicas"]["max"], len(row["replicas"]["items"])) == (2, 3, 2)
    assert admin(rows, "POST", "models/twice/replicas", {"replicas": 4}).status_code == 400
    assert {
        post(rows, {"model": "twice", "input": str(number), "decoding": {}}).status_code for number in range(4)
    } == {200}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (
            SERVER,
            [
                "llama_server_n_ctx",
                "llama_server_image_max_tokens",
                "llama_server_spec_type",
                "llama_server_spec_draft_n_max",
                "llama_server_spec_draft_p_min",
            ],
        ),
        (
            SERVE,
            [
                "vllm_max_model_len",
                "vllm_kv_cache_dtype",
                "vllm_kv_cache_memory_bytes",
                "vllm_max_pixels",
                "vllm_speculative_method",
                "vllm_speculative_model",
                "vllm_speculative_moe_backend",
                "vllm_speculative_attention_backend",
                "vllm_num_speculative_tokens",
            ],
        ),
    ],
    ids=["llama_server", "vllm_serve"],
)
def test_the_live_overrides_are_those_of_the_document(rows: LiveServer, model: str, fields: list[str]) -> None:
    found = admin(rows, "GET", f"models/{model}").json()["load_constraints"]["overrides"]
    assert list(found) == fields


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"llama_server_spec_draft_n_max": 7}, "llama_server_spec_draft_n_max"),
        ({"llama_server_spec_draft_n_max": 0}, "llama_server_spec_draft_n_max"),
        ({"llama_server_spec_draft_p_min": 1.5}, "llama_server_spec_draft_p_min"),
        ({"model_path": "/models/other.gguf"}, "model_path"),
        ({"llama_server_binary": "/bin/sh"}, "llama_server_binary"),
        ({"llama_server_mmproj_path": "/models/other.gguf"}, "llama_server_mmproj_path"),
        ({"llama_server_draft_model_path": "/models/other.gguf"}, "llama_server_draft_model_path"),
        ({"llama_server_host": "0.0.0.0"}, "llama_server_host"),
        ({"llama_server_port": 80}, "llama_server_port"),
        ({"llama_server_library_path": ["/lib"]}, "llama_server_library_path"),
        ({"llama_server_extra_args": ["--verbose"]}, "llama_server_extra_args"),
    ],
    ids=json.dumps,
)
def test_an_override_beyond_the_documents_constraints_is_refused(
    rows: LiveServer, override: dict[str, Any], named: str
) -> None:
    refused = admin(rows, "POST", f"models/{SERVER}/load", override)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]


def test_an_override_ends_with_the_next_unload_and_an_unknown_model_is_not_loaded(rows: LiveServer) -> None:
    def window() -> Any:
        return admin(rows, "GET", "models/off").json()["caches"]["off"]["window"]

    before = window()
    assert admin(rows, "POST", "models/off/load", {"n_ctx": 256}).status_code == 200
    assert window() == 256
    assert post(rows, SMALLEST | {"model": "off"}).status_code == 200
    assert admin(rows, "POST", "models/off/unload").status_code == 200
    assert window() == before
    assert post(rows, SMALLEST | {"model": "off"}).json()["error"]["code"] == "model_not_loaded"
    assert admin(rows, "POST", "models/nobody/load").status_code == 404


def test_gpu_memory_has_an_estimate_of_each_model(documented: LiveServer) -> None:
    found = admin(documented, "GET", "gpu-memory").json()
    assert {GEMMA, QWEN, "some-gguf-model"} <= {model["id"] for model in found["models"]}


# --- remote models ----------------------------------------------------------------------------------------------------


async def test_a_remote_model_is_sent_four_decoding_fields_the_key_and_the_upstreams_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = json.loads((ROOT / "tests/importing/sources/llm-pool/settings.json").read_text())
    async with fake_upstream(Answer(body=chat_stream("From afar."))) as upstream:
        remote = settings["engine"]["models"]["frontier-large"] | {"remote_base_url": f"{upstream.url}/v1"}
        config = {"engine": {"models": {"frontier-large": remote | {"enabled": True}}}}
        body = TRANSLATE | {"model": "frontier-large", "allow_remote": True, "thinking": "default"}
        monkeypatch.setenv("EXAMPLE_API_KEY", "secret")
        with live_server(config) as server:
            refused = await asyncio.to_thread(post, server, body | {"allow_remote": False})
            assert (refused.status_code, upstream.requests) == (403, [])
            reply = await asyncio.to_thread(post, server, body)
    assert reply.json()["output_text"] == "From afar."
    (sent,) = upstream.requests
    assert (sent.path, sent.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert sent.body["model"] == "provider-model"
    assert sent.body["thinking"] == {"type": "disabled"}
    assert sent.body["messages"][0] == {"role": "system", "content": TRANSLATE["instructions"]}
    assert (sent.body["temperature"], sent.body["top_p"]) == (0.1, 1.0)
    assert 8 in (sent.body.get("max_tokens"), sent.body.get("max_completion_tokens"))
    assert not sent.body.keys() & {"beam_size", "top_k", "repetition_penalty", "allow_remote", "decoding"}


# --- the service: settings.json, local.json, uvicorn ------------------------------------------------------------------


def test_uvicorn_serves_settings_json_with_local_json_over_it(tmp_path: Path) -> None:
    """As the document starts it, with both files named by variables."""
    definition = FAKE | {"enabled": False}
    definition.pop("gguf_n_ctx")
    base = {"service": {"log_level": "info"}, "engine": {"models": {"one": definition, "two": definition}}}
    (tmp_path / "settings.json").write_text(json.dumps(base))
    (tmp_path / "local.json").write_text('{"engine": {"models": {"two": {"enabled": true}}}}')
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "modelyard.app:create_app", "--factory", "--host", "127.0.0.1"]
    variables = {
        "LLM_POOL_SETTINGS_PATH": str(tmp_path / "settings.json"),
        "LLM_POOL_LOCAL_SETTINGS_PATH": str(tmp_path / "local.json"),
    }
    url = f"http://127.0.0.1:{port}"

    def listed() -> list[str]:
        try:
            return [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        except httpx.TransportError:
            return []

    with process([*command, "--port", str(port)], tmp_path, HOME=str(tmp_path), **variables):
        until(lambda: listed() == ["two"])
        assert is_pools(httpx.post(f"{url}/v1/responses", json={"model": "two", "input": "Hello"}))
    assert (tmp_path / "settings.json").read_text() == json.dumps(base), "the files are read, never written"
