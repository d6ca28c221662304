"""Whatever is sent, the answer is well-formed and never our own fault: good bodies with a few things changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.protocols import VALID_BODIES, check_error
from tests.live_server import demo_config, live_server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "logit_bias": {"5": 1.5}, "stream": False,
    "chat_template_kwargs": {"enable_thinking": True}, "documents": [{"title": "t", "text": "x"}], "priority": "main",
    "dry_sequence_breakers": ["\n"], "lora_adapter": None, "user": "ann", "metadata": {"user_id": "u"},
}  # fmt: skip
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}

# Every endpoint with as many of its fields as a client could send at once.
FULL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": VALID_BODIES["/v1/messages"] | SAMPLING | {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "t"},
            ]},
            {"role": "system", "content": "Remember."},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "enabled", "budget_tokens": 100},
        "stop_sequences": ["STOP"],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/v1/chat/completions": VALID_BODIES["/v1/chat/completions"] | SAMPLING | {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [TOOL_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["STOP"], "max_completion_tokens": 9,
        "stream_options": {"include_usage": True}, "parallel_tool_calls": False, "reasoning_effort": "low",
    },
    "/v1/responses": VALID_BODIES["/v1/responses"] | SAMPLING | {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "sh", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a"}]},
        ],
        "tools": [
            {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True},
            {"type": "custom", "name": "sh", "format": {"type": "grammar", "syntax": "lark", "definition": "s: /x/"}},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "inner"}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 9, "store": True, "parallel_tool_calls": True, "previous_response_id": None,
    },
    "/v1/completions": VALID_BODIES["/v1/completions"] | SAMPLING | {
        "prompt": ["one", "two"], "suffix": "x", "echo": True, "n": 1, "best_of": 1, "logprobs": 2, "max_tokens": 9,
        "stop": ["STOP"], "stream_options": {"include_usage": True},
    },
    "/v1/embeddings": {"model": "demo", "input": ["one", "two"], "encoding_format": "base64", "dimensions": 8},
    "/tokenize": {"model": "demo", "content": "one", "with_pieces": True, "add_special": True},
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
}  # fmt: skip
FULL_BODIES["/v1/messages/count_tokens"] = FULL_BODIES["/v1/messages"]
FULL_BODIES["/v1/responses/input_tokens"] = FULL_BODIES["/v1/responses"]
FULL_BODIES["/apply-template"] = FULL_BODIES["/v1/chat/completions"]

STRINGS = st.sampled_from(
    ["", "demo", "user", "assistant", "tool", "text", "function", "auto", "c1", "<|im_end|>", "\x00", "é😀"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, -(2**64), 10**40]),
    st.floats(allow_nan=False, allow_infinity=False),
    STRINGS,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(STRINGS | st.sampled_from(["type", "role"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def json_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body that could hold something else."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from json_paths(each, (*path, key))


@st.composite
def mutated_bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    body = copy.deepcopy(FULL_BODIES[path])
    for _ in range(draw(st.integers(1, 3))):
        if not body:
            break
        *parents, last = draw(st.sampled_from(sorted(json_paths(body), key=repr)))
        container: Any = body
        for step in parents:
            container = container[step]
        if draw(st.booleans()):
            container[last] = draw(VALUES)
        else:
            del container[last]
    return body


@pytest.fixture(scope="module")
def vision_client() -> Iterator[httpx.Client]:
    config = demo_config()
    config["models"]["demo"]["modalities"] = ["text", "image"]
    with live_server(config) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


def check_reply(vision_client: httpx.Client, path: str, body: Any) -> None:
    reply = vision_client.post(path, content=json.dumps(body).encode())
    if reply.status_code != 200:
        assert 400 <= reply.status_code < 500, reply.text
        check_error(reply, path, reply.status_code)
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("\n\n")
    else:
        assert isinstance(reply.json(), dict)


FUZZ_SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", FULL_BODIES)
def test_bodies_with_all_fields_are_accepted(vision_client: httpx.Client, path: str) -> None:
    reply = vision_client.post(path, json=FULL_BODIES[path])
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", FULL_BODIES)
def test_mutated_bodies_get_well_formed_replies(vision_client: httpx.Client, path: str) -> None:
    @FUZZ_SETTINGS
    @given(mutated_bodies(path))
    def run(body: dict[str, Any]) -> None:
        check_reply(vision_client, path, body)

    run()


@pytest.mark.parametrize("path", FULL_BODIES)
def test_arbitrary_json_gets_well_formed_replies(vision_client: httpx.Client, path: str) -> None:
    fields = st.sampled_from(sorted(FULL_BODIES[path]))

    @FUZZ_SETTINGS
    @given(VALUES | st.dictionaries(fields, VALUES).map(lambda body: {"model": "demo"} | body))
    def run(body: Any) -> None:
        check_reply(vision_client, path, body)

    run()
