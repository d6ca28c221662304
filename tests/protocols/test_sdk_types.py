"""The vendors' own types: every field of their requests is read or listed in docs/api.md, and everything that we write
is valid, whole and streamed. The fields come from the installed SDKs, so that a new SDK shows what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from anthropic.types import Message as AnthropicReply
from anthropic.types import RawMessageStreamEvent
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, TypeAdapter

from modelyard.core.events import Event, collect_reply
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.protocols.anthropic_messages.request import MessagesBody
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.openai_chat.request import ChatCompletionBody
from modelyard.protocols.openai_responses.request import ResponsesBody
from tests.protocols.openai_responses.helpers import CASES

pytestmark = pytest.mark.compliance

DOCS = (Path(__file__).parents[2] / "docs/api.md").read_text()
REQUESTS: dict[str, tuple[type[Any], type[msgspec.Struct]]] = {
    "Messages": (MessageCreateParamsBase, MessagesBody),
    "Chat Completions": (CompletionCreateParamsBase, ChatCompletionBody),
    "Responses": (ResponseCreateParamsBase, ResponsesBody),
}
REPLIES: dict[str, tuple[WireProtocol, type[BaseModel], Any]] = {
    "Messages": (anthropic_messages, AnthropicReply, RawMessageStreamEvent),
    "Chat Completions": (openai_chat, ChatCompletion, ChatCompletionChunk),
    "Responses": (openai_responses, Response, ResponseStreamEvent),
}
EVERY_REPLY = pytest.mark.parametrize("protocol", sorted(REPLIES))
# Events that end a stream, or are sent beside the vendor's: ours, or the vendor's types lack them.
UNTYPED = {"ping", "error"}


def ignored_fields(protocol: str) -> set[str]:
    """The row of a protocol in the table of fields without effect."""
    row = re.search(rf"^\| {protocol} \| (.*) \|$", DOCS, re.MULTILINE)
    assert row, f"docs/api.md lists no fields without effect for {protocol}"
    return set(re.findall(r"`(\w+)`", row[1]))


@pytest.mark.parametrize("protocol", sorted(REQUESTS))
def test_each_field_of_a_request_is_read_or_listed_as_without_effect(protocol: str) -> None:
    theirs, ours = REQUESTS[protocol]
    fields, read = set(get_type_hints(theirs)), set(ours.__struct_fields__)
    assert fields - read == ignored_fields(protocol) - read
    assert ignored_fields(protocol) <= fields


def frames(protocol: WireProtocol, request: Request, events: Iterable[Event]) -> list[Any]:
    writer, parser = protocol.writer(request, "abc123"), SseParser()
    data = b"".join(writer.write(event) for event in events) + writer.end()
    found = (frame.data for frame in parser.feed(data))
    return [msgspec.json.decode(data) for data in found if data != b"[DONE]"]


@EVERY_REPLY
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"failed"}))
def test_a_reply_is_valid_for_the_types_of_the_vendor(protocol: str, case: str) -> None:
    module, reply, _ = REPLIES[protocol]
    request, events = CASES[case]
    body = msgspec.json.decode(module.write_reply([collect_reply(events)], request))
    reply.model_validate(body, strict=True)


@EVERY_REPLY
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_event_is_valid_for_the_types_of_the_vendor(protocol: str, case: str) -> None:
    module, _, event = REPLIES[protocol]
    adapter = TypeAdapter[Any](event)
    for frame in frames(module, *CASES[case]):
        if frame.get("type") not in UNTYPED and "error" not in frame:
            adapter.validate_python(frame, strict=True)


# OpenAI's OpenAPI document has these fields without null: a response that has no value leaves them out. All but the
# last are of its own services.
NEVER_NULL = {
    *("access_programs", "image", "input_transformations", "prompt_cache_diagnostics", "prompt_cache_options"),
    *("tool_usage", "user"),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_response_has_every_field_of_the_type_that_may_be_null_in_each_of_its_states(case: str) -> None:
    request, events = CASES[case]
    responses = [frame["response"] for frame in frames(openai_responses, request, events) if "response" in frame]
    assert {response["status"] for response in responses} >= {"in_progress"}
    if case != "failed":
        responses.append(msgspec.json.decode(openai_responses.write_reply([collect_reply(events)], request)))
    for response in responses:
        assert set(Response.model_fields) - set(response) == NEVER_NULL


def test_a_value_that_the_client_sent_is_repeated_and_one_that_it_did_not_send_is_never_null() -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}

    def echoed(**fields: Any) -> Any:
        body = msgspec.json.encode({"model": "m", "input": "hi", **fields})
        request, events = openai_responses.read_request(body, {}), CASES["text"][1]
        return msgspec.json.decode(openai_responses.write_reply([collect_reply(events)], request))

    assert echoed(user="u1")["user"] == "u1"
    assert "user" not in echoed()
    assert echoed(text={"format": schema})["text"]["format"] == schema | {"description": "", "strict": False}
    described = schema | {"description": "An answer.", "strict": True}
    assert echoed(text={"format": described})["text"]["format"] == described


def test_the_end_of_a_functions_arguments_names_the_function() -> None:
    """OpenAI's OpenAPI document requires it; the SDK's type does not have it."""
    done = [f for f in frames(openai_responses, *CASES["parallel_tools"]) if f["type"].endswith("arguments.done")]
    assert [frame["name"] for frame in done] == ["shell", "shell"]
    (custom,) = [f for f in frames(openai_responses, *CASES["custom_tool"]) if f["type"].endswith("input.done")]
    assert custom.keys() == {"type", "sequence_number", "output_index", "item_id", "input"}


def test_the_events_of_a_response_are_known_to_the_sdk() -> None:
    known = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(get_args(ResponseStreamEvent)[0])}
    written = {frame["type"] for case in CASES.values() for frame in frames(openai_responses, *case)}
    assert written <= known
