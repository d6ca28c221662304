"""A whole chat reply ⇄ its JSON body."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from modelyard.core.errors import Incomplete
from modelyard.core.events import Block, Finished, Reply, Started, StopReason, Usage
from modelyard.core.request import Request, Text, Thinking, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_errors import read_error_field
from modelyard.protocols.common.openai_fields import (
    FINGERPRINT,
    FINISH_REASONS,
    OpenAIUsage,
    read_usage,
    write_usage,
)
from modelyard.protocols.openai_chat.body import CallBody, CalledFunction
from modelyard.protocols.openai_chat.logprobs import LogprobsBody, read_logprobs, write_logprobs
from modelyard.protocols.openai_chat.messages import read_arguments, read_call, write_call

PREFIX = "chatcmpl-"


# Structs, not dictionaries: made and encoded in half the time.
class SentMessage(Struct, gc=False):
    """`content` is null only beside calls: an empty answer is an empty string."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    annotations: tuple[()] = ()


class SentChoice(Struct, gc=False):
    index: int
    message: SentMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | UnsetType = UNSET


class SentReply(Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[SentChoice]
    usage: OpenAIUsage
    system_fingerprint: str = FINGERPRINT


def write_reply(replies: list[Reply], request: Request) -> bytes:
    choices: list[SentChoice] = []
    usages: list[Usage] = []
    for reply in replies:
        choices.append(_choice(len(choices), reply, request))
        usages.append(reply.finished.usage)
    started, usage = replies[0].started, write_usage(usages[:1], usages)
    return encode(SentReply(PREFIX + started.id, "chat.completion", started.created, started.model, choices, usage))


def _choice(index: int, reply: Reply, request: Request) -> SentChoice:
    finished, logprobs = reply.finished, None
    if request.logprobs is not None:
        logprobs = write_logprobs(t for b in reply.blocks if isinstance(b.part, Text) for t in b.logprobs)
    stop = UNSET if finished.stop_string is None else finished.stop_string
    return SentChoice(index, _message(reply), logprobs, FINISH_REASONS[finished.reason], stop)


def _message(reply: Reply) -> SentMessage:
    blocks = reply.blocks
    if len(blocks) == 1 and type(part := blocks[0].part) is Text:  # nearly always
        return SentMessage("assistant", part.text)
    text, thinking, calls = reply.text, reply.thinking, reply.calls
    return SentMessage(
        "assistant",
        text if text or not calls else None,
        reasoning_content=thinking or UNSET,
        tool_calls=[write_call(call) for call in calls] or UNSET,
    )


# --- the client role ------------------------------------------------------------------------------------------------


class ReplyMessage(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[CallBody] | None = None
    function_call: CalledFunction | None = None


class ReplyChoice(Struct):
    index: int = 0
    message: ReplyMessage | None = None
    logprobs: LogprobsBody | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class ReplyBody(Struct):
    id: str | None = None
    created: float | None = None
    model: str | None = None
    choices: list[ReplyChoice] | None = None
    usage: OpenAIUsage | None = None
    error: Any = None


_REASONS: dict[str, StopReason] = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_decoder = msgspec.json.Decoder(ReplyBody)


def read_reason(finish: str | None, stop: object, has_calls: bool) -> tuple[StopReason, str | None]:
    """Many servers end a turn that has calls with a plain `stop`; some name the stop string beside it."""
    reason = _REASONS.get(finish or "", "end")
    if reason == "end" and isinstance(stop, str):
        return "stop_string", stop
    return ("tool_calls" if reason == "end" and has_calls else reason), None


def read_start(id: str | None, model: str | None, created: float | None) -> Started:
    return Started((id or "").removeprefix(PREFIX), model or "", int(created or 0))


def read_reply(body: bytes) -> Reply:
    """The first choice of an upstream's answer; what is no such answer raises."""
    try:
        told = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incomplete(f"the upstream's answer cannot be read: {error}") from None
    if told.error:
        raise read_error_field(told.error)
    choice = next((c for c in told.choices or () if c.index == 0), None)
    if choice is None or choice.message is None:
        raise Incomplete("the upstream's answer holds no message")
    started = read_start(told.id, told.model, told.created)
    blocks = tuple(_read_blocks(choice, choice.message, started.id))
    reason, stop = read_reason(
        choice.finish_reason, choice.stop_reason, any(isinstance(b.part, ToolCall) for b in blocks)
    )
    return Reply(started, blocks, Finished(reason, read_usage(told.usage), stop))


def _read_blocks(choice: ReplyChoice, message: ReplyMessage, id: str) -> list[Block]:
    reasoning = message.reasoning_content or message.reasoning
    blocks = [Block(Thinking(reasoning))] if isinstance(reasoning, str) and reasoning else []
    text, logprobs = message.content or message.refusal, read_logprobs(choice.logprobs)
    if text or logprobs:
        blocks.append(Block(Text(text or ""), logprobs))
    calls = (read_call(call, f"call_{id}_{i}") for i, call in enumerate(message.tool_calls or ()))
    blocks += [Block(call) for call in calls if call is not None]
    if old := message.function_call:
        blocks.append(Block(ToolCall(f"call_{id}", old.name, read_arguments(old.arguments))))
    return blocks
