"""The vendors' own types: every field of their requests is read or listed in docs/api.md, and everything that we write
is valid, whole and streamed. The fields come from the installed SDKs, so that a new SDK shows what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import ollama
import pytest
from anthropic.types import ContentBlockParam, RawMessageStreamEvent, ToolUnionParam
from anthropic.types import Message as AnthropicReply
from anthropic.types.beta import (
    BetaContentBlock,
    BetaContentBlockParam,
    BetaMessage,
    BetaRawContentBlockDelta,
    BetaRawMessageStreamEvent,
    BetaToolUnionParam,
)
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageCreateParamsBase
from anthropic.types.message_create_params import MessageCreateParamsBase
from google.genai.types import GenerateContentConfig, GenerationConfig, Part
from google.genai.types import Tool as GeminiToolTypes
from openai.types.beta import BetaResponseInputItemParam, BetaResponseStreamEvent, BetaToolParam
from openai.types.beta.response_create_params import ResponseCreateParamsBase as BetaResponseCreateParamsBase
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent, ToolParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, TypeAdapter

from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Finished, collect_reply
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.gateway.tool_search import is_tool_search
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.protocols.anthropic_messages.request import MessagesBody
from modelyard.protocols.common.extensions import ignored_names
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.gemini.request import GeminiBody, GeminiGenerationConfig, GeminiPart, GeminiTool
from modelyard.protocols.ollama.fields import OllamaOptions
from modelyard.protocols.ollama.generate import OllamaGenerateBody
from modelyard.protocols.ollama.request import OllamaChatBody, OllamaMessage, OllamaTool
from modelyard.protocols.openai_chat.request import ChatCompletionBody
from modelyard.protocols.openai_responses.request import ResponsesBody
from tests.protocols.openai_responses.helpers import CASES, REQUEST, STARTED, USAGE, text
from tests.protocols.test_sdk_requests import samples

pytestmark = pytest.mark.compliance

DOCS = (Path(__file__).parents[2] / "docs/api.md").read_text()
# Fields of the SDKs' requests, and our bodies. Some are headers, or stay in the client.
REQUESTS: dict[str, tuple[Iterable[str], tuple[type[msgspec.Struct], ...]]] = {
    "Messages": (
        get_type_hints(MessageCreateParamsBase) | get_type_hints(BetaMessageCreateParamsBase),
        (MessagesBody,),
    ),
    "Chat Completions": (get_type_hints(CompletionCreateParamsBase), (ChatCompletionBody,)),
    "Responses": (
        get_type_hints(ResponseCreateParamsBase) | get_type_hints(BetaResponseCreateParamsBase),
        (ResponsesBody,),
    ),
    "Gemini": (
        GenerateContentConfig.model_fields | GenerationConfig.model_fields,
        (GeminiBody, GeminiGenerationConfig),
    ),
    "Ollama": (
        {*signature(ollama.Client.chat).parameters, *signature(ollama.Client.generate).parameters},
        (OllamaChatBody, OllamaGenerateBody),
    ),
    "Ollama `options`": (ollama.Options.model_fields, (OllamaOptions,)),
}
NOT_IN_THE_BODY = {
    "self",
    *("betas", "user_profile_id", "workspace_id"),
    *("automatic_continuation", "automatic_function_calling", "http_options", "should_return_http_response"),
}
REPLIES: dict[str, tuple[WireProtocol, type[BaseModel], Any]] = {
    "Messages": (anthropic_messages, AnthropicReply, RawMessageStreamEvent),
    "Chat Completions": (openai_chat, ChatCompletion, ChatCompletionChunk),
    "Responses": (openai_responses, Response, ResponseStreamEvent),
}
EVERY_REPLY = pytest.mark.parametrize("protocol", sorted(REPLIES))
# Events that end a stream, or are sent beside the vendor's: ours, or the vendor's types lack them.
UNTYPED = {"ping", "error"}
# Events that the cases of this file do not have: tests/e2e/test_mcp.py and test_background_responses.py read them.
SENT_ELSEWHERE = re.compile(r"(response\.)?mcp_|server_tool_use|tool_search|response\.queued|error")


def documented(row: str) -> set[str]:
    """A row of the tables of what has no effect."""
    found = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", DOCS, re.MULTILINE)
    assert found, f"docs/api.md has no row {row}"
    return set(re.findall(r"`([\w.]+)`", found[1]))


@pytest.mark.parametrize("protocol", REQUESTS)
def test_each_field_of_a_request_is_read_or_reported_and_listed_as_without_effect(protocol: str) -> None:
    theirs, ours = REQUESTS[protocol]
    known = set[str]().union(*(body.__struct_fields__ for body in ours))
    assert set(theirs) - NOT_IN_THE_BODY <= known
    assert documented(protocol) == set[str]().union(*(ignored_names(body) for body in ours))


def variants(union: Any) -> dict[str, Any]:
    """A value of each type that a union of the SDK has, by its tag."""
    return {value.get("type") or "message": value for value in samples(union) if isinstance(value, dict)}


def dropped(request: Request, kind: str) -> set[str]:
    split = (warning.partition(":") for warning in request.warnings)
    return {name.split()[0] for found, _, name in split if found == kind}


def read_block(block: Any) -> Request:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}, block]}
    return anthropic_messages.read_request(msgspec.json.encode({"model": "m", "messages": [message]}), {})


def read_item(item: Any) -> Request:
    input = [{"role": "user", "content": "hi"}, item]
    return openai_responses.read_request(msgspec.json.encode({"model": "m", "input": input}), {})


def read_tool(protocol: WireProtocol, tool: Any) -> Request:
    said = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages" if protocol is anthropic_messages else "input": said, "tools": [tool]}
    if tool.get("type") == "mcp_toolset":
        body["mcp_servers"] = [{"type": "url", "url": "https://x", "name": tool["mcp_server_name"]}]
    return protocol.read_request(msgspec.json.encode(body), {})


def test_each_block_of_messages_is_read_or_reported_and_listed() -> None:
    blocks = variants(BetaContentBlockParam) | variants(ContentBlockParam)
    assert len(blocks) > 20
    unread = {name for block in blocks.values() for name in dropped(read_block(block), "block_dropped")}
    assert unread == documented("Messages content")


def test_each_item_of_responses_is_read_refused_or_reported_and_listed() -> None:
    items, unread = variants(BetaResponseInputItemParam) | variants(ResponseInputItemParam), set[str]()
    assert len(items) > 30
    for item in items.values():
        with suppress(ModelyardError):
            unread |= dropped(read_item(item), "item_ignored")
    assert unread == documented("Responses input")


@pytest.mark.parametrize(
    ("row", "module", "unions"),
    [
        ("Messages tools", anthropic_messages, (BetaToolUnionParam, ToolUnionParam)),
        ("Responses tools", openai_responses, (BetaToolParam, ToolParam)),
    ],
)
def test_each_tool_is_offered_or_reported_and_listed(row: str, module: WireProtocol, unions: tuple[Any, ...]) -> None:
    tools = [tool for union in unions for tool in samples(union) if isinstance(tool, dict)]
    assert len({tool.get("type") for tool in tools}) > 15
    read = [tool for each in tools for tool in read_tool(module, each).tools]
    run_elsewhere = [tool for tool in read if tool.kind == "server" and not is_tool_search(tool)]
    assert {tool.type for tool in run_elsewhere if tool.server is None} == documented(row)


def test_each_tool_and_part_of_gemini_is_known() -> None:
    assert set(GeminiToolTypes.model_fields) <= set(GeminiTool.__struct_fields__)
    assert set(GeminiTool.__struct_fields__) - {"function_declarations"} == documented("Gemini tools")
    assert set(Part.model_fields) - set(GeminiPart.__struct_fields__) == documented("Gemini parts")


def test_each_field_of_ollamas_messages_and_tools_is_read() -> None:
    assert set(ollama.Message.model_fields) <= set(OllamaMessage.__struct_fields__)
    assert set(ollama.Tool.model_fields) <= set(OllamaTool.__struct_fields__)


def tagged(union: Any) -> set[str]:
    """The tags of a union of the SDK's models."""
    arguments = get_args(union)
    if isinstance(union, type) and issubclass(union, BaseModel):
        return set(get_args(union.model_fields["type"].annotation))
    return set[str]().union(*map(tagged, arguments))


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


