"""Requests made from the vendors' own types: whatever the SDKs can express is read, or refused with a reason. The
nested fields of what is read are those of our bodies, or listed here as without effect."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NotRequired, Required, get_args, get_origin, get_type_hints

import anthropic.types as anthropic_types
import msgspec
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import openai.types.shared_params as shared_types
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from typing_extensions import is_typeddict

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.protocols.anthropic_messages import request as messages_body
from modelyard.protocols.openai_chat import request as chat_body
from modelyard.protocols.openai_responses import request as responses_body

pytestmark = pytest.mark.compliance

HELLO = [{"role": "user", "content": "Hello"}]
PROTOCOLS: dict[str, tuple[WireProtocol, type[Any], dict[str, Any]]] = {
    "Messages": (anthropic_messages, MessageCreateParamsBase, {"model": "m", "max_tokens": 9, "messages": HELLO}),
    "Chat Completions": (openai_chat, CompletionCreateParamsBase, {"model": "m", "messages": HELLO}),
    "Responses": (openai_responses, ResponseCreateParamsBase, {"model": "m", "input": "Hello"}),
}
# Refused because ignoring them would change the answer: the codes and messages say what to send instead.
REFUSALS = (
    "no model speaks here",
    "not stored",
    "must be false",
    "needs ",
    "no model reads here",
    "has nothing that is read",  # one item that is ignored, alone
    "allows a tool without a name",  # its type allows any object
)
_LISTS = ("Iterable", "Sequence", "list", "SequenceNotStr")  # lists on the wire
_PLAIN: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: True, bytes: "eA=="}


def samples(hint: Any, depth: int = 0) -> Iterator[Any]:
    """One value for each kind that the type allows; an object with all its fields, once for each kind of each field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        yield from _objects(hint, depth)
    elif hint is type(None):
        yield None
    elif origin is Literal:
        yield from arguments
    elif hint in _PLAIN:
        yield _PLAIN[hint]
    elif origin in (Required, NotRequired) or str(origin) == "typing.Annotated":
        yield from samples(arguments[0], depth)
    elif origin is dict:
        yield {"7": next(samples(arguments[1], depth + 1), "x")}
    elif getattr(origin, "__name__", "") in _LISTS:
        yield from ([value] for value in samples(arguments[0], depth))
    elif arguments:
        for one in arguments:
            yield from samples(one, depth)
    elif hint in (object, Any):
        yield {}
    # The rest are files and replies, which the SDK turns into one of the others.


def _objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    hints = _hints(kind)
    whole = {name: next(samples(hint, depth + 1), None) for name, hint in hints.items()}
    yield whole
    if depth > 3:
        return
    for name, hint in hints.items():
        for number, value in enumerate(samples(hint, depth + 1)):
            if number:
                yield whole | {name: value}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def bodies(protocol: str) -> Iterator[tuple[str, dict[str, Any]]]:
    _, kind, usual = PROTOCOLS[protocol]
    for field, hint in _hints(kind).items():
        for value in samples(hint, 0):
            yield field, usual | {field: value}


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_what_the_sdk_can_express_is_read_or_refused_with_a_reason(protocol: str) -> None:
    module, read, wrong = PROTOCOLS[protocol][0], 0, dict[str, Any]()
    for field, body in bodies(protocol):
        try:
            assert isinstance(module.read_request(msgspec.json.encode(body), {}), Request)
            read += 1
        except ModelyardError as error:
            if error.code == "invalid_type" or not any(reason in error.message for reason in REFUSALS):
                wrong.setdefault(f"{field}: {error.message}", body[field])
    assert not wrong
    assert read > 100


# --- nested fields ----------------------------------------------------------------------------------------------------

