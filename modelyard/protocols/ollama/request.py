"""Reads the body of `/api/chat` into a core request. A body without messages only loads or unloads the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Message, Part, Request, Role, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard.protocols.common.call_arguments import CallNumbers, read_arguments
from modelyard.protocols.common.extensions import read_constraint, read_priority
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.openai_fields import read_session, read_stop, require_model
from modelyard.protocols.ollama.fields import (
    Images,
    OllamaBody,
    read_format,
    read_images,
    read_keep_alive,
    read_logprobs,
    read_options,
    read_think,
)


class OllamaFunctionCall(Struct):
    name: limits.Name = ""
    arguments: Raw = field(default_factory=Raw)


class OllamaToolCall(Struct):
    id: limits.Id | None = None
    function: OllamaFunctionCall = field(default_factory=OllamaFunctionCall)


class OllamaMessage(Struct, gc=False):
    role: limits.Word
    content: limits.Text | None = None
    thinking: limits.Text | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], limits.Calls] | None = None
    tool_name: limits.Name | None = None
    name: limits.Name | None = None
    tool_call_id: limits.Id | None = None


class OllamaFunction(Struct):
    name: limits.Name
    description: limits.Text | None = None
    parameters: limits.JsonObject | None = None


class OllamaTool(Struct):
    type: limits.Word = "function"
    function: OllamaFunction | None = None


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[OllamaMessage], limits.Messages] | None = None
    tools: Annotated[list[OllamaTool], limits.Tools] | None = None


_decoder = msgspec.json.Decoder(OllamaChatBody)
_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    parsed = decode(_decoder, body)
    return replace(
        read_common(parsed, headers),
        messages=_read_messages(parsed.messages or []),
        load_only=not parsed.messages,
        tools=tuple(_read_tool(tool, at) for at, tool in enumerate(parsed.tools or ())),
        documents=parsed.documents or (),
    )


def read_common(body: OllamaBody, headers: Mapping[str, str]) -> Request:
    """What `/api/chat` and `/api/generate` share: everything but the conversation."""
    warnings: list[str] = []
    sampling, limit, options = read_options(body, warnings)
    return Request(
        model=require_model(body.model),
        sampling=sampling,
        max_tokens=limit,
        stop=read_stop(options.stop, warnings),
        logprobs=read_logprobs(body),
        constraint=read_constraint(body, ("format", read_format(body.format))),
        reasoning=read_think(body.think),
        stream=body.stream is not False,
        keep_alive=read_keep_alive(body.keep_alive),
        lora_adapter=body.lora_adapter,
        chat_template_kwargs=body.chat_template_kwargs or {},
        priority=read_priority(body),
        session=read_session(headers, None),
        warnings=tuple(warnings),
    )


def _read_tool(tool: OllamaTool, at: int) -> Tool:
    if tool.function is None:
        raise InvalidRequest(f"tools[{at}].function is required", param=f"tools[{at}].function")
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})


def _read_messages(messages: list[OllamaMessage]) -> tuple[Message, ...]:
    """Neighbouring tool results become one message. Few clients send ids of calls: see `CallNumbers`."""
    found: list[Message] = []
    results: list[ToolResult] = []
    numbers = CallNumbers()
    for at, message in enumerate(messages):
        if message.role == "tool":
            call_id = numbers.result(message.tool_name or message.name or "", message.tool_call_id)
            results.append(ToolResult(call_id, (*_text(message.content), *read_images(message.images))))
            continue
        if results:
            found.append(Message("tool", tuple(results)))
            results = []
        if (role := _ROLES.get(message.role)) is None:
            path = f"messages[{at}].role"
            raise InvalidRequest(
                f"{path}: unknown role {message.role!r}; the roles are {', '.join(_ROLES)}, tool", param=path
            )
        found.append(Message(role, _read_parts(message, numbers)))
    if results:
        found.append(Message("tool", tuple(results)))
    return tuple(found)


def _read_parts(message: OllamaMessage, numbers: CallNumbers) -> tuple[Part, ...]:
    thinking: tuple[Part, ...] = (Thinking(message.thinking),) if message.thinking else ()
    calls = tuple(
        ToolCall(numbers.call(call.function.name, call.id), call.function.name, read_arguments(call.function.arguments))
        for call in message.tool_calls or ()
    )
    return (*thinking, *_text(message.content), *read_images(message.images), *calls)


def _text(content: str | None) -> tuple[Text, ...]:
    return (Text(content),) if content else ()
