"""JSON-Schema-Test-Suite (draft 2020-12) through HTTP: no completed answer violates its schema.

A model of random weights answers, so its answers are random values of the grammar. Under `strict` a schema is enforced,
or refused with the name of the keyword. Without it the reply names what was not enforced. The suite is in the source
package of `jsonschema`, which also judges the answers. `make test` asks once for each schema, in one of the
five protocols by turns, and `make test-compliance` ten times in each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from msgspec import Struct
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.engines.llama_cpp import tiny_models
from tests.live_server import LiveServer, live_server
from tests.public_files import PublicFiles, fetch

pytestmark = pytest.mark.timeout(600)

SUITE = PublicFiles(
    "jsonschema==4.26.0",
    "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326",
    r"json/(?:tests/draft2020-12/[^/]*|remotes/.*)\.json",
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = {"backend": "llama_cpp", "path": str(tiny_models.coder()), "n_threads": 1}
    config = {"models": {"random": settings}, "caches": {"main": {"model": "random", "n_ctx": 1024, "parallel": 8}}}
    with live_server(config) as started:
        yield started


@cache
def groups() -> list[tuple[str, Any]]:
    files = sorted((fetch(SUITE) / "json/tests/draft2020-12").glob("*.json"))
    return [(f"{file.stem}: {group['description']}", group) for file in files for group in json.loads(file.read_text())]


@cache
def remotes() -> Registry[Any]:
    folder = fetch(SUITE) / "json/remotes"
    pairs = [(f"http://localhost:1234/{file.relative_to(folder)}", file) for file in folder.rglob("*.json")]
    parts = [
        (uri, Resource.from_contents(json.loads(f.read_text()), DRAFT202012))
        for uri, f in pairs
        if "draft" not in f.parent.name or "2020-12" in str(f)
    ]
    return Registry().with_resources(parts)


class Asked(Struct, frozen=True):
    """How a protocol asks for a schema. Only OpenAI's have `strict`. `answer`: the text, and whether it is complete."""

    path: str
    body: Callable[[Any, bool, int], dict[str, Any]]
    answer: Callable[[Any], tuple[str, bool]]
    has_strict: bool = False


def _chat_body(schema: Any, strict: bool, seed: int) -> dict[str, Any]:
    json_schema = {"name": "answer", "schema": schema, "strict": strict}
    return _SAMPLED | {
        "messages": _ASKS,
        "response_format": {"type": "json_schema", "json_schema": json_schema},
        "max_tokens": 48,
        "seed": seed,
    }


def _responses_body(schema: Any, strict: bool, seed: int) -> dict[str, Any]:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": strict}}
    return _SAMPLED | {"input": "x", "text": text, "max_output_tokens": 48, "seed": seed}


def _messages_body(schema: Any, _: bool, seed: int) -> dict[str, Any]:
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    return _SAMPLED | {"messages": _ASKS, "output_config": wanted, "max_tokens": 48, "seed": seed}


def _gemini_body(schema: Any, _: bool, seed: int) -> dict[str, Any]:
    wanted = {"responseMimeType": "application/json", "responseJsonSchema": schema}
    config = wanted | {"maxOutputTokens": 48, "temperature": 1.0, "seed": seed}
    return {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "generationConfig": config}


def _ollama_body(schema: Any, _: bool, seed: int) -> dict[str, Any]:
    options = {"num_predict": 48, "temperature": 1.0, "seed": seed}
    return {"model": "random", "messages": _ASKS, "format": schema, "stream": False, "options": options}


def _chat_answer(reply: Any) -> tuple[str, bool]:
    (choice,) = reply["choices"]
    return choice["message"]["content"], choice["finish_reason"] == "stop"


def _responses_answer(reply: Any) -> tuple[str, bool]:
    parts = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(parts), reply["status"] == "completed"


def _messages_answer(reply: Any) -> tuple[str, bool]:
    return "".join(part["text"] for part in reply["content"]), reply["stop_reason"] == "end_turn"


def _gemini_answer(reply: Any) -> tuple[str, bool]:
    (candidate,) = reply["candidates"]
    return "".join(part["text"] for part in candidate["content"]["parts"]), candidate["finishReason"] == "STOP"


def _ollama_answer(reply: Any) -> tuple[str, bool]:
    return reply["message"]["content"], reply["done_reason"] == "stop"