CACHING = {"cache_control", "prompt_cache_breakpoint"}  # what a client wants cached: the prefix of a prompt always is
ORIGIN = {"id", "status", "phase", "caller", "agent", "async", "toolset_name"}  # how the vendor's service made an item
# Our struct, the vendor's types that it reads, and their fields without effect.
NESTED: dict[str, tuple[type[msgspec.Struct], list[Any], set[str]]] = {
    "chat messages": (
        chat_body.ChatMessage,
        [*get_args(chat_types.ChatCompletionMessageParam)],
        {"audio"},  # an answer that was spoken
    ),
    "chat content": (
        chat_body.ChatContentPart,
        [*get_args(chat_types.ChatCompletionContentPartParam), chat_types.ChatCompletionContentPartRefusalParam],
        CACHING | {"file", "input_audio"},
    ),
    "chat calls": (chat_body.ChatToolCall, [*get_args(chat_types.ChatCompletionMessageToolCallUnionParam)], set()),
    "chat tools": (chat_body.ChatTool, [*get_args(chat_types.ChatCompletionToolUnionParam)], set()),
    "chat functions": (chat_body.FunctionDefinition, [shared_types.FunctionDefinition], set()),
    "chat tool choice": (
        chat_body.ChatToolChoice,
        [kind for kind in get_args(chat_types.ChatCompletionToolChoiceOptionParam) if is_typeddict(kind)],
        set(),
    ),
    "chat formats": (
        chat_body.ResponseFormat,
        [shared_types.ResponseFormatText, shared_types.ResponseFormatJSONObject, shared_types.ResponseFormatJSONSchema],
        set(),
    ),
    "chat stream options": (
        chat_body.StreamOptions,
        [chat_types.ChatCompletionStreamOptionsParam],
        {"include_obfuscation"},  # padding against listeners who count bytes
    ),
    "messages content": (
        messages_body.ContentBlock,
        [
            anthropic_types.TextBlockParam,
            anthropic_types.ImageBlockParam,
            anthropic_types.DocumentBlockParam,
            anthropic_types.SearchResultBlockParam,
            anthropic_types.ThinkingBlockParam,
            anthropic_types.RedactedThinkingBlockParam,
            anthropic_types.ToolUseBlockParam,
            anthropic_types.ToolResultBlockParam,
        ],
        CACHING | ORIGIN | {"citations", "transformations"},
    ),
    "messages tools": (
        messages_body.AnthropicTool,
        [anthropic_types.ToolParam],
        CACHING | {"allowed_callers", "eager_input_streaming", "input_examples"},
    ),
    "messages tool choice": (
        messages_body.AnthropicToolChoice,
        [*get_args(anthropic_types.ToolChoiceParam)],
        set(),
    ),
    "messages thinking": (messages_body.AnthropicThinking, [*get_args(anthropic_types.ThinkingConfigParam)], set()),
    "messages output": (messages_body.AnthropicOutputConfig, [anthropic_types.OutputConfigParam], {"task_budget"}),
    "responses items": (
        responses_body.InputItem,
        [
            responses_types.EasyInputMessageParam,
            responses_types.ResponseOutputMessageParam,
            responses_types.ResponseFunctionToolCallParam,
            responses_types.ResponseCustomToolCallParam,
            responses_types.ResponseCustomToolCallOutputParam,
            responses_types.ResponseReasoningItemParam,
        ],
        ORIGIN,
    ),
    "responses content": (
        responses_body.InputPart,
        [
            responses_types.ResponseInputTextParam,
            responses_types.ResponseInputImageParam,
            responses_types.ResponseInputFileParam,
            responses_types.ResponseOutputTextParam,
            responses_types.ResponseOutputRefusalParam,
        ],
        CACHING | {"annotations", "logprobs", "file_id", "file_data", "file_url", "filename"},
    ),
    "responses reasoning": (responses_body.ReasoningSettings, [shared_types.Reasoning], {"context", "mode"}),
    "responses text": (responses_body.TextSettings, [responses_types.ResponseTextConfigParam], set()),
    "responses format": (
        responses_body.TextFormat,
        [responses_types.ResponseFormatTextJSONSchemaConfigParam],
        set(),
    ),
}


@pytest.mark.parametrize("place", NESTED)
def test_each_nested_field_is_read_or_listed_as_without_effect(place: str) -> None:
    ours, theirs, ignored = NESTED[place]
    fields = set[str]().union(*(_hints(kind) for kind in theirs))
    assert fields - set(ours.__struct_fields__) <= ignored
