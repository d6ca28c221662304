"""A model whose file has no chat template, as base models: it completes, fills gaps, counts and embeds in every
protocol; only conversations are refused, in the client's protocol and with what to do about it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.engines.llama_cpp import tiny_models
from tests.live_server import LiveServer, live_server

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
HELLO = [{"role": "user", "content": "Hello!"}]
GEMINI = {"contents": [{"parts": [{"text": "Hello!"}]}]}
GREEDY = {"model": "base", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    base = {"path": str(tiny_models.base_coder()), "n_threads": 1, "n_ctx": 1024, "speculation": "off"}
    models: dict[str, Any] = {
        "base": base | {"embeddings": True, "decoding": {"temperature": 0}},
        "talker": {"backend": "fake", "script": [{"steps": [{"text": "Hello there."}]}]},
    }
    routes = [{"match": "any", "model": "base", "fallback": "talker"}]
    objects = tmp_path_factory.mktemp("objects") / "objects.sqlite"
    config = {"models": models, "routes": routes, "store": {"objects": str(objects)}}
    with live_server(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json={"model": "base", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


# --- what works -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_completed_alike_in_every_protocol(client: httpx.Client) -> None:
    whole = post(client, "/v1/completions", prompt=PREFIX, max_tokens=6)["choices"][0]["text"]
    assert whole
    with client.stream("POST", "/v1/completions", json=GREEDY | {"prompt": PREFIX, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole
    assert post(client, "/completion", prompt=PREFIX, n_predict=6)["content"] == whole
    options = {"num_predict": 6}
    for raw in (True, False):
        generated = post(client, "/api/generate", prompt=PREFIX, raw=raw, stream=False, options=options)
        assert (generated["response"], generated["done_reason"]) == (whole, "length"), raw


def test_the_official_clients_complete(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-") as client:
        text = client.completions.create(model="base", prompt=PREFIX, max_tokens=6)
    with ollama.Client(server.url) as other:
        generated = other.generate("base", PREFIX, options={"num_predict": 6})
    assert text.choices[0].text == generated.response != ""


def test_ollamas_context_continues_the_text(client: httpx.Client) -> None:
    options = {"num_predict": 3}
    first = post(client, "/api/generate", prompt=PREFIX, stream=False, options=options)
    text = PREFIX + first["response"] + " more"
    again = post(client, "/api/generate", prompt=" more", context=first["context"], stream=False, options=options)
    bare = post(client, "/api/generate", prompt=text, raw=True, stream=False, options=options)
    assert again["response"] == bare["response"]


def test_a_gap_is_filled_alike_in_every_protocol(client: httpx.Client) -> None:
    filled = post(client, "/v1/completions", prompt=PREFIX, suffix=SUFFIX, max_tokens=6)
    text = filled["choices"][0]["text"]
    assert filled["usage"]["prompt_tokens"] > post(client, "/tokenize", content=PREFIX)["count"]
    body = {"prompt": PREFIX, "suffix": SUFFIX}
    assert post(client, "/v1/fim/completions", **body, max_tokens=6)["choices"][0]["message"]["content"] == text
    assert post(client, "/api/generate", **body, stream=False, options={"num_predict": 6})["response"] == text
    assert post(client, "/infill", input_prefix=PREFIX, input_suffix=SUFFIX, n_predict=6)["content"]


def test_markup_of_other_models_is_text(client: httpx.Client) -> None:
    """A model without a template has no call syntax: what it writes between such tags is what it writes."""
    text = "<tool_call>{}</tool_call><think>a</think><text>b</text>"
    body = {"prompt": "x", "max_tokens": 99, "grammar": f"root ::= {json.dumps(text)}"}
    assert post(client, "/v1/completions", **body)["choices"][0]["text"] == text


def test_texts_are_counted_and_embedded(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", content=PREFIX)["tokens"]
    assert post(client, "/detokenize", tokens=ids)["content"] == PREFIX
    vectors = post(client, "/v1/embeddings", input=[PREFIX, SUFFIX])["data"]
    assert [len(each["embedding"]) for each in vectors] == [tiny_models.WIDTH] * 2
    assert post(client, "/api/embed", input=[PREFIX])["embeddings"][0] == pytest.approx(vectors[0]["embedding"])


def batch(client: openai.OpenAI, endpoint: Any, body: dict[str, Any]) -> Any:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "base"} | body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    deadline = time.monotonic() + 60
    while (made := client.batches.retrieve(made.id)).status not in ("completed", "failed"):
        assert time.monotonic() < deadline, made
        time.sleep(0.03)
    found = made.output_file_id or made.error_file_id
    assert found is not None
    return json.loads(client.files.content(found).text)["response"]


def test_batches_of_completions_and_embeddings_run_and_those_of_chats_are_refused(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        completed = batch(client, "/v1/completions", {"prompt": PREFIX, "max_tokens": 6})
        direct = client.completions.create(model="base", prompt=PREFIX, max_tokens=6)
        embedded = batch(client, "/v1/embeddings", {"input": PREFIX})
        refused = batch(client, "/v1/chat/completions", {"messages": HELLO})
    assert completed["body"]["choices"][0]["text"] == direct.choices[0].text
    assert len(embedded["body"]["data"][0]["embedding"]) == tiny_models.WIDTH
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (400, "template_missing")


# --- what does not ----------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL]}),
    ("/v1/chat/completions/input_tokens", {"messages": HELLO}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/v1/responses", {"input": "Hello!"}),
    ("/v1/responses", {"input": "Hello!", "stream": True}),
    ("/v1/responses/input_tokens", {"input": "Hello!"}),
    ("/v1beta/models/base:generateContent", GEMINI),
    ("/v1beta/models/base:streamGenerateContent", GEMINI),
    ("/v1beta/models/base:countTokens", GEMINI),
    ("/api/chat", {"messages": HELLO}),
    ("/api/generate", {"prompt": "Hello!", "system": "Be brief."}),
    ("/tokenize", {"messages": HELLO}),
    ("/apply-template", {"messages": HELLO}),
]


def message(path: str, body: dict[str, Any]) -> str:
    """Of an error in the protocol of the path."""
    if path.startswith("/api/"):
        return str(body["error"])
    error = body["error"]
    if path.startswith("/v1beta/"):
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    elif path.startswith("/v1/messages"):
        assert (body["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert (error["type"], error["code"]) == ("invalid_request_error", "template_missing")
    return str(error["message"])


@pytest.mark.parametrize(("path", "body"), CHATS)
def test_a_conversation_is_refused_with_what_to_do(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    reply = client.post(path, json={"model": "base"} | body if ":" not in path else body)
    assert reply.status_code == 400, reply.text
    said = message(path, reply.json())
    assert said.startswith("the model 'base' has no chat template in ")
    assert "4. set chat_template to its text or path, or set prompt_format to one of chatml, gemma4_template" in said
    assert said.endswith("it takes bare prompts only (/v1/completions)")


def test_a_route_goes_on_to_a_model_that_chats(client: httpx.Client) -> None:
    reply = client.post("/v1/chat/completions", json={"model": "any", "messages": HELLO})
    assert reply.json()["choices"][0]["message"]["content"] == "Hello there."
    assert reply.headers["x-modelyard-fallback"] == "from=base; reason=template_missing; to=talker"
    completed = client.post("/v1/completions", json={"model": "any", "prompt": PREFIX, "max_tokens": 4})
    assert "x-modelyard-fallback" not in completed.headers


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_lists_say_that_it_does_not_chat(client: httpx.Client) -> None:
    cards = {card["id"]: card["capabilities"] for card in client.get("/v1/models").json()["data"]}
    assert cards["base"] == ["completion", "insert"]
    assert "chat" in cards["talker"]
    shown = client.post("/api/show", json={"model": "base"}).json()
    assert (shown["capabilities"], shown["template"]) == (["completion", "insert"], "")
    methods = client.get("/v1beta/models/base").json()["supportedGenerationMethods"]
    assert "generateContent" not in methods
    record = client.get("/v1/admin/models/base").json()
    assert (record["capabilities"]["chat"], record["capabilities"]["generates"]) == (False, True)
    assert client.get("/props?model=base").json()["chat_template"] == ""


def test_a_template_of_the_configuration_makes_it_chat(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    model = {"path": str(tiny_models.base_coder()), "n_threads": 1, "n_ctx": 512, "chat_template": str(template)}
    with live_server({"models": {"base": model}}) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        reply = client.post("/v1/messages", json={"model": "base", "messages": HELLO, "max_tokens": 4})
        assert reply.json()["usage"]["output_tokens"] == 4
        assert "chat" in client.get("/v1/models/base").json()["capabilities"]
