"""Whole replies ⇄ Messages bodies, with the words this wire has for usage and stop reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelyard.core.errors import Incomplete, InvalidRequest
from modelyard.core.events import Block, Finished, Reply, Started, StopReason, Usage
from modelyard.core.request import Request, Text, Thinking, ToolCall
from modelyard.protocols.anthropic_messages.body import ReplyBody, UsageBody, reply_decoder
from modelyard.protocols.anthropic_messages.content import read_content
from modelyard.protocols.anthropic_messages.outgoing import write_part
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.reasoning_signature import pack_reasoning

STOP_REASONS: Mapping[StopReason, str] = {
    "end": "end_turn",
    "tool_calls": "tool_use",
    "stop_string": "stop_sequence",
    "max_tokens": "max_tokens",
    "window": "model_context_window_exceeded",
    "content_filter": "refusal",
}
_REASONS: Mapping[str, StopReason] = {word: reason for reason, word in STOP_REASONS.items()}
_PREFIX = "msg_"


def hides_thinking(request: Request) -> bool:
    """The client wants the blocks without their text: it travels in the signature alone."""
    return request.reasoning.summary == "omitted"


def message_id(started: Started) -> str:
    return _PREFIX + started.id


# --- writing --------------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    reply = replies[0]
    finished = reply.finished
    return encode(
        {
            "id": message_id(reply.started),
            "type": "message",
            "role": "assistant",
            "model": reply.started.model,
            "content": _content(reply, hides_thinking(request)),
            "stop_reason": STOP_REASONS[finished.reason],
            "stop_sequence": finished.stop_string,
            "usage": write_usage(finished.usage),
        }
    )


def _content(reply: Reply, hidden: bool) -> list[dict[str, Any]]:
    """Without calls that were cut off: whoever reads this would run them. An empty reply is one empty text."""
    blocks = [_block(block.part, hidden) for block in reply.blocks if block.complete]
    return blocks or [{"type": "text", "text": ""}]


def _block(part: Text | Thinking | ToolCall, hidden: bool) -> dict[str, Any]:
    if isinstance(part, Thinking) and not part.redacted:
        text = "" if hidden else part.text
        return {"type": "thinking", "thinking": text, "signature": part.signature or pack_reasoning(part.text)}
    return write_part(part)


def write_usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` is the uncached part only: clients add the three input counts up."""
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


# --- reading --------------------------------------------------------------------------------------------------------


def read_reply(body: bytes) -> Reply:
    try:
        told = decode(reply_decoder, body)
        parts = read_content(told.content, {})
    except InvalidRequest as error:
        raise Incomplete(f"the upstream's reply cannot be read: {error.message}") from None
    blocks = tuple(Block(part) for part in parts if isinstance(part, Text | Thinking | ToolCall))
    usage = read_usage(told.usage, Usage())
    finished = Finished(read_stop(told.stop_reason), usage, told.stop_sequence)
    return Reply(read_started(told, Usage(usage.prompt, usage.cached)), blocks, finished)


def read_started(told: ReplyBody, usage: Usage) -> Started:
    """This wire does not say when a message was made."""
    return Started(told.id.removeprefix(_PREFIX), told.model, 0, usage)


def read_stop(word: str | None) -> StopReason:
    return _REASONS.get(word or "", "end")


def read_usage(told: UsageBody, before: Usage) -> Usage:
    """Counts that this event leaves out are those of the event before it."""
    prompt, cached = before.prompt, before.cached
    if told.input_tokens is not None:
        cached = told.cache_read_input_tokens or 0
        prompt = told.input_tokens + cached + (told.cache_creation_input_tokens or 0)
    output = before.output if told.output_tokens is None else told.output_tokens
    thinking = (told.output_tokens_details or {}).get("thinking_tokens")
    return Usage(prompt, cached, output, thinking if isinstance(thinking, int) else before.reasoning)
