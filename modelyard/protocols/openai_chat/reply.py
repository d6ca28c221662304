"""Writes a whole chat reply, and OpenAI's list of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from modelyard.core.events import Reply, TokenLogprob
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Request, Text, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.llama_reply import write_timings
from modelyard.protocols.common.openai_fields import (
    FINGERPRINT,
    FINISH_REASONS,
    MIN_LOGPROB,
    OpenAIUsage,
    PromptLogprobs,
    write_prompt_logprobs,
    write_usage,
)

ID_PREFIX = "chatcmpl-"


# Structs, not dictionaries: they are built and encoded in half the time.
class CompletionMessage(Struct, gc=False):
    """`content` is null only beside calls: an empty answer is an empty string."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    annotations: tuple[()] = ()


class CompletionChoice(Struct, gc=False):
    index: int
    message: CompletionMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | UnsetType = UNSET


class ChatCompletion(Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage
    system_fingerprint: str = FINGERPRINT
    timings: dict[str, Any] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


def write_reply(replies: list[Reply], request: Request) -> bytes:
    started = replies[0].started
    choices = [_write_choice(index, reply, request) for index, reply in enumerate(replies)]
    usages = [reply.finished.usage for reply in replies]
    usage = write_usage(usages[:1], usages)
    whole = ChatCompletion(ID_PREFIX + started.id, "chat.completion", started.created, started.model, choices, usage)
    if request.timings is not None:
        whole.timings = write_timings(usages[0], replies[0].finished.timings)
    if request.prompt_logprobs is not None:
        whole.prompt_logprobs = write_prompt_logprobs(started.prompt_logprobs, request.prompt_logprobs)
    return encode(whole)


THINK, THINK_END = "<think>\n", "\n</think>\n\n"  # around the reasoning in a text


def _write_choice(index: int, reply: Reply, request: Request) -> CompletionChoice:
    finished, (text, thinking, calls) = reply.finished, reply.contents()
    if thinking and (where := request.reasoning.in_text) is not None:
        text, thinking = f"{THINK}{thinking}{THINK_END}{text}", thinking if where == "too" else ""
    message = CompletionMessage(
        "assistant",
        text if text or not calls else None,
        reasoning_content=thinking or UNSET,
        reasoning=(request.reasoning.both_names and thinking) or UNSET,
        tool_calls=[write_call(call) for call in calls] if calls else UNSET,
    )
    logprobs = None
    if request.logprobs is not None:
        logprobs = write_logprobs(t for b in reply.blocks if isinstance(b.part, Text) for t in b.logprobs)
    stop = UNSET if finished.stop_string is None else finished.stop_string
    return CompletionChoice(index, message, logprobs, FINISH_REASONS[finished.reason], stop)


def write_call(call: ToolCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def write_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [_write_logprob(t) | {"top_logprobs": [_write_logprob(other) for other in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def _write_logprob(token: TokenLogprob) -> dict[str, Any]:
    logprob = max(token.logprob, MIN_LOGPROB)
    return {"token": token.token, "logprob": logprob, "bytes": list(token.bytes) if token.bytes else None}


# --- models ---------------------------------------------------------------------------------------------------------


def write_models(cards: Iterable[ModelCard]) -> bytes:
    return encode({"object": "list", "data": [_model(card) for card in cards]})


def write_model(card: ModelCard) -> bytes:
    return encode(_model(card))


def _model(card: ModelCard) -> dict[str, Any]:
    """OpenAI's fields, plus the context length, the state and what the model can do."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "name": card.display_name or card.id,
        "context_length": card.context,
        "max_model_len": card.context,
        "max_output_tokens": card.max_output,
        "state": card.state,
        "aliases": card.aliases,
        "modalities": card.modalities,
        "capabilities": card.capabilities,
    }
