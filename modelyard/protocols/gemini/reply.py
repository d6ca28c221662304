"""Writes a whole `generateContent` reply, token counts and model lists."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Reply, Started, StopReason, TokenLogprob, Usage
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Request, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols.common.call_arguments import write_arguments
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_fields import MIN_LOGPROB
from modelyard.protocols.common.reasoning_signature import pack_reasoning

FINISH_REASONS: Mapping[StopReason, str] = {
    "end": "STOP",
    "tool_calls": "STOP",
    "stop_string": "STOP",
    "max_tokens": "MAX_TOKENS",
    "window": "MAX_TOKENS",
    "content_filter": "SAFETY",
}


def write_reply(replies: list[Reply], request: Request) -> bytes:
    started, usages = replies[0].started, [reply.finished.usage for reply in replies]
    candidates = [_write_candidate(reply, at, request) for at, reply in enumerate(replies)]
    return encode({"candidates": candidates, "usageMetadata": write_usage(usages)} | write_ids(started))


def _write_candidate(reply: Reply, index: int, request: Request) -> dict[str, Any]:
    """Incomplete calls are left out, because the client would run them."""
    parts: list[dict[str, Any]] = []
    signature, hidden = "", hides_thoughts(request)
    for block in reply.blocks:
        if not block.complete or isinstance(block.part, ToolResult):
            continue
        if isinstance(block.part, Thinking):
            signature = write_signature(block.part)
            if not hidden:
                parts.append({"text": block.part.text, "thought": True})
            continue
        parts.append(write_part(block.part) | ({"thoughtSignature": signature} if signature else {}))
        signature = ""
    candidate: dict[str, Any] = {
        "content": {"parts": parts or [{"text": ""}], "role": "model"},
        "finishReason": FINISH_REASONS[reply.finished.reason],
        "index": index,
    }
    if request.logprobs is not None:
        tokens = [token for block in reply.blocks if isinstance(block.part, Text) for token in block.logprobs]
        candidate["logprobsResult"] = write_logprobs(tokens)
        candidate["avgLogprobs"] = sum(token.logprob for token in tokens) / max(1, len(tokens))
    return candidate


def hides_thoughts(request: Request) -> bool:
    return request.reasoning.summary == "omitted"


def write_signature(part: Thinking) -> str:
    """Base64, as the SDKs expect. A foreign signature, from an upstream, is base64 already."""
    return part.signature or base64.b64encode(pack_reasoning(part.text).encode()).decode()


def write_part(part: Text | ToolCall) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"text": part.text}
    return {"functionCall": {"id": part.id, "name": part.name, "args": write_arguments(part.arguments)}}


def write_ids(started: Started) -> dict[str, Any]:
    return {"modelVersion": started.model, "responseId": started.id}


def write_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Candidates share their prompt. The thoughts are not part of the candidates' tokens."""
    prompt, cached = usages[0].prompt, usages[0].cached
    output, thoughts = sum(usage.output for usage in usages), sum(usage.reasoning for usage in usages)
    counts = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": output - thoughts,
        "totalTokenCount": prompt + output,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
    }
    return counts | {
        name: value for name, value in (("cachedContentTokenCount", cached), ("thoughtsTokenCount", thoughts)) if value
    }


def write_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "topCandidates": [{"candidates": [_write_logprob(other) for other in token.top]} for token in tokens],
        "chosenCandidates": [_write_logprob(token) for token in tokens],
    }


def _write_logprob(token: TokenLogprob) -> dict[str, Any]:
    written: dict[str, Any] = {"token": token.token, "logProbability": max(token.logprob, MIN_LOGPROB)}
    return written if token.id is None else written | {"tokenId": token.id}


# --- counts and models ------------------------------------------------------------------------------------

_METHODS = ("generateContent", "streamGenerateContent", "countTokens", "embedContent", "batchEmbedContents")
_MAX_PAGE = 1000


def write_count(tokens: int) -> bytes:
    return encode({"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]})


def write_models(cards: Sequence[ModelCard], page_size: str | None = None, page_token: str | None = None) -> bytes:
    """One page. Without a size it holds all models; a token is the place of the next one."""
    start, size = _number("pageToken", page_token, 0), _number("pageSize", page_size, len(cards)) or len(cards)
    page = cards[start : start + min(size, _MAX_PAGE)]
    following = {"nextPageToken": str(start + len(page))} if start + len(page) < len(cards) else {}
    return encode({"models": [_model(card) for card in page]} | following)


def _number(param: str, text: str | None, default: int) -> int:
    if not text:
        return default
    if not text.isdecimal() or len(text) > 6:
        raise InvalidRequest(f"{param} must be a whole number, got {text[:40]!r}", param=param)
    return int(text)


def write_model(card: ModelCard) -> bytes:
    return encode(_model(card))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "name": f"models/{card.id}",
        "baseModelId": card.id,
        "version": "001",
        "displayName": card.display_name or card.id,
        "description": f"{card.owned_by}, {card.state}",
        "inputTokenLimit": card.context or 0,
        "outputTokenLimit": card.max_output or card.context or 0,
        "supportedGenerationMethods": _METHODS,
    }
