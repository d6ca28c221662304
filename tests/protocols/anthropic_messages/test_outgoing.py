"""Writing requests: what the wire can express comes back as it was; the rest is written the same way twice."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.request import (
    Message,
    Reasoning,
    Request,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from modelyard.protocols.anthropic_messages import read_request, write_request
from tests import strategies

ANYTHING = strategies.requests(
    redacted=True,
    custom=True,
    server=True,
    deferred=True,
    namespaces=True,
    broken=True,
    details=True,
    errors=True,
    references=True,
    images_in_results=True,
    developer=True,
    named_constraints=True,
    logprobs=True,
    n=True,
)
EXPRESSIBLE = strategies.requests(
    redacted=True,
    server=True,
    deferred=True,
    broken=True,
    errors=True,
    references=True,
    images_in_results=True,
    json_object=False,
)


def normal(request: Request) -> Request:
    """Without what this wire has no place for, and with what reading adds."""
    messages, reasoning = request.messages, request.reasoning
    if messages[0].role == "system" and all(part == Text("") for part in messages[0].parts):
        messages = messages[1:]
    if not reasoning.enabled:
        reasoning = replace(reasoning, budget=None)
    return replace(
        request,
        messages=messages,
        reasoning=reasoning,
        parallel_tool_calls=None if request.tool_choice.mode == "none" else request.parallel_tool_calls,
        metadata={"user_id": request.user} if request.user else None,
        session=request.user,
    )


@settings(deadline=None, max_examples=100)
@given(EXPRESSIBLE)
def test_what_the_wire_can_express_comes_back_as_it_was(request: Request) -> None:
    expected = normal(request)
    assert read_request(write_request(expected), {}) == expected


@settings(deadline=None, max_examples=100)
@given(ANYTHING)
def test_everything_else_is_written_the_same_way_twice(request: Request) -> None:
    written = write_request(request)
    assert write_request(read_request(written, {})) == written


def test_an_empty_system_message_is_not_written() -> None:
    messages = (
        Message("system"),
        Message("system", (Text(""),)),
        Message("developer", (Text("a"),)),
        Message("user", (Text("b"),)),
    )
    body = msgspec.json.decode(write_request(Request(model="m", messages=messages)))
    assert body == {"model": "m", "system": "a", "messages": [{"role": "user", "content": "b"}]}


def test_free_text_tools_become_functions_of_one_string() -> None:
    call = Message("assistant", (ToolCall("c", "patch", "*** Begin", custom=True),))
    request = Request(model="m", messages=(call,), tools=(Tool("patch", kind="custom"),))
    body = msgspec.json.decode(write_request(request))
    assert body["tools"][0]["input_schema"]["required"] == ["input"]
    assert body["messages"][0]["content"][0]["input"] == {"input": "*** Begin"}


def test_words_of_other_wires_are_not_passed_on() -> None:
    reasoning = Reasoning(enabled=True, effort="minimal", summary="detailed")
    request = Request(model="m", messages=(Message("user"),), reasoning=reasoning, tool_choice=ToolChoice("required"))
    body = msgspec.json.decode(write_request(request))
    assert body["thinking"] == {"type": "adaptive"}
    assert body["output_config"] == {"effort": "low"}
    assert body["tool_choice"] == {"type": "any"}
