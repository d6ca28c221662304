from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint, Message, Request, Sampling, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols import openai_chat
from tests.protocols.openai_chat.bodies import body, read, written
from tests.strategies import requests


def test_a_short_request_reads_as_its_defaults() -> None:
    assert read() == Request(model="m", messages=(Message("user", (Text("Hello"),)),))


def test_unknown_fields_are_accepted() -> None:
    assert read(verbosity="low", web_search_options={}, service_tier="auto", modalities=["text"]) == read()


def test_nulls_mean_absence() -> None:
    names = ("temperature", "tools", "stop", "n", "stream", "logprobs", "response_format", "tool_choice", "metadata")
    assert read(**dict.fromkeys(names)) == read()


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert read(max_tokens=5).max_tokens == 5


def test_a_single_stop_string_and_a_list_read_alike() -> None:
    assert read(stop="END").stop == read(stop=["END"]).stop == ("END",)


def test_empty_stop_strings_are_dropped_with_a_warning() -> None:
    request = read(stop=["", "END"])
    assert request.stop == ("END",)
    assert request.warnings == ("empty_stop_string_dropped",)
    assert read(stop="").stop == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 3}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"top_logprobs": 2}, 2),
        ({"logprobs": 4}, 4),
        ({"logprobs": 0}, 0),
    ],
)
def test_logprobs_count_the_alternatives(fields: dict[str, object], expected: int | None) -> None:
    assert read(**fields).logprobs == expected


def test_streaming_and_its_usage_are_read() -> None:
    request = read(stream=True, stream_options={"include_usage": True})
    assert (request.stream, request.include_usage) == (True, True)
    assert (read().stream, read().include_usage) == (False, False)


def test_a_json_schema_stays_the_text_it_was() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
    raw += b'"json_schema":{"name":"n","strict":true,"description":"d","schema":{"maximum": 1.50, "b": 1e2}}}}'
    constraint = openai_chat.read_request(raw, {}).constraint
    assert constraint == Constraint("json_schema", '{"maximum": 1.50, "b": 1e2}', "n", "d", True)


def test_response_formats_become_constraints() -> None:
    assert read(response_format={"type": "text"}).constraint is None
    assert read(response_format={"type": "json_object"}).constraint == Constraint("json_object")
    asked = {"type": "json_object", "schema": {"type": "object"}}
    assert read(response_format=asked).constraint == Constraint("json_schema", '{"type":"object"}')
    assert read(regex="a+").constraint == Constraint("regex", "a+")


def test_an_unknown_response_format_is_a_warning() -> None:
    request = read(response_format={"type": "yaml"})
    assert request.constraint is None
    assert "'yaml'" in request.warnings[0]


def test_the_session_comes_from_headers_before_the_cache_key() -> None:
    asked = body(prompt_cache_key="key", user="ann")
    assert openai_chat.read_request(asked, {}).session == "key"
    assert openai_chat.read_request(asked, {"session-id": "c", "x-session-affinity": "b"}).session == "b"
    assert openai_chat.read_request(asked, {"x-session-affinity": "b", "x-session-id": "a"}).session == "a"
    alone = openai_chat.read_request(body(user="ann"), {})
    assert (alone.session, alone.user) == (None, "ann")


def test_extension_fields_reach_the_sampling() -> None:
    assert read(top_k=5, seed=7, logit_bias={"12": -100}).sampling == Sampling(top_k=5, seed=7, logit_bias={12: -100.0})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": None}, "messages", "at least one message"),
        ({"model": ""}, "model", "GET /v1/models"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": 129}, "n", "between 1 and 128"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"top_logprobs": -1}, "top_logprobs", "between 0 and 20"),
        ({"logprobs": 50}, "logprobs", "between 0 and 20"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"stop": ["x"] * 129}, "stop", "at most 128"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"messages": "hi"}, "messages", "array"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "must be an object"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "names no tool"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"a":"\\ud800"}'])
def test_a_body_that_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        openai_chat.read_request(raw, {})


def test_an_upstream_sees_only_what_was_asked_for() -> None:
    assert written(read()) == {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def test_streaming_and_its_usage_are_written() -> None:
    out = written(read(stream=True, stream_options={"include_usage": True}))
    assert out["stream"] is True
    assert out["stream_options"] == {"include_usage": True}


def test_session_user_metadata_and_store_survive_the_way_upstream() -> None:
    request = read(prompt_cache_key="k", user="u", metadata={"a": "b"}, store=False)
    assert openai_chat.read_request(openai_chat.write_request(request), {}) == request


# --- both ways ------------------------------------------------------------------------------------------------------


def expressible(request: Request) -> Request:
    """The nearest request that Chat can say: reasoning, content, calls in this order; results know their kind."""
    custom: set[str] = set()
    messages = []
    for message in request.messages:
        if message.role == "assistant":
            custom |= {p.id for p in message.parts if isinstance(p, ToolCall) and p.custom}
            messages.append(_in_order(message))
        elif message.role == "tool":
            results = [p for p in message.parts if isinstance(p, ToolResult)]
            messages.append(Message("tool", tuple(replace(r, custom=r.call_id in custom) for r in results)))
        else:
            messages.append(message)
    return replace(request, messages=tuple(messages))


def _in_order(message: Message) -> Message:
    thinking = "".join(p.text for p in message.parts if isinstance(p, Thinking))
    said = [p for p in message.parts if not isinstance(p, Thinking | ToolCall)]
    calls = [p for p in message.parts if isinstance(p, ToolCall)]
    return Message("assistant", (*([Thinking(thinking)] if thinking else []), *said, *calls))


@settings(max_examples=100, deadline=None)
@given(
    requests(
        custom=True,
        broken=True,
        details=True,
        developer=True,
        images_in_results=True,
        logprobs=True,
        n=True,
        named_constraints=True,
    ).map(expressible)
)
def test_what_chat_can_say_is_read_back_as_it_was(request: Request) -> None:
    assert openai_chat.read_request(openai_chat.write_request(request), {}) == request


@settings(max_examples=100, deadline=None)
@given(
    requests(
        custom=True,
        server=True,
        deferred=True,
        namespaces=True,
        redacted=True,
        broken=True,
        errors=True,
        references=True,
        images_in_results=True,
        logprobs=True,
        n=True,
    )
)
def test_writing_what_was_read_back_changes_nothing(request: Request) -> None:
    once = openai_chat.write_request(request)
    assert openai_chat.write_request(openai_chat.read_request(once, {})) == once