_SAMPLED = {"model": "random", "temperature": 1.0}
_ASKS = [{"role": "user", "content": "x"}]
CHAT = Asked("/v1/chat/completions", _chat_body, _chat_answer, has_strict=True)
PROTOCOLS = (
    CHAT,
    Asked("/v1/responses", _responses_body, _responses_answer, has_strict=True),
    Asked("/v1/messages", _messages_body, _messages_answer),
    Asked("/v1beta/models/random:generateContent", _gemini_body, _gemini_answer),
    Asked("/api/chat", _ollama_body, _ollama_answer),
)


def ask(url: str, schema: Any, *, strict: bool, seed: int = 1, protocol: Asked = CHAT) -> httpx.Response:
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return httpx.post(f"{url}{protocol.path}", json=protocol.body(schema, strict, seed), timeout=300)


def outcome(url: str, protocol: Asked, name: str, group: Any, seed: int) -> str:
    """What came of a group: `enforced`, `cut` before its end, `refused`, `named` in the header as not enforced, or
    `unsatisfiable`."""
    schema, about = group["schema"], (protocol.path, name)
    reply = ask(url, schema, strict=True, seed=seed, protocol=protocol)
    if reply.status_code == 200:
        if "x-modelyard-not-enforced" in reply.headers:
            assert not protocol.has_strict, about
            return "named"
        text, is_complete = protocol.answer(reply.json())
        if not is_complete:
            return "cut"
        answer = json.loads(text)
        assert Draft202012Validator(schema, registry=remotes()).is_valid(answer), (about, schema, answer)
        return "enforced"
    error = reply.json()["error"]
    assert reply.status_code == 400, (about, error)
    if protocol.has_strict and error["code"] == "unsupported_schema":
        plain = ask(url, schema, strict=False, seed=seed, protocol=protocol)
        assert plain.status_code == 200, (about, plain.text)
        named = plain.headers["x-modelyard-not-enforced"].split(", ")
        assert all(each.removeprefix("answer").rpartition("/")[2] in error["message"] for each in named), (about, named)
        return "refused"
    assert not any(test["valid"] for test in group["tests"]), (about, error)
    return "unsatisfiable"


def outcomes(server: LiveServer, seeds: int, protocols: Sequence[Asked] = ()) -> Counter[str]:
    """Of each group in all of these protocols; in one of the five by turns if none are given."""
    turns = [protocols or (PROTOCOLS[at % len(PROTOCOLS)],) for at in range(len(groups()))]
    asked = [
        (protocol, name, group, seed)
        for of_group, (name, group) in zip(turns, groups(), strict=True)
        for protocol in of_group
        for seed in range(seeds)
    ]
    with ThreadPoolExecutor(8) as threads:
        return Counter(threads.map(lambda one: outcome(server.url, *one), asked))


def test_no_completed_answer_violates_its_schema_in_any_protocol(server: LiveServer) -> None:
    found = outcomes(server, 1)
    assert found["enforced"] > 100
    assert found["refused"] + found["named"] < 110


@pytest.mark.harness
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.path)
def test_no_completed_answer_of_ten_violates_its_schema(server: LiveServer, protocol: Asked) -> None:
    assert outcomes(server, 10, [protocol])["enforced"] > 1000


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.path)
def test_a_schema_that_nothing_satisfies_is_refused(server: LiveServer, protocol: Asked) -> None:
    for strict in (True, False):
        reply = ask(server.url, {"type": "integer", "minimum": 2, "maximum": 1}, strict=strict, protocol=protocol)
        assert reply.status_code == 400
        assert "nsatisfiable" in reply.text


def test_strict_names_the_keyword_that_it_refuses_and_a_header_the_one_that_is_not_enforced(server: LiveServer) -> None:
    schema = {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 1}, "uniqueItems": True}
    refused = ask(server.url, schema, strict=True).json()["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_schema", "response_format")
    assert "uniqueItems" in refused["message"]
    reply = ask(server.url, schema, strict=False)
    assert (reply.status_code, reply.headers["x-modelyard-not-enforced"]) == (200, "answer/uniqueItems")


def test_a_set_has_no_value_twice(server: LiveServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2}
    for seed in range(8):
        answer = json.loads(ask(server.url, schema, strict=True, seed=seed).json()["choices"][0]["message"]["content"])
        assert len(set(answer)) == len(answer) >= 2
