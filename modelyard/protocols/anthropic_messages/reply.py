"""Writes a whole Messages reply, token counts and model lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Raw

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Reply, Started, StopReason, Usage
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Request, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols.anthropic_messages import mcp
from modelyard.protocols.anthropic_messages.request import UNPARSED
from modelyard.protocols.common.json import encode, is_json_object
from modelyard.protocols.common.reasoning_signature import pack_reasoning

STOP_REASONS: Mapping[StopReason, str] = {
    "end": "end_turn",
    "tool_calls": "tool_use",
    "stop_string": "stop_sequence",
    "max_tokens": "max_tokens",
    "window": "model_context_window_exceeded",
    "content_filter": "refusal",
}
ID_PREFIX = "msg_"


def write_reply(replies: list[Reply], request: Request) -> bytes:
    """This protocol has one choice: the first reply.

    Incomplete calls are left out, because the client would run them. A reply without blocks is one empty text block.
    """
    reply = replies[0]
    hidden = hides_thinking(request)
    content = [_write_output(block.part, hidden) for block in reply.blocks if block.complete]
    message = write_message(reply.started, content or [{"type": "text", "text": ""}])
    message["stop_reason"] = STOP_REASONS[reply.finished.reason]
    message["stop_sequence"] = reply.finished.stop_string
    message["usage"] = write_usage(reply.finished.usage)
    return encode(message)


def write_message(started: Started, content: list[dict[str, Any]]) -> dict[str, Any]:
    """The message object before its end; the stream begins with it."""
    return {
        "id": ID_PREFIX + started.id,
        "type": "message",
        "role": "assistant",
        "model": started.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": write_usage(Usage(started.usage.prompt, started.usage.cached)),
    }


def hides_thinking(request: Request) -> bool:
    """The client wants thinking blocks without text; the text travels in the signature only."""
    return request.reasoning.summary == "omitted"


def _write_output(part: Text | Thinking | ToolCall | ToolResult, hidden: bool) -> dict[str, Any]:
    if isinstance(part, Thinking) and not part.redacted:
        text = "" if hidden else part.text
        return {"type": "thinking", "thinking": text, "signature": part.signature or pack_reasoning(part.text)}
    if isinstance(part, ToolResult):
        return mcp.result_block(part)
    if isinstance(part, ToolCall) and part.server is not None:
        return mcp.use_block(part.id, part.name, part.server, _write_input(part))
    return write_block(part)


def write_block(part: Text | Thinking | ToolCall) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _write_input(part)}
    if part.redacted:
        return {"type": "redacted_thinking", "data": part.signature}
    return {"type": "thinking", "thinking": part.text, "signature": part.signature}


def _write_input(call: ToolCall) -> Any:
    """The arguments as a JSON object, unchanged where they are one: re-serialising would break the KV prefix."""
    if call.custom:
        return {"input": call.arguments}
    text = call.arguments.strip()
    if is_json_object(text):
        return Raw(text.encode())
    return {UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}} if text else {}


def write_usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` counts only uncached tokens: clients add the three input counts."""
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


# --- token counts and models ----------------------------------------------------------------------------------------

_MAX_PAGE = 1000


def write_count(tokens: int) -> bytes:
    return encode({"input_tokens": tokens})


def write_model(card: ModelCard) -> bytes:
    return encode(_model(card))


def write_models(
    models: Sequence[ModelCard], *, limit: int | None = None, before_id: str | None = None, after_id: str | None = None
) -> bytes:
    """One page. Without a limit it holds all models: the list is short, and not every client turns pages."""
    if limit is not None and not 1 <= limit <= _MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {_MAX_PAGE}, got {limit}", param="limit")
    start = 0 if after_id is None else _index(models, after_id, "after_id") + 1
    end = len(models) if before_id is None else _index(models, before_id, "before_id")
    found, limit = models[start:end], limit or len(models)
    page = found[-limit:] if before_id is not None and after_id is None else found[:limit]
    return encode(
        {
            "data": [_model(card) for card in page],
            "has_more": len(page) < len(found),
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
    )


def _index(models: Sequence[ModelCard], id: str, param: str) -> int:
    for index, card in enumerate(models):
        if card.id == id:
            return index
    raise InvalidRequest(f"{param}: there is no model {id!r}", param=param)


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.display_name or card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.context,
        "max_tokens": card.max_output or card.context,
        "lifecycle": "active",
        "state": card.state,
        "aliases": card.aliases,
        "modalities": card.modalities,
    }
