"""The Responses request written: a core Request to a body for an upstream, and messages to input items."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec

from modelyard.core.request import (
    Constraint,
    Image,
    Message,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.common.extensions import write_extensions
from modelyard.protocols.common.json import encode
from modelyard.protocols.openai_responses.items import join_turns, read_thinking
from modelyard.protocols.openai_responses.request import ENCRYPTED, LOGPROBS
from modelyard.protocols.openai_responses.tools import write_choice, write_tools

Wire = dict[str, Any]
_EXTENSION_OF = {"gbnf": "grammar", "regex": "regex", "lark": "lark"}


def write_request(request: Request) -> bytes:
    instructions, messages = split_instructions(request)
    include = [ENCRYPTED] * request.encrypted_reasoning + [LOGPROBS] * (request.logprobs is not None)
    out: Wire = {
        "model": request.model,
        "instructions": instructions,
        "input": list(write_items(messages)),
        "tools": write_tools(request.tools) or None,
        "tool_choice": write_choice(request.tool_choice, request.tools) if request.tool_choice.mode != "auto" else None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_output_tokens": request.max_tokens,
        "stop": request.stop or None,
        "text": _write_text(request.constraint),
        "reasoning": _write_reasoning(request.reasoning),
        "include": include or None,
        "top_logprobs": request.logprobs,
        "stream": request.stream or None,
        "store": request.store,
        "previous_response_id": request.previous,
        "prompt_cache_key": request.session,
        "metadata": request.metadata,
        "user": request.user,
    }
    written = {name: value for name, value in out.items() if value is not None}
    return encode(written | _write_grammar(request.constraint) | write_extensions(request))


def split_instructions(request: Request) -> tuple[str | None, tuple[Message, ...]]:
    """The text that came as `instructions`, and the messages without it."""
    if request.instructions and request.messages:
        match request.messages[0]:
            case Message(role="system", parts=(Text(text=text),)):
                return text, request.messages[1:]
    return None, request.messages


def write_format(constraint: Constraint | None) -> Wire:
    """`text.format`; a name is required upstream, so a nameless schema gets one."""
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return {"type": "text"}
    if constraint.kind == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "name": constraint.name or "answer",
        "description": constraint.description,
        "schema": msgspec.json.decode(constraint.text),
        "strict": constraint.strict,
    }


def _write_text(constraint: Constraint | None) -> Wire | None:
    is_json = constraint is not None and constraint.kind in ("json_object", "json_schema")
    return {"format": write_format(constraint)} if is_json else None


def _write_grammar(constraint: Constraint | None) -> Wire:
    if constraint is None or constraint.kind not in _EXTENSION_OF:
        return {}
    return {_EXTENSION_OF[constraint.kind]: constraint.text}


def _write_reasoning(reasoning: Reasoning) -> Wire | None:
    effort = reasoning.effort or ("none" if reasoning.enabled is False else None)
    out = {name: value for name, value in (("effort", effort), ("summary", reasoning.summary)) if value is not None}
    return out or None


# --- messages to items ----------------------------------------------------------------------------------------------


def write_items(messages: tuple[Message, ...]) -> Iterator[Wire]:
    for message in join_turns((message.role, message.parts) for message in messages):
        if not message.parts:
            yield _write_message(message.role, ())
        for is_content, parts in groupby(message.parts, key=_is_content):
            if is_content:
                yield _write_message(message.role, tuple(parts))
            else:
                yield from map(_write_part, parts)


def _is_content(part: Part) -> bool:
    return isinstance(part, Text | Image | ToolReference)


def _write_message(role: str, parts: tuple[Part, ...]) -> Wire:
    text_type = "output_text" if role == "assistant" else "input_text"
    spoken = "user" if role == "tool" else role  # only results have a place of their own here
    return {"type": "message", "role": spoken, "content": [_write_content(part, text_type) for part in parts]}


def _write_content(part: Part, text_type: str) -> Wire:
    if isinstance(part, Image):
        out: Wire = {"type": "input_image", "image_url": part.url}
        return out if part.detail is None else out | {"detail": part.detail}
    if isinstance(part, ToolReference):
        return {"type": text_type, "text": part.name}
    return {"type": text_type, "text": part.text if isinstance(part, Text) else ""}


def _write_part(part: Part) -> Wire:
    if isinstance(part, ToolCall):
        return _write_call(part)
    if isinstance(part, ToolResult):
        return _write_result(part)
    return _write_thinking(part) if isinstance(part, Thinking) else _write_message("user", (part,))


def _write_thinking(part: Thinking) -> Wire:
    out: Wire = {"type": "reasoning", "summary": []}
    text = read_thinking(part.signature, part.text).text
    if text:
        out["content"] = [{"type": "reasoning_text", "text": text}]
    return out | {"encrypted_content": part.signature} if part.signature else out


def _write_call(call: ToolCall) -> Wire:
    named: Wire = {"call_id": call.id, "name": call.name}
    if call.namespace is not None:
        named["namespace"] = call.namespace
    if call.custom:
        return {"type": "custom_tool_call"} | named | {"input": call.arguments}
    return {"type": "function_call"} | named | {"arguments": call.arguments}


def _write_result(result: ToolResult) -> Wire:
    kind = "custom_tool_call_output" if result.custom else "function_call_output"
    content = [_write_content(part, "input_text") for part in result.content]
    is_plain = len(content) == 1 and content[0]["type"] == "input_text"
    output: str | list[Wire] = content[0]["text"] if is_plain else content
    return {"type": kind, "call_id": result.call_id, "output": output}
