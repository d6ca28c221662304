"""Constrained output over HTTP, on the default model: what the OpenAI SDK's helpers ask for."""

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
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str = Field(min_length=3, max_length=12)
    friends: list[Literal["Tom", "Kim"]] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def real() -> Iterator[LiveServer]:
    default_model.fetch()
    small = {"main": {"n_ctx": 1024, "parallel": 2}, "fast": {"n_ctx": 512, "parallel": 1}}
    with live_server({"models": {"smollm2": {"n_threads": 1}}, "caches": small}) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(real: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_parsed_answer_is_an_instance(sdk: openai.OpenAI) -> None:
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
def test_a_call_that_must_come_fits_its_schema(sdk: openai.OpenAI, name: str | None, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    asked: Any = {
        "model": "smollm2",
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 96,
        "temperature": 0,
    }
    if stream:
        with sdk.chat.completions.stream(**asked) as events:
            got = events.get_final_completion().choices[0]
    else:
        got = sdk.chat.completions.create(**asked).choices[0]
    assert got.finish_reason == "tool_calls"
    (call,) = got.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == (name or call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def ask(real: LiveServer, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "messages": ASKED, "max_tokens": 48, "temperature": 0, **fields}
    return httpx.post(real.url + "/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": 'root ::= "sunny" | "rainy"'}, ("sunny", "rainy")),
        ({"regex": "(warm|cold) in Rome"}, ("warm in Rome", "cold in Rome")),
        ({"lark": 'start: "2" ("0" | "1")'}, ("20", "21")),
    ],
)
def test_grammars_come_as_extension_fields(real: LiveServer, fields: dict[str, str], said: tuple[str, ...]) -> None:
    assert ask(real, **fields).json()["choices"][0]["message"]["content"] in said


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{"grammar": "root ::= ("}, {"regex": "(a"}, {"lark": "start: other"}])
def test_a_bad_grammar_is_a_400_that_names_the_field(real: LiveServer, fields: dict[str, str], stream: bool) -> None:
    refused = ask(real, stream=stream, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "bad_grammar"
    assert refused.json()["error"]["param"] in fields


def test_a_schema_that_nothing_fits_is_a_400(real: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    refused = ask(real, response_format={"type": "json_schema", "json_schema": {"name": "none", "schema": schema}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_keywords_that_no_grammar_enforces_do_not_fail_the_request(real: LiveServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    got = ask(real, response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}})
    assert len(json.loads(got.json()["choices"][0]["message"]["content"])) == 2


# --- custom tools with a grammar, as Codex offers them ----------------------------------------------------------------

# The same language with an end to each of its parts: even a small model comes to it.
SHORT = GRAMMAR.replace("/(.+)/", "/.{1,6}/").replace("/(.*)/", "/.{0,6}/").replace("hunk+", "hunk")
SHORT = SHORT.replace("line+", "line~1..2").replace("(context | changed)+", "(context | changed)~1..2")


def patch(real: LiveServer, grammar: str, choice: Any, **fields: Any) -> dict[str, Any]:
    shape = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tools = [{"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": shape}]
    body = {"model": "smollm2", "input": "Write hello to a.py.", "tools": tools, "tool_choice": choice}
    got = httpx.post(real.url + "/v1/responses", json=body | {"max_output_tokens": 160} | fields, timeout=120)
    assert got.status_code == 200, got.text
    return dict(got.json())


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "apply_patch"}, "required"])
def test_a_custom_tools_input_is_of_its_grammar(real: LiveServer, choice: Any) -> None:
    reply = patch(real, SHORT, choice, parallel_tool_calls=False, temperature=0)
    (call,) = reply["output"]
    assert (reply["status"], call["type"], call["name"]) == ("completed", "custom_tool_call", "apply_patch")
    assert is_patch(call["input"]), call


@pytest.mark.parametrize("seed", range(3))
def test_however_it_is_drawn_nothing_but_patches_is_called(real: LiveServer, seed: int) -> None:
    reply = patch(real, SHORT, "required", temperature=1.5, seed=seed)
    assert all(is_patch(item["input"]) for item in reply["output"] if item["type"] == "custom_tool_call")


def test_a_patch_without_an_end_is_cut_and_never_called(real: LiveServer) -> None:
    """The grammar as it is has room for any number of lines: what is complete fits it, and nothing else is called."""
    reply = patch(real, GRAMMAR, "required", max_output_tokens=12, temperature=0)
    assert reply["status"] == "incomplete"
    assert "custom_tool_call" not in [item["type"] for item in reply["output"]]


def test_a_free_choice_among_custom_tools_still_answers(real: LiveServer) -> None:
    reply = patch(real, GRAMMAR, "auto", max_output_tokens=24, temperature=0)
    assert reply["output"]
    assert all(is_patch(item["input"]) for item in reply["output"] if item["type"] == "custom_tool_call")


def test_a_grammar_that_cannot_be_held_to_never_fails_the_request(real: LiveServer) -> None:
    reply = patch(real, 'start: "(" start? ")"', "auto", max_output_tokens=8, temperature=0)
    assert reply["output"]
