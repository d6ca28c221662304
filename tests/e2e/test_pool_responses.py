"""The pool dialect of POST /v1/responses: the requests of its guide, its stream, its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.library import default_model
from tests.e2e.protocols import ServerSentEvent, event_names, parse_events
from tests.live_server import LiveServer, demo_config, live_server

METRICS = {
    "backend_inference_wall_ms",
    "engine_total_wall_ms",
    "engine_outside_backend_wall_ms",
    "pool_total_wall_ms",
    "engine_queue_wait_ms",
    "engine_tokenize_ms",
    "gpu_time_to_first_token_ms",
    "gpu_generate_total_ms",
    "gpu_decode_after_first_token_ms",
    "engine_prompt_tokens",
    "engine_output_tokens",
    "engine_tokens_per_second",
}
# The smallest JPEG head that decodes as base64; the guide's own is cut short with dots.
PICTURE = "data:image/jpeg;base64,/9j/4AAQSkZJRg=="
TRANSLATOR = "translategemma-12b-it-q5-k-m-gguf"
TRANSLATE: dict[str, Any] = {
    "model": "google_gemma-4-26B-A4B-it-Q4_K_M-gguf",
    "input": "The weather is pleasant today, and I would like to take a walk in the park after lunch.",
    "instructions": "Translate to Dutch. Return only the translation.",
    "stream": False,
    "decoding": {
        "beam_size": 1,
        "top_k": 1,
        "top_p": 1.0,
        "temperature": 0.1,
        "repetition_penalty": 1.0,
        "max_tokens": 256,
    },
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "a text with instructions": TRANSLATE,
    "an image": {
        "model": "gemma-4-26b-a4b-it-ud-q5ks-llama-server",
        "instructions": "Describe the image briefly.",
        "input": [
            {"type": "text", "text": "What does this menu say?"},
            {"type": "image_url", "image_url": {"url": PICTURE}},
        ],
        "stream": False,
        "decoding": {"temperature": 0, "max_tokens": 512},
    },
    "several turns": {
        "model": "qwen2.5-vl-3b",
        "instructions": "You are concise.",
        "messages": [
            {"role": "user", "content": "My favorite color is teal."},
            {"role": "assistant", "content": "Got it."},
            {"role": "user", "content": "What is my favorite color?"},
        ],
        "stream": False,
        "decoding": {"temperature": 0, "max_tokens": 32},
    },
    "a known source": {
        "model": TRANSLATOR,
        "input": "Ach, hij is gewoon een ouwe brombeer, maar hij bedoelt het goed.",
        "source_lang_code": "nl",
        "target_lang_code": "en",
    },
    "a mixed source": {
        "model": TRANSLATOR,
        "input": "1. De vergadering is verplaatst.\n2. La réunion a été déplacée.\n"
        "3. Die Besprechung wurde verschoben.",
        "target_lang_code": "en",
    },
}


def pool_config() -> dict[str, Any]:
    """The model ids of the guide on the default model; requests with images go to a scripted model."""
    small = {"backend": "llama_cpp", "model_path": default_model.DEFAULT_MODEL.path, "gguf_n_ctx": 512, "n_threads": 1}
    small |= {"n_ubatch": 64, "enabled": True}
    menu = {"backend": "fake", "script": [{"steps": [{"text": "Soup of the day."}]}], "enabled": True}
    return {
        "engine": {
            "decoding": {"max_tokens": 16, "temperature": 0},
            "models": {
                TRANSLATE["model"]: small | {"aliases": ["qwen2.5-vl-3b"]},
                TRANSLATOR: small | {"prompt_format": "translategemma_template", "force_prompt_format": True},
                "gemma-4-26b-a4b-it-ud-q5ks-llama-server": menu | {"modalities": ["text", "image"]},
            },
        }
    }


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    default_model.fetch()
    with live_server(pool_config()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def create(client: httpx.Client, body: dict[str, Any]) -> Any:
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_shape(reply: Any, model: str) -> None:
    assert set(reply) == {"id", "object", "model", "output", "output_text", "metrics"}
    assert reply["id"].startswith("resp_")
    assert (reply["object"], reply["model"]) == ("response", model)
    assert reply["output"] == [{"type": "output_text", "text": reply["output_text"]}]
    assert set(reply["metrics"]) == METRICS


@pytest.mark.parametrize("example", EXAMPLES)
def test_requests_of_the_guide_get_replies_in_its_format(client: httpx.Client, example: str) -> None:
    body = EXAMPLES[example]
    reply = create(client, body)
    check_shape(reply, body["model"])
    assert reply["output_text"] or body["model"] == TRANSLATOR  # the default model does not know these prompts
    limit = body.get("decoding", {}).get("max_tokens", 16)
    assert 0 <= reply["metrics"]["engine_output_tokens"] <= limit


def test_the_timers_are_nested(client: httpx.Client) -> None:
    metrics = create(client, EXAMPLES["several turns"])["metrics"]
    assert None not in metrics.values()
    assert metrics["gpu_generate_total_ms"] <= metrics["backend_inference_wall_ms"]
    assert metrics["backend_inference_wall_ms"] <= metrics["engine_total_wall_ms"] <= metrics["pool_total_wall_ms"]
    assert metrics["engine_prompt_tokens"] > 20


def test_decoding_defaults_come_from_the_settings(client: httpx.Client) -> None:
    body = EXAMPLES["several turns"] | {"decoding": {"stop": ["\x00"]}}
    assert create(client, body)["metrics"]["engine_output_tokens"] <= 16


def test_a_stream_has_four_kinds_of_events_and_the_same_text(client: httpx.Client) -> None:
    body = EXAMPLES["several turns"]
    stream = parse_events(client.post("/v1/responses", json=body | {"stream": True}).text)
    assert list(dict.fromkeys(event_names(stream))) == [
        "response.created",
        "response.output_text.delta",
        "response.metrics",
        "response.completed",
    ]
    last = stream[-1].data["response"]
    check_shape(last, body["model"])
    assert last["output_text"] == delta_text(stream) == create(client, body)["output_text"]
    assert stream[0].data["response"]["id"] == last["id"]
    assert stream[-2].data["metrics"] == last["metrics"]


def delta_text(stream: list[ServerSentEvent]) -> str:
    return "".join(data["delta"] for name, data in stream if name == "response.output_text.delta")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (EXAMPLES["an image"] | {"model": TRANSLATE["model"]}, 400, "modality_unsupported"),
        (TRANSLATE | {"thinking": "enabled"}, 400, "thinking_unsupported"),
        (EXAMPLES["a known source"] | {"instructions": "Be kind."}, 400, "instructions_unsupported"),
        (EXAMPLES["a known source"] | {"target_lang_code": None}, 400, "target_lang_code_required"),
        (EXAMPLES["several turns"] | {"model": TRANSLATOR, "target_lang_code": "en"}, 400, "multi_turn_unsupported"),
        (TRANSLATE | {"model": "unknown"}, 404, "model_not_found"),
        (TRANSLATE | {"input": "word " * 600}, 400, "context_length_exceeded"),
        (TRANSLATE | {"messages": [{"role": "user", "content": "x"}]}, 400, "input_and_messages"),
    ],
)
def test_errors_have_the_format_of_chat_with_a_code(
    client: httpx.Client, body: dict[str, Any], status: int, code: str, stream: bool
) -> None:
    reply = client.post("/v1/responses", json=body | {"stream": stream})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert set(reply.json()["error"]) >= {"message", "type", "param", "code"}


def test_counted_tokens_equal_the_metrics(client: httpx.Client) -> None:
    body = EXAMPLES["several turns"]
    counted = client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]
    assert counted == create(client, body)["metrics"]["engine_prompt_tokens"]


def test_openai_bodies_get_the_openai_format_with_metrics(client: httpx.Client) -> None:
    reply = create(client, {"model": "qwen2.5-vl-3b", "input": "Say one word.", "max_output_tokens": 4})
    assert reply["status"] in ("completed", "incomplete")
    assert reply["output_text"] == "".join(part["text"] for item in reply["output"] for part in item["content"])
    assert set(reply["metrics"]) == METRICS


# --- remote models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def remote() -> Iterator[httpx.Client]:
    """A pool whose model runs on another server."""
    remote_server = live_server(demo_config([{"steps": [{"text": "From afar."}]}]))
    with remote_server as upstream, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXAMPLE_API_KEY", "secret")
        model = {
            "backend": "openai_remote",
            "model_path": None,
            "remote_api_kind": "chat_completions",
            "remote_base_url": f"{upstream.url}/v1",
            "remote_api_key_env": "EXAMPLE_API_KEY",
            "remote_model": "demo",
            "remote_health_check": "config_only",
            "enabled": True,
        }
        local_server = live_server({"engine": {"models": {"frontier-large": model}}})
        with local_server as local, httpx.Client(base_url=local.url, timeout=60) as client:
            yield client


@pytest.mark.parametrize("allow_remote", [None, False])
def test_a_remote_model_needs_consent(remote: httpx.Client, allow_remote: bool | None) -> None:
    body = {"model": "frontier-large", "input": "Hello", "decoding": {}, "allow_remote": allow_remote}
    reply = remote.post("/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "remote_not_allowed")


def test_a_remote_model_replies_in_the_same_format(remote: httpx.Client) -> None:
    body = {"model": "frontier-large", "input": "Hello", "decoding": {"max_tokens": 8}, "allow_remote": True}
    reply = create(remote, body)
    check_shape(reply, "frontier-large")
    assert reply["output_text"] == "From afar."


def test_allow_remote_alone_is_enough_and_is_ignored_in_openais_dialect(remote: httpx.Client) -> None:
    body = {"model": "frontier-large", "input": "Hello", "allow_remote": True}
    assert remote.post("/v1/responses", json=body).json()["output_text"] == "From afar."
    refused = remote.post("/v1/responses", json=body, headers={"x-modelyard-dialect": "openai"})
    assert refused.status_code == 403
