"""JSON-Schema-Test-Suite (draft 2020-12) through HTTP: no completed answer violates its schema.

A model of random weights answers, so its answers are random values of the grammar. Under `strict` a schema is enforced,
or refused with the name of the keyword. Without it the reply names what was not enforced. The suite is in the source
package of `jsonschema`, which also judges the answers. `make test` asks once for each schema, `make test-compliance`
ten times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
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


def ask(url: str, schema: Any, *, strict: bool, seed: int = 1) -> httpx.Response:
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    json_schema = {"name": "answer", "schema": schema, "strict": strict}
    body = {
        "model": "random",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": json_schema},
        "max_tokens": 48,
        "temperature": 1.0,
        "seed": seed,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def outcome(url: str, name: str, group: Any, seed: int) -> str:
    """What came of a group: `enforced`, `cut` before its end, `refused`, or `unsatisfiable`."""
    schema = group["schema"]
    reply = ask(url, schema, strict=True, seed=seed)
    if reply.status_code == 200:
        assert "x-modelyard-not-enforced" not in reply.headers, name
        (choice,) = reply.json()["choices"]
        if choice["finish_reason"] != "stop":
            return "cut"
        answer = json.loads(choice["message"]["content"])
        assert Draft202012Validator(schema, registry=remotes()).is_valid(answer), (name, schema, answer)
        return "enforced"
    error = reply.json()["error"]
    assert reply.status_code == 400, (name, error)
    if error["code"] == "unsupported_schema":
        plain = ask(url, schema, strict=False, seed=seed)
        assert plain.status_code == 200, (name, plain.text)
        named = plain.headers["x-modelyard-not-enforced"].split(", ")
        assert all(each.removeprefix("answer").rpartition("/")[2] in error["message"] for each in named), (name, named)
        return "refused"
    assert not any(test["valid"] for test in group["tests"]), (name, error)
    return "unsatisfiable"


def outcomes(server: LiveServer, seeds: int) -> Counter[str]:
    asked = [(name, group, seed) for name, group in groups() for seed in range(seeds)]
    with ThreadPoolExecutor(8) as threads:
        return Counter(threads.map(lambda one: outcome(server.url, *one), asked))


def test_no_completed_answer_violates_its_schema(server: LiveServer) -> None:
    found = outcomes(server, 1)
    assert found["enforced"] > 100
    assert found["refused"] < 110


@pytest.mark.compliance
def test_no_completed_answer_of_ten_violates_its_schema(server: LiveServer) -> None:
    assert outcomes(server, 10)["enforced"] > 1000


def test_a_schema_that_nothing_satisfies_is_refused(server: LiveServer) -> None:
    for strict in (True, False):
        reply = ask(server.url, {"type": "integer", "minimum": 2, "maximum": 1}, strict=strict)
        assert reply.status_code == 400
        assert "nsatisfiable" in reply.json()["error"]["message"]


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
