"""Invalid input on every endpoint: a clear error in the format of the protocol, never a 500; the server works on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.prompt.render import Renderer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.tokenizer.prefix_cache import TokenCache
from tests.e2e.protocols import FULL_BODIES, VALID_BODIES, check_error
from tests.live_server import LiveServer, demo_config, live_server

HI = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TALKS = (MESSAGES, "/v1/messages/count_tokens", CHAT, RESPONSES, "/v1/responses/input_tokens", "/apply-template")
GENERATES = (MESSAGES, CHAT, RESPONSES, "/v1/completions")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config()
    config["models"]["seer"] = config["models"]["demo"] | {"modalities": ["text", "image"]}
    config["routes"] = [{"match": "*haiku*", "cache": "fast"}]
    config["images"] = {"max_bytes": 1000, "allow": ["pictures.example"]}
    with live_server(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def expect_error(client: httpx.Client, path: str, body: Any, status: int = 400, **headers: str) -> dict[str, Any]:
    """The error for this body; the same connection works afterwards."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    error = check_error(client.post(path, content=content, headers=headers), path, status)
    assert client.post(path, json=VALID_BODIES[path]).status_code == 200, "the server no longer works"
    return error


def body_with(path: str, more: bytes) -> bytes:
    """A valid body with raw JSON text added."""
    return json.dumps(VALID_BODIES[path]).encode()[:-1] + b"," + more + b"}"


@pytest.mark.parametrize("path", VALID_BODIES)
def test_valid_bodies_are_accepted(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=VALID_BODIES[path]).status_code == 200


# --- invalid JSON -----------------------------------------------------------------------------------------------------

INVALID_JSON = {
    "words": (b"hello", "not valid JSON"),
    "nothing": (b"", "it is empty"),
    "blanks": (b" \n ", "it is empty"),
    "half": (b'{"model":', "not valid JSON"),
    "two": (b"{} {}", "not valid JSON"),
    "a form": (b"model=demo&messages=hi", "not valid JSON"),
    "bytes": (bytes(range(256)), "not valid JSON"),
    "latin-1": (b'{"model":"\xff"}', "not valid JSON"),
    "a mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "single quotes": (b"{'model':'demo'}", "not valid JSON"),
    "10,000 deep": (b"[" * 10_000 + b"]" * 10_000, "levels deep"),
    "10,000 open": (b'{"a":' * 10_000, "levels deep"),
    "a million lists": (b"[" + b"[]," * 1_000_000 + b"[]]", "arrays and objects"),
}


@pytest.mark.parametrize("path", VALID_BODIES)
def test_invalid_json_is_refused(client: httpx.Client, path: str) -> None:
    for name, (body, words) in INVALID_JSON.items():
        error = expect_error(client, path, body)
        assert (error["code"], words in error["message"]) == ("invalid_json", True), (name, error)


@pytest.mark.parametrize("path", VALID_BODIES)
def test_a_body_that_is_not_an_object_is_refused(client: httpx.Client, path: str) -> None:
    for body in (b"[]", b"null", b"1", b'"hi"', b"true", b"[{}]"):
        assert "Expected `object`" in expect_error(client, path, body)["message"], body


@pytest.mark.parametrize("path", VALID_BODIES)
def test_numbers_outside_the_json_grammar_are_refused(client: httpx.Client, path: str) -> None:
    for number in (b"NaN", b"Infinity", b"-Infinity", b"01", b"1.", b"+1", b"0x10"):
        error = expect_error(client, path, body_with(path, b'"temperature":' + number))
        assert error["code"] == "invalid_json", number


@pytest.mark.parametrize("path", VALID_BODIES)
def test_a_lone_surrogate_is_refused(client: httpx.Client, path: str) -> None:
    for surrogate in (b"\\ud800", b"\\udfff", b"\\ud800\\ud800", b"\\ud800x"):
        error = expect_error(client, path, body_with(path, b'"model":"' + surrogate + b'"'))
        assert (error["code"], "surrogate" in error["message"]) == ("invalid_json", True), (surrogate, error)