SUMMARISED = [BlockStart(0, "compaction"), BlockDelta(0, "They spoke."), BlockEnd(0)]
COMPACTED = (REQUEST, [STARTED, *SUMMARISED, *text(1, "Go on."), Finished("end", USAGE, compaction=USAGE)])


def test_a_summary_is_valid_for_the_beta_types_of_the_vendors() -> None:
    request, events = COMPACTED
    for module, reply, event in (
        (anthropic_messages, BetaMessage, BetaRawMessageStreamEvent),
        (openai_responses, Response, ResponseStreamEvent),
    ):
        written = msgspec.json.decode(module.write_reply([collect_reply(events)], request))
        reply.model_validate(written, strict=True)
        for frame in frames(module, request, events):
            if frame["type"] not in UNTYPED:
                TypeAdapter[Any](event).validate_python(frame, strict=True)


def test_each_event_of_responses_is_sent_or_listed() -> None:
    written = {frame["type"] for case in (COMPACTED, *CASES.values()) for frame in frames(openai_responses, *case)}
    known = tagged(ResponseStreamEvent) | tagged(BetaResponseStreamEvent)
    assert written <= known
    assert {name for name in known - written if not SENT_ELSEWHERE.match(name)} == documented("Responses events")


def test_each_event_block_and_delta_of_messages_is_sent_or_listed() -> None:
    written = set[str]()
    for case in (COMPACTED, *CASES.values()):
        for frame in frames(anthropic_messages, *case):
            written |= {frame["type"]}
            written |= {frame[name]["type"] for name in ("content_block", "delta") if "type" in frame.get(name, {})}
    known = tagged(BetaRawMessageStreamEvent) | tagged(BetaContentBlock) | tagged(BetaRawContentBlockDelta)
    assert written - UNTYPED <= known
    assert {name for name in known - written if not SENT_ELSEWHERE.match(name)} == documented("Messages events")
