"""Fields that the OpenAI protocols share: prompts, stop strings, sessions, finish reasons, usage, metadata, pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.events import StopReason, TokenLogprob, Usage
from modelyard.core.request import DEFAULT_MODEL as DEFAULT_MODEL
from modelyard.protocols.common.extensions import ExtensionFields
from modelyard.protocols.common.json import JsonObject, encode

FINGERPRINT = "fp_modelyard"
DONE = b"data: [DONE]\n\n"
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048
MIN_LOGPROB = -9999.0  # for a probability of zero: JSON has no -inf, and OpenAI writes this number

FINISH_REASONS: Mapping[StopReason, str] = {
    "end": "stop",
    "tool_calls": "tool_calls",
    "stop_string": "stop",
    "max_tokens": "length",
    "window": "length",
    "repetition": "length",
    "content_filter": "content_filter",
    "compaction": "stop",
}

Prompts = tuple[str | tuple[int, ...], ...]
PromptField = limits.Text | limits.Prompts


class StreamOptions(Struct):
    include_usage: bool | None = None


class ServerFields(ExtensionFields):
    """Fields of other servers for Chat and Completions: vLLM's `prompt_logprobs`, and llama-server's times."""

    prompt_logprobs: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None


def read_timings(body: ServerFields) -> Literal["last", "all"] | None:
    if body.timings_per_token:
        return "all"
    return "last" if body.return_progress or body.timings_per_token is not None else None


def read_prompt_logprobs(body: ServerFields, stream: bool) -> int | None:
    check_range("prompt_logprobs", body.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    if body.prompt_logprobs is not None and stream:
        raise InvalidRequest("prompt_logprobs come with a whole reply: send stream: false", param="prompt_logprobs")
    return body.prompt_logprobs


def require_model(model: str | None) -> str:
    """Clients of Ollama, Infer Server and the pool always name it."""
    if not model:
        raise InvalidRequest(
            "model is required: send one of the names that GET /v1/models lists",
            param="model",
            code="missing_required_parameter",
        )
    return model


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param=name)


def read_stop(stop: str | list[str] | None, warnings: list[str]) -> tuple[str, ...]:
    """The stop strings. An empty one would end every answer at once; it is dropped with a warning."""
    if not stop:
        return ()
    if isinstance(stop, str):
        return (stop,)
    limits.check_stop_strings("stop", stop)
    if "" in stop:
        warnings.append("empty_stop_string_dropped")
    return tuple(s for s in stop if s)


def read_session(headers: Mapping[str, str], cache_key: str | None) -> str | None:
    header = headers.get("x-session-id") or headers.get("x-session-affinity") or headers.get("session-id")
    return header or cache_key or None


def read_prompts(value: PromptField | None, param: str) -> Prompts:
    """A text, several texts, a list of token ids or several such lists."""
    if value is None:
        raise InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    if isinstance(value, str):
        return (value,)
    if not value:
        raise InvalidRequest(f"{param} must not be an empty list", param=param)
    if isinstance(value[0], int):
        return (_read_token_ids(value, param),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{param} has {len(value)} entries; at most {MAX_PROMPTS} are allowed", param=param)
    return tuple(_read_prompt(item, f"{param}[{i}]") for i, item in enumerate(value))


def _read_prompt(item: str | int | list[int], path: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, int):
        raise InvalidRequest(f"{path} is a token id in a list of texts; send one kind only", param=path)
    if not item:
        raise InvalidRequest(f"{path} is an empty list of token ids", param=path)
    return _read_token_ids(item, path)


def _read_token_ids(ids: Sequence[Any], path: str) -> tuple[int, ...]:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(f"{path}: {token!r} is not a token id", param=path)
    return tuple(ids)


# --- usage ----------------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct, gc=False):
    cached_tokens: int | None = None


class CompletionTokensDetails(Struct, gc=False):
    reasoning_tokens: int | None = None


class OpenAIUsage(Struct, gc=False):
    """Written with every field; every field is optional when read from an upstream."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def write_usage(prompts: Sequence[Usage], answers: Sequence[Usage]) -> OpenAIUsage:
    """`prompts` has one usage per prompt, `answers` one per answer: answers to one prompt share its tokens."""
    prompt = cached = output = reasoning = 0
    for usage in prompts:
        prompt, cached = prompt + usage.prompt, cached + usage.cached
    for usage in answers:
        output, reasoning = output + usage.output, reasoning + usage.reasoning
    return OpenAIUsage(prompt, output, prompt + output, PromptTokensDetails(cached), CompletionTokensDetails(reasoning))


