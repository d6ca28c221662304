"""Fields that the OpenAI wires share: prompts, stop strings, counts, sessions, finish reasons and usage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import StopReason, Usage

FINGERPRINT = "fp_modelyard"
DONE = b"data: [DONE]\n\n"
MAX_ANSWERS = 128
MAX_STOPS = 128
MAX_PROMPTS = 2048
LOWEST_LOGPROB = -9999.0  # a token with no probability at all: JSON has no -inf, and OpenAI writes this number

FINISH_REASONS: Mapping[StopReason, str] = {
    "end": "stop",
    "tool_calls": "tool_calls",
    "stop_string": "stop",
    "max_tokens": "length",
    "window": "length",
    "content_filter": "content_filter",
}

Prompts = tuple[str | tuple[int, ...], ...]
PromptField = str | list[str | int | list[int]]


def require_model(model: str | None) -> str:
    if not model:
        raise InvalidRequest(
            "model is required: name one of those that GET /v1/models lists",
            param="model",
            code="missing_required_parameter",
        )
    return model


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must lie between {low} and {high}, got {value}", param=name)


def read_stop(stop: str | list[str] | None, warnings: list[str]) -> tuple[str, ...]:
    """The stop strings. An empty one would end every answer before it began, so it is left out with a warning."""
    if not stop:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop holds {len(stop)} strings; at most {MAX_STOPS} are allowed", param="stop")
    if "" in stop:
        warnings.append("empty_stop_string_dropped")
    return tuple(s for s in stop if s)


def read_session(headers: Mapping[str, str], cache_key: str | None) -> str | None:
    named = headers.get("x-session-id") or headers.get("x-session-affinity") or headers.get("session-id")
    return named or cache_key or None


def read_prompts(value: PromptField | None, param: str) -> Prompts:
    """One text, several texts, one list of token ids or several such lists."""
    if value is None:
        raise InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    if isinstance(value, str):
        return (value,)
    if not value:
        raise InvalidRequest(f"{param} must not be an empty list", param=param)
    if isinstance(value[0], int):
        return (_read_ids(value, param),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{param} holds {len(value)} entries; at most {MAX_PROMPTS} are allowed", param=param)
    return tuple(_read_prompt(item, f"{param}[{i}]") for i, item in enumerate(value))


def _read_prompt(item: str | int | list[int], where: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, int):
        raise InvalidRequest(f"{where}: a token id stands among texts; send one kind only", param=where)
    if not item:
        raise InvalidRequest(f"{where} is an empty list of token ids", param=where)
    return _read_ids(item, where)


def _read_ids(ids: Sequence[Any], where: str) -> tuple[int, ...]:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(f"{where}: {token!r} is not a token id", param=where)
    return tuple(ids)


# --- usage ----------------------------------------------------------------------------------------------------------


class PromptDetails(Struct):
    cached_tokens: int | None = None


class CompletionDetails(Struct):
    reasoning_tokens: int | None = None


class UpstreamUsage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class SentPromptDetails(Struct, gc=False):
    cached_tokens: int


class SentCompletionDetails(Struct, gc=False):
    reasoning_tokens: int


class OpenAIUsage(Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: SentPromptDetails
    completion_tokens_details: SentCompletionDetails


def write_usage(prompts: Sequence[Usage], answers: Sequence[Usage]) -> OpenAIUsage:
    """`prompts` holds one usage a prompt, however many answers it had; `answers` one an answer."""
    is_one = len(prompts) == len(answers) == 1 and prompts[0] is answers[0]
    usage = answers[0] if is_one else _added(prompts, answers)
    return OpenAIUsage(
        usage.prompt,
        usage.output,
        usage.prompt + usage.output,
        SentPromptDetails(usage.cached),
        SentCompletionDetails(usage.reasoning),
    )


def _added(prompts: Iterable[Usage], answers: Iterable[Usage]) -> Usage:
    prompt = cached = output = reasoning = 0
    for usage in prompts:
        prompt, cached = prompt + usage.prompt, cached + usage.cached
    for usage in answers:
        output, reasoning = output + usage.output, reasoning + usage.reasoning
    return Usage(prompt, cached, output, reasoning)


def read_usage(body: UpstreamUsage | None) -> Usage:
    if body is None:
        return Usage()
    cached, reasoning = body.prompt_tokens_details, body.completion_tokens_details
    return Usage(
        body.prompt_tokens or 0,
        (cached.cached_tokens or 0) if cached else 0,
        body.completion_tokens or 0,
        (reasoning.reasoning_tokens or 0) if reasoning else 0,
    )