@pytest.mark.parametrize("path", VALID_BODIES)
def test_deeply_nested_fields_are_refused(client: httpx.Client, path: str) -> None:
    deep = b'"novel":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000
    assert "levels deep" in expect_error(client, path, body_with(path, deep))["message"]
    assert client.post(path, content=body_with(path, b'"novel":' + b"[" * 60 + b"]" * 60)).status_code == 200


@pytest.mark.parametrize("path", VALID_BODIES)
def test_a_compressed_body_is_refused(client: httpx.Client, path: str) -> None:
    assert "compressed" in expect_error(client, path, VALID_BODIES[path], **{"content-encoding": "gzip"})["message"]


@pytest.mark.parametrize("path", VALID_BODIES)
def test_the_last_of_two_equal_keys_counts(client: httpx.Client, path: str) -> None:
    duplicated = b'{"model":"unknown",' + json.dumps(VALID_BODIES[path]).encode()[1:]
    assert client.post(path, content=duplicated).status_code == 200


@pytest.mark.parametrize("path", VALID_BODIES)
def test_unknown_fields_are_ignored(client: httpx.Client, path: str) -> None:
    novel = body_with(path, b'"novel":{"a":[1e308,"\\u0000\\u001b",' + b"9" * 400 + b"]}")
    assert client.post(path, content=novel).status_code == 200


# --- models -----------------------------------------------------------------------------------------------------------


# Google's paths name the model, and Ollama's errors have neither code nor field: see test_other_wires.py.
NAMED = [path for path in VALID_BODIES if not path.startswith(("/api/", "/v1beta/"))]
CODED = [path for path in VALID_BODIES if not path.startswith("/api/")]
UNKNOWN_MODELS = ("unknown", "x" * 1024, "../../etc/passwd", "demo\x00", "\n\r\x1b[31m", "模型", "*")