def read_usage(body: OpenAIUsage | None) -> Usage:
    if body is None:
        return Usage()
    prompt, completion = body.prompt_tokens_details, body.completion_tokens_details
    return Usage(
        body.prompt_tokens or 0,
        (prompt and prompt.cached_tokens) or 0,
        body.completion_tokens or 0,
        (completion and completion.reasoning_tokens) or 0,
    )


# --- prompt_logprobs --------------------------------------------------------------------------------------------------

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


def write_prompt_logprobs(tokens: Sequence[TokenLogprob], top: int) -> PromptLogprobs:
    """vLLM's form: for each token an object with its own id and those of the most likely ones; null for the first."""
    return [None if isnan(token.logprob) else _write_candidates(token, token.top[:top]) for token in tokens]


def _write_candidates(token: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, dict[str, Any]]:
    ranks = {other.id: rank for rank, other in enumerate(top, 1)}
    return {
        str(other.id): {
            "logprob": max(other.logprob, MIN_LOGPROB),
            "rank": ranks.get(other.id, other.rank),
            "decoded_token": other.token,
        }
        for other in (token, *top)
    }


def read_upstream_prompt(found: PromptLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Of another server's reply."""
    return tuple(_read_candidates(candidates) for candidates in found or ())


def _read_candidates(candidates: Mapping[str, Mapping[str, Any]] | None) -> TokenLogprob:
    """The first one is the token itself. If it is not among the most likely, its rank is higher than their number."""
    if not candidates:
        return TokenLogprob("", nan)
    tokens = [
        TokenLogprob(str(found.get("decoded_token") or ""), float(found["logprob"]), id=int(id), rank=found.get("rank"))
        for id, found in candidates.items()
    ]
    ranked = sorted((token for token in tokens if token.rank is not None), key=lambda token: token.rank or 0)
    return replace(tokens[0], top=tuple(token for token in ranked if (token.rank or 0) <= len(tokens)))


# --- metadata and lists -----------------------------------------------------------------------------------------------

_MAX_PAIRS = 16
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = dict[MetadataKey, MetadataValue]


class PageQuery(Struct, frozen=True):
    """Which page of a list: `limit` objects after the object `after`."""

    after: str
    limit: int
    newest_first: bool


def read_page_query(query: Mapping[str, str], *, default: int = 20, most: int = 100, order: str = "desc") -> PageQuery:
    limit, order = query.get("limit", ""), query.get("order", order)
    if limit and not (limit.isdecimal() and 1 <= int(limit[:9]) <= most):
        raise InvalidRequest(f"limit must be a number from 1 to {most}, not {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order[:40]!r}", param="order")
    return PageQuery(query.get("after", ""), int(limit or default), order == "desc")


def write_page(items: Sequence[JsonObject | Raw], ids: Sequence[str], has_more: bool) -> bytes:
    """`ids` are those of the items. The SDKs ask for the page after the last one."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return encode({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more})


def check_metadata(metadata: Metadata | None) -> Metadata:
    if metadata is not None and len(metadata) > _MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs; the most are {_MAX_PAIRS}", param="metadata")
    return metadata or {}


def field_of(body: bytes, name: str) -> Raw | None:
    """One field of a JSON object that this server has written."""
    found = msgspec.json.decode(body, type=dict[str, Raw]).get(name)
    return None if found is None else Raw(bytes(found))
