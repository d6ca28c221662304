"""A core request as a Messages body, for upstreams that speak this wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from modelyard.core.request import (
    Constraint,
    Image,
    Message,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolReference,
)
from modelyard.protocols.anthropic_messages.content import FILE_ID, UNPARSED, says_something
from modelyard.protocols.common.extensions import write_extensions
from modelyard.protocols.common.json import dumps, encode

_DISPLAYS = frozenset({"omitted", "summarized", "updates"})
_EFFORTS = {"minimal": "low", "none": None}  # words of other wires
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_GRAMMARS = {"gbnf": "grammar", "regex": "regex", "lark": "lark"}


def write_request(request: Request) -> bytes:
    head, rest = _split_head(request.messages)
    body: dict[str, Any] = {"model": request.model, "messages": [_message(message) for message in rest]}
    body |= _present(
        max_tokens=request.max_tokens,
        system=_content(head.parts) if head else None,
        tools=[_tool(tool) for tool in request.tools] or None,
        tool_choice=_tool_choice(request),
        thinking=_thinking(request.reasoning),
        output_config=_output_config(request),
        stop_sequences=request.stop or None,
        metadata=_metadata(request),
        stream=request.stream or None,
    )
    return encode(body | write_extensions(request) | _grammar(request.constraint))


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _split_head(messages: tuple[Message, ...]) -> tuple[Message | None, tuple[Message, ...]]:
    """The leading system message goes into `system`; one without content has nothing to say there."""
    for place, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return None, messages[place:]
        if says_something(message.parts):
            return message, messages[place + 1 :]
    return None, ()


def _message(message: Message) -> dict[str, Any]:
    role = {"tool": "user", "developer": "system"}.get(message.role, message.role)
    return {"role": role, "content": _content(message.parts)}


# --- content --------------------------------------------------------------------------------------------------------


def _content(parts: Iterable[Part]) -> str | list[dict[str, Any]]:
    blocks = [write_part(part) for part in parts]
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        text: str = blocks[0]["text"]
        return text
    return blocks


def write_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Image):
        return {"type": "image", "source": _source(part.url)}
    if isinstance(part, Thinking):
        return _write_thinking(part)
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": write_input(part)}
    if isinstance(part, ToolReference):
        return {"type": "tool_reference", "tool_name": part.name}
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": part.call_id}
    if part.content:
        block["content"] = _content(part.content)
    return block | {"is_error": True} if part.is_error else block


def _source(url: str) -> dict[str, str]:
    if url.startswith("data:") and ";base64," in url:
        media, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "base64", "media_type": media, "data": data}
    if url.startswith(FILE_ID):
        return {"type": "file", "file_id": url.removeprefix(FILE_ID)}
    return {"type": "url", "url": url}


def _write_thinking(part: Thinking) -> dict[str, Any]:
    if part.redacted:
        return {"type": "redacted_thinking", "data": part.signature}
    return {"type": "thinking", "thinking": part.text, "signature": part.signature}


def write_input(call: ToolCall) -> Any:
    """The arguments as a JSON object, untouched where they are one: a re-serialised call would lose the prefix."""
    if call.custom:
        return {"input": call.arguments}
    text = call.arguments.strip()
    if is_object(text):
        return Raw(text.encode())
    return {UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}} if text else {}


def is_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


# --- the rest -------------------------------------------------------------------------------------------------------


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "server":
        body: dict[str, Any] = {"type": tool.type, "name": tool.name} | tool.parameters
    else:
        schema = _FREE_TEXT if tool.kind == "custom" else tool.parameters or {"type": "object"}
        body = {"name": tool.name} | _present(description=tool.description or None, strict=tool.strict)
        body["input_schema"] = schema
    return body | {"defer_loading": True} if tool.deferred else body


def _tool_choice(request: Request) -> dict[str, Any] | None:
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    if choice.mode == "none":
        return {"type": "none"}
    if choice.mode == "auto" and parallel is None:
        return None
    body: dict[str, Any] = {"type": {"required": "any", "named": "tool"}.get(choice.mode, choice.mode)}
    if choice.mode == "named":
        body["name"] = choice.name
    return body if parallel is None else body | {"disable_parallel_tool_use": not parallel}


def _thinking(reasoning: Reasoning) -> dict[str, Any] | None:
    if reasoning.enabled is None:
        return None
    if not reasoning.enabled:
        return {"type": "disabled"}
    display = reasoning.summary if reasoning.summary in _DISPLAYS else None
    kind = "adaptive" if reasoning.budget is None else "enabled"
    return {"type": kind} | _present(budget_tokens=reasoning.budget, display=display)


def _output_config(request: Request) -> dict[str, Any] | None:
    effort = request.reasoning.effort
    return _present(effort=_EFFORTS.get(effort, effort) if effort else None, format=_format(request.constraint)) or None


def _format(constraint: Constraint | None) -> dict[str, Any] | None:
    if constraint is None or constraint.kind not in ("json_schema", "json_object"):
        return None
    schema = constraint.text if constraint.kind == "json_schema" and constraint.text else dumps({"type": "object"})
    return {"type": "json_schema", "schema": Raw(schema.encode())}


def _grammar(constraint: Constraint | None) -> dict[str, str]:
    field = _GRAMMARS.get(constraint.kind) if constraint else None
    return {field: constraint.text} if constraint and field else {}


def _metadata(request: Request) -> dict[str, Any] | None:
    if request.user is None:
        return request.metadata
    return {**(request.metadata or {}), "user_id": request.user}
