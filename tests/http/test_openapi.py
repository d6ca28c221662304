"""The OpenAPI schema is valid and describes every route."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from modelyard.http.routes import ROWS
from tests.http.app_client import app_client
from tests.live_server import demo_config


async def schema() -> Any:
    async with app_client() as client:
        return (await client.get("/openapi.json")).json()


async def test_every_row_with_a_summary_is_described_and_nothing_else() -> None:
    described = {(path, method) for path, operations in (await schema())["paths"].items() for method in operations}
    assert described == {(row.label, row.method.lower()) for row in ROWS if row.summary}


async def test_every_reference_is_defined() -> None:
    whole = await schema()
    assert whole["openapi"].startswith("3.")
    known = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    assert set(_references(whole)) <= known


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(ref := value.get("$ref"), str):
            yield ref
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


async def test_body_schemas_accept_valid_and_refuse_invalid_bodies() -> None:
    whole = await schema()
    for path, body in {
        "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "novel": 1},
        "/v1/responses": {"model": "m", "input": "hi"},
        "/v1/completions": {"model": "m", "prompt": ["a", "b"]},
        "/v1/embeddings": {"model": "m", "input": [1, 2]},
        "/v1/rerank": {"model": "m", "query": "q", "documents": ["a", {"text": "b"}]},
        "/v1/fim/completions": {"model": "m", "prompt": "a", "suffix": "b"},
        "/infill": {"model": "m", "input_prefix": "a", "input_suffix": "b"},
        "/completion": {"prompt": "a", "n_predict": 4},
        "/embedding": {"content": "a"},
        "/v1/score": {"model": "m", "text_1": "a", "text_2": ["b"]},
        "/tokenize": {"content": "hi"},
        "/detokenize": {"tokens": [1]},
    }.items():
        inner = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        wanted = inner | {"components": whole["components"]}
        jsonschema.Draft202012Validator.check_schema(wanted)
        jsonschema.validate(body, wanted)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body | {"model": 5}, wanted)


async def test_the_documentation_page_gets_everything_from_this_server() -> None:
    async with app_client() as client:
        page = (await client.get("/docs")).text
        assert re.findall(r"https?://[^\"' ]+", page) == []
        files = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(files) == 3
        for file in files:
            reply = await client.get(file)
            assert reply.status_code == 200
            assert len(reply.content) > 500
        assert (await client.get("/docs/no-such-file")).status_code == 404


async def test_the_documentation_page_can_be_disabled() -> None:
    async with app_client() as client:
        assert "text/html" in (await client.get("/docs")).headers["content-type"]
    async with app_client(demo_config() | {"http": {"docs": False}}) as client:
        for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json"):
            assert (await client.get(path)).status_code == 404


async def test_the_page_has_a_field_for_the_key() -> None:
    async with app_client() as client:
        schema = (await client.get("/openapi.json")).json()
    assert schema["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert schema["security"] == [{}, {"key": []}]
