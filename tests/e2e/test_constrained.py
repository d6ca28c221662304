"""Constrained output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from modelyard.library import default_model
from tests.live_server import LiveServer, live_server
from tests.scanner.patches import GRAMMAR, is_patch

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS = {"get_weather": WEATHER, "now": NOW}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str = Field(min_length=3, max_length=12)
    friends: list[Literal["Tom", "Kim"]] = Field(min_length=1, max_length=2)


def test_parse_returns_an_instance(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe a pet."}],
        response_format=Pet,
        max_tokens=64,
        temperature=0,
    )
    assert isinstance(reply.choices[0].message.parsed, Pet)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [None, *SCHEMAS])
def test_a_required_call_fits_its_schema(sdk: openai.OpenAI, name: str | None, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    params: Any = {
        "model": "smollm2",
        "messages": QUESTION,
        "tools": CHAT_TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 96,
        "temperature": 0,
    }
    if stream:
        with sdk.chat.completions.stream(**params) as events:
            reply = events.get_final_completion().choices[0]
    else:
        reply = sdk.chat.completions.create(**params).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == (name or call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def complete(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 48, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"grammar": 'root ::= "sunny" | "rainy"'}, ("sunny", "rainy")),
        ({"regex": "(warm|cold) in Rome"}, ("warm in Rome", "cold in Rome")),
        ({"lark": 'start: "2" ("0" | "1")'}, ("20", "21")),
    ],
)
def test_grammars_are_extension_fields(
    server: LiveServer, fields: dict[str, str], allowed: tuple[str, ...]
) -> None:
    assert complete(server, **fields).json()["choices"][0]["message"]["content"] in allowed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{"grammar": "root ::= ("}, {"regex": "(a"}, {"lark": "start: other"}])
def test_a_bad_grammar_is_a_400_that_names_the_field(server: LiveServer, fields: dict[str, str], stream: bool) -> None:
    reply = complete(server, stream=stream, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "bad_grammar"
    assert reply.json()["error"]["param"] in fields


def test_an_unsatisfiable_schema_is_a_400(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    reply = complete(server, response_format={"type": "json_schema", "json_schema": {"name": "none", "schema": schema}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")


def test_unsupported_schema_keywords_do_not_fail_the_request(server: LiveServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    reply = complete(server, response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}})
    assert len(json.loads(reply.json()["choices"][0]["message"]["content"])) == 2


# --- custom tools with a grammar, as Codex offers them ----------------------------------------------------------------

# The same language with bounded parts, so that a small model reaches the end.
SHORT_GRAMMAR = GRAMMAR.replace("/(.+)/", "/.{1,3}/").replace("/(.*)/", "/.{0,3}/").replace("hunk+", "hunk")
SHORT_GRAMMAR = SHORT_GRAMMAR.replace("line+", "line~1..2").replace("(context | changed)+", "(context | changed)~1..2")


def call_apply_patch(server: LiveServer, grammar: str, choice: Any, **fields: Any) -> dict[str, Any]:
    shape = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tools = [{"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": shape}]
    body = {"model": "smollm2", "input": "Write hello to a.py.", "tools": tools, "tool_choice": choice}
    reply = httpx.post(server.url + "/v1/responses", json=body | {"max_output_tokens": 160} | fields, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "apply_patch"}, "required"])
def test_the_input_of_a_custom_tool_fits_its_grammar(server: LiveServer, choice: Any) -> None:
    reply = call_apply_patch(server, SHORT_GRAMMAR, choice, parallel_tool_calls=False, temperature=0)
    (call,) = reply["output"]
    assert (reply["status"], call["type"], call["name"]) == ("completed", "custom_tool_call", "apply_patch")
    assert is_patch(call["input"]), call


@pytest.mark.parametrize("seed", range(3))
def test_sampled_input_of_a_custom_tool_fits_its_grammar(server: LiveServer, seed: int) -> None:
    reply = call_apply_patch(server, SHORT_GRAMMAR, "required", temperature=1.5, seed=seed)
    assert all(is_patch(item["input"]) for item in reply["output"] if item["type"] == "custom_tool_call")


def test_an_incomplete_patch_is_not_called(server: LiveServer) -> None:
    """The grammar allows any number of lines, so the limit cuts the patch off."""
    reply = call_apply_patch(server, GRAMMAR, "required", max_output_tokens=12, temperature=0)
    assert reply["status"] == "incomplete"
    assert "custom_tool_call" not in [item["type"] for item in reply["output"]]


def test_an_optional_custom_tool_call_works(server: LiveServer) -> None:
    reply = call_apply_patch(server, GRAMMAR, "auto", max_output_tokens=24, temperature=0)
    assert reply["output"]
    assert all(is_patch(item["input"]) for item in reply["output"] if item["type"] == "custom_tool_call")


def test_an_unsupported_grammar_does_not_fail_the_request(server: LiveServer) -> None:
    reply = call_apply_patch(server, 'start: "(" start? ")"', "auto", max_output_tokens=8, temperature=0)
    assert reply["output"]