@pytest.mark.parametrize("path", NAMED)
def test_an_unknown_model_is_a_404_that_lists_the_known_models(client: httpx.Client, path: str) -> None:
    for name in UNKNOWN_MODELS:
        error = expect_error(client, path, VALID_BODIES[path] | {"model": name}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model"), name[:50]
        assert "demo" in error["message"]
        assert len(error["message"]) < 2000


@pytest.mark.parametrize("path", NAMED)
def test_a_model_name_of_a_megabyte_is_refused(client: httpx.Client, path: str) -> None:
    error = expect_error(client, path, VALID_BODIES[path] | {"model": "x" * 1_000_000})
    assert (error["code"], error["param"]) == ("string_above_max_length", "model")


@pytest.mark.parametrize("path", NAMED)
def test_a_model_that_is_not_a_string_is_refused(client: httpx.Client, path: str) -> None:
    for name in (5, [], {}, True, 1.5):
        assert expect_error(client, path, VALID_BODIES[path] | {"model": name})["param"] == "model", name


LLAMA_SERVER = ("/v1/chat/completions/input_tokens",)  # its own endpoints need no model


@pytest.mark.parametrize(
    "path", [path for path in VALID_BODIES if path.startswith("/v1/") and path not in LLAMA_SERVER]
)
def test_the_model_is_required(client: httpx.Client, path: str) -> None:
    body = {name: value for name, value in VALID_BODIES[path].items() if name != "model"}
    for change in ({"model": ""}, {"model": None}, {}):
        assert expect_error(client, path, body | change)["param"] == "model", change


# --- invalid fields ---------------------------------------------------------------------------------------------------

FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"messages": bad}, "messages") for path in (MESSAGES, CHAT) for bad in ("hi", 5, {}, [])),
    *((path, {"messages": [bad]}, "messages[0]") for path in (MESSAGES, CHAT) for bad in ("hi", 5, None, [])),
    *((path, {"messages": [{"role": bad, "content": "x"}]}, "messages[0].role") for path in (MESSAGES, CHAT)
      for bad in ("alien", 5, None, "")),
    *((path, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content") for path in (MESSAGES, CHAT)),
    *((path, {"tools": bad}, "tools") for path in (MESSAGES, CHAT, RESPONSES) for bad in ("look", 5, {})),
    *((path, {"tools": [5]}, "tools[0]") for path in (MESSAGES, CHAT, RESPONSES)),
    *((path, {"stream": "yes"}, "stream") for path in GENERATES),
    *((path, {"temperature": bad}, "temperature") for path in GENERATES for bad in ("hot", -1, 101, [], True)),
    *((path, {"top_p": bad}, "top_p") for path in GENERATES for bad in (-0.1, 1.1, "x")),
    *((path, {"top_k": bad}, "top_k") for path in GENERATES for bad in (1.5, -2, 10**400)),
    *((path, {"min_p": 2}, "min_p") for path in GENERATES),
    *((path, {"seed": "x"}, "seed") for path in GENERATES),
    *((path, {"logit_bias": bad}, "logit_bias") for path in GENERATES for bad in ({"9" * 5000: 1}, [])),
    *((path, {"max_tokens": bad}, "max_tokens") for path in (MESSAGES, CHAT, "/v1/completions")
      for bad in (-1, 0, 1.5, "many", [])),
    *((CHAT, {"max_completion_tokens": bad}, "max_completion_tokens") for bad in (-1, 0, "many")),
    *((RESPONSES, {"max_output_tokens": bad}, "max_output_tokens") for bad in (-1, 0, "many")),
    *((path, {"n": bad}, "n") for path in (CHAT, "/v1/completions") for bad in (0, -1, 129, "two")),
    *((path, {"stop": bad}, "stop") for path in (CHAT, "/v1/completions") for bad in (5, {}, ["x"] * 200)),
    (MESSAGES, {"stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
    (MESSAGES, {"system": 5}, "system"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (MESSAGES, {"thinking": "yes"}, "thinking"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"top_logprobs": 1000, "logprobs": True}, "top_logprobs"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": [5]}, "input[0]"),
    (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
    (RESPONSES, {"previous_response_id": 5}, "previous_response_id"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ("/v1/completions", {"prompt": {}}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, "prompt"),
    ("/v1/completions", {"prompt": [2**70]}, "prompt"),
    ("/v1/completions", {"logprobs": 6}, "logprobs"),
    ("/v1/completions", {"prompt": ["x"] * 2049}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 2000, "n": 2}, "n"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/rerank", {"query": ""}, "query"),
    ("/v1/rerank", {"documents": []}, "documents"),
    ("/v1/rerank", {"documents": [{"image": "x"}]}, "documents[0]"),
    ("/v1/rerank", {"top_n": 0}, "top_n"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": {}}, "input"),
    ("/v1/embeddings", {"input": [10**9]}, "input"),
    ("/v1/embeddings", {"dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"dimensions": 10**9}, "dimensions"),
    ("/v1/embeddings", {"encoding_format": "hex"}, "encoding_format"),
]  # fmt: skip


@pytest.mark.parametrize("path", sorted({path for path, _, _ in FIELDS}))
def test_an_invalid_field_is_named(client: httpx.Client, path: str) -> None:
    for change, param in [(change, param) for field_path, change, param in FIELDS if field_path == path]:
        error = expect_error(client, path, VALID_BODIES[path] | change)
        assert error["param"] == param, (str(change)[:100], error)
        assert param.partition("[")[0].partition(".")[0] in error["message"]
        assert len(error["message"]) < 500


@pytest.mark.parametrize("path", GENERATES)
def test_numbers_out_of_range_are_named(client: httpx.Client, path: str) -> None:
    for number in (b"1e999", b"-1e999", b"9" * 5000):
        error = expect_error(client, path, body_with(path, b'"temperature":' + number))
        assert error["param"] == "temperature", number[:10]


@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_streamed_requests_are_refused_in_the_same_way(client: httpx.Client, path: str, stream: bool) -> None:
    expect_error(client, path, VALID_BODIES[path] | {"stream": stream, "temperature": -1})
    expect_error(client, path, VALID_BODIES[path] | {"stream": stream, "model": "unknown"}, 404)


# --- tools ------------------------------------------------------------------------------------------------------------


def tools(path: str, count: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"at": {"type": "string", "description": f"of {count} for {path}"}}}
    names = [f"tool_{number}" for number in range(count)]
    if path == MESSAGES:
        return [{"name": name, "input_schema": schema} for name in names]
    if path == CHAT:
        return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    return [{"type": "function", "name": name, "parameters": schema} for name in names]


TOOL_CHOICES = {
    MESSAGES: {"type": "tool", "name": "tool_7"},
    CHAT: {"type": "function", "function": {"name": "tool_7"}},
    RESPONSES: {"type": "function", "name": "tool_7"},
}


@pytest.mark.parametrize("path", TOOL_CHOICES)
@pytest.mark.parametrize("count", [0, 3])
def test_tool_choice_must_name_a_tool_of_the_request(client: httpx.Client, path: str, count: int) -> None:
    error = expect_error(
        client, path, VALID_BODIES[path] | {"tools": tools(path, count), "tool_choice": TOOL_CHOICES[path]}
    )
    assert error["param"] == "tool_choice"
    assert "tool_7" in error["message"]
    offered = client.post(path, json=VALID_BODIES[path] | {"tools": tools(path, 8), "tool_choice": TOOL_CHOICES[path]})
    assert offered.status_code == 200


@pytest.mark.parametrize("path", TOOL_CHOICES)
def test_ten_thousand_tools_do_not_block_the_event_loop(
    client: httpx.Client, path: str, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = record_threads_of_large_work(monkeypatch)
    expect_error(client, path, json.dumps(VALID_BODIES[path] | {"tools": tools(path, 10_000)}).encode())
    assert threads, "the tools were not rendered"
    assert loop_thread(server) not in threads


@pytest.mark.parametrize("path", [MESSAGES, "/v1/completions", "/tokenize", "/v1/embeddings"])
def test_a_text_of_400_kb_does_not_block_the_event_loop(
    client: httpx.Client, path: str, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = record_threads_of_large_work(monkeypatch)
    field = {MESSAGES: "messages", "/v1/completions": "prompt", "/tokenize": "content", "/v1/embeddings": "input"}[path]
    text = f"{path} and so on " * 25_000
    client.post(
        path, json=VALID_BODIES[path] | {field: [{"role": "user", "content": text}] if field == "messages" else text}
    )
    assert threads, "the text was not tokenized"
    assert loop_thread(server) not in threads


def record_threads_of_large_work(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that render or tokenize large inputs from now on."""
    threads: set[int] = set()

    def recording(method: Any, size: Any) -> Any:
        def recorded(self: Any, argument: Any, *more: Any) -> Any:
            if size(argument) > 20_000:
                threads.add(threading.get_ident())
            return method(self, argument, *more)

        return recorded

    many = recording(Renderer.text, lambda request: 100 * len(request.tools))
    monkeypatch.setattr(Renderer, "text", many)
    for owner, name in (
        (TokenCache, "encode"),
        (HuggingFaceTokenizer, "encode"),
        (HuggingFaceTokenizer, "encode_plain"),
    ):
        monkeypatch.setattr(owner, name, recording(getattr(owner, name), len))
    return threads


def loop_thread(server: LiveServer) -> int:
    async def ident() -> int:
        return threading.get_ident()

    return asyncio.run_coroutine_threadsafe(ident(), server.loop).result(60)


# --- images -----------------------------------------------------------------------------------------------------------


def image_body(path: str, url: str, model: str) -> dict[str, Any]:
    if path == CHAT:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    elif path == RESPONSES:
        part = {"type": "input_image", "image_url": url}
    elif url.startswith("data:") and ";base64," in url:
        media, _, data = url.removeprefix("data:").partition(";base64,")
        part = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    else:
        part = {"type": "image", "source": {"type": "url", "url": url}}
    field = "input" if path == RESPONSES else "messages"
    return VALID_BODIES[path] | {"model": model, field: [{"role": "user", "content": [part]}]}


IMAGES = {
    "data:image/png;base64,!!!": "invalid_image",
    "data:image/png;base64,AAA": "invalid_image",
    "data:image/png;base64,": "invalid_image",
    "data:text/html;base64,AAAA": "invalid_image",
    "data:image/png;base64," + "AAAA" * 1000: "image_too_large",
    "http://evil.example/cat.png": "image_not_allowed",
    "http://127.0.0.1/cat.png": "image_not_allowed",
    "http://[": "image_not_allowed",
    "file:///etc/passwd": "image_not_allowed",
    "ftp://pictures.example/cat.png": "image_not_allowed",
    "cat.png": "image_not_allowed",
}


@pytest.mark.parametrize("path", TOOL_CHOICES)
def test_an_invalid_image_is_refused(client: httpx.Client, path: str) -> None:
    for url, code in IMAGES.items():
        assert expect_error(client, path, image_body(path, url, "seer"))["code"] == code, url[:30]


@pytest.mark.parametrize("path", TOOL_CHOICES)
def test_an_image_for_a_text_only_model_is_refused(client: httpx.Client, path: str) -> None:
    error = expect_error(client, path, image_body(path, "data:image/png;base64,AAAA", "demo"))
    assert error["code"] == "modality_unsupported"
    assert client.post(path, json=image_body(path, "data:image/png;base64,AAAA", "seer")).status_code == 200


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", VALID_BODIES)
@pytest.mark.parametrize("headers", [{"content-length": "50000000"}, {}], ids=["announced", "chunked"])
def test_a_body_of_50_mb_is_refused_and_the_client_sees_why(
    client: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    reply = client.post(path, content=(b" " * 1_000_000 for _ in range(50)), headers=headers)
    error = check_error(reply, path, 413)
    assert "http.max_body_bytes" in error["message"]
    assert reply.headers["connection"] == "close"
    assert client.post(path, json=VALID_BODIES[path]).status_code == 200


# --- paths and keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CODED)
def test_a_wrong_method_is_refused(client: httpx.Client, path: str) -> None:
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        assert check_error(client.request(method, path), path, 405)["code"] == "method_not_allowed", method


@pytest.mark.parametrize("path", ["/v1/messages/x", "/v1/chat", "/v1", "/%00", "/%ff", "/v1/messages%2Fx", "/a" * 500])
def test_an_unknown_path_is_not_found(client: httpx.Client, path: str) -> None:
    shape = MESSAGES if path.startswith("/v1/messages") else CHAT
    assert check_error(client.post(path, json={}), shape, 404)["code"] == "path_not_found"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", CODED)
def test_missing_and_wrong_keys_are_refused_before_the_body_is_parsed(
    path: str, client_with_keys: httpx.Client
) -> None:
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}):
        error = check_error(client_with_keys.post(path, content=b"not json", headers=headers), path, 401)
        assert error["code"] == "invalid_api_key"
    assert client_with_keys.post(path, json=VALID_BODIES[path], headers={"x-api-key": "right"}).status_code == 200


@pytest.fixture(scope="module")
def client_with_keys() -> Iterator[httpx.Client]:
    config = demo_config() | {"keys": [{"name": "ann", "key": "right"}]}
    with live_server(config) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


# --- all fields at once -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vision_client() -> Iterator[httpx.Client]:
    config = demo_config()
    config["models"]["demo"]["modalities"] = ["text", "image"]
    with live_server(config) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", FULL_BODIES)
def test_bodies_with_all_fields_are_accepted(vision_client: httpx.Client, path: str) -> None:
    reply = vision_client.post(path, json=FULL_BODIES[path])
    assert reply.status_code == 200, reply.text
