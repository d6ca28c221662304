from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Constraint, Message, Reasoning, Request, Text
from modelyard.protocols import openai_responses as wire


def read(headers: dict[str, str] | None = None, **fields: Any) -> Request:
    body = {"model": "tiny", "input": "hello"} | fields
    return wire.read_request(msgspec.json.encode(body), headers or {})


def test_a_string_is_one_user_message() -> None:
    assert read() == Request(model="tiny", messages=(Message("user", (Text("hello"),)),))


def test_instructions_become_the_leading_system_message() -> None:
    request = read(instructions="Be brief.")
    assert request.messages[0] == Message("system", (Text("Be brief."),))
    assert request.instructions


def test_a_system_item_is_not_taken_for_instructions() -> None:
    request = read(input=[{"role": "system", "content": "Be brief."}])
    assert request.messages[0].role == "system"
    assert not request.instructions


def test_unknown_fields_and_null_fields_are_accepted() -> None:
    assert read(client_metadata={"a": 1}, truncation="auto", temperature=None, tools=None, service_tier="x") == read()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"text": "x"}]}, "input[0]"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_an_unknown_role_is_told_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="user, assistant, system, developer"):
        read(input=[{"role": "wizard", "content": "x"}])


def test_a_wrong_type_names_its_path() -> None:
    with pytest.raises(InvalidRequest, match="max_output_tokens"):
        read(max_output_tokens="many")


def test_background_is_unsupported_and_false_is_fine() -> None:
    assert read(background=False) == read()
    with pytest.raises(Unsupported):
        read(background=True)


def test_a_previous_response_needs_no_input() -> None:
    assert read(input=None, previous_response_id="resp_1").previous == "resp_1"


def test_structured_output_becomes_a_constraint() -> None:
    schema = {"type": "object"}
    told = {"format": {"type": "json_schema", "name": "title", "schema": schema, "strict": True}, "verbosity": "low"}
    assert read(text=told).constraint == Constraint("json_schema", '{"type":"object"}', "title", None, True)
    assert read(text={"format": {"type": "json_object"}}).constraint == Constraint("json_object")
    assert read(text={"format": {"type": "text"}}, regex="a+").constraint == Constraint("regex", "a+")


def test_an_unknown_format_is_a_warning() -> None:
    request = read(text={"format": {"type": "hologram"}})
    assert request.constraint is None
    assert "hologram" in request.warnings[0]


def test_reasoning_settings_are_read() -> None:
    assert read(reasoning={"effort": "high", "summary": "auto"}).reasoning == Reasoning(effort="high", summary="auto")
    assert read(reasoning={"effort": "none"}).reasoning.enabled is False
    assert read(reasoning={"generate_summary": "concise"}).reasoning.summary == "concise"


def test_include_turns_on_logprobs_and_encrypted_reasoning() -> None:
    request = read(include=["reasoning.encrypted_content", "message.output_text.logprobs"], top_logprobs=3)
    assert (request.encrypted_reasoning, request.logprobs) == (True, 3)
    assert read(include=["message.output_text.logprobs"]).logprobs == 0
    assert read(top_logprobs=3).logprobs is None


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, "cache-key"),
        ({"x-session-affinity": "d"}, "d"),
        ({"x-session-id": "c", "x-session-affinity": "d"}, "c"),
        ({"session-id": "b", "x-session-id": "c"}, "b"),
        ({"session-id": "b", "thread-id": "a"}, "a"),
    ],
)
def test_the_session_comes_from_headers_before_the_cache_key(headers: dict[str, str], session: str) -> None:
    assert read(headers, prompt_cache_key="cache-key").session == session


def test_extension_fields_and_the_rest_are_carried() -> None:
    request = read(
        top_k=5, seed=7, stop="END", priority="background", lora_adapter="l", metadata={"a": "b"}, store=False,
        safety_identifier="u", parallel_tool_calls=False, max_output_tokens=9, stream=True,
    )  # fmt: skip
    assert (request.sampling.top_k, request.sampling.seed, request.stop) == (5, 7, ("END",))
    assert (request.priority, request.lora_adapter, request.metadata) == ("background", "l", {"a": "b"})
    assert (request.store, request.user, request.parallel_tool_calls) == (False, "u", False)
    assert (request.max_tokens, request.stream) == (9, True)


def test_what_is_not_kept_here_is_a_warning() -> None:
    assert len(read(conversation="conv_1", prompt={"id": "p"}).warnings) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b'{"model":"m","input":NaN}',
        b'{"model":"m","input":"\\ud800"}',
        b'{"model":"m","input":"\xff"}',
        b'{"model":"m","metadata":' + b'{"a":' * 10_000,
        b'{"model":"m","input":' + b"[" * 10_000,
        b'{"model":"m","input":[3]}',
        b'{"model":"m","input":"x","tools":[3]}',
        b'{"model":"m","input":"x","tools":[{"type":["function"]}]}',
        b"[]",
    ],
)
def test_odd_json_is_the_clients_mistake(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        wire.read_request(body, {})


def test_odd_names_among_allowed_tools_match_nothing() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["x"]}, 3]}
    assert read(tools=[{"type": "function", "name": "f"}], tool_choice=choice).tools == ()


def test_very_many_items_and_tools_are_read() -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(10_000)]
    tools = [{"type": "function", "name": f"t{i}"} for i in range(10_000)]
    request = read(input=calls, tools=tools)
    assert (len(request.messages[0].parts), len(request.tools)) == (10_000, 10_000)
