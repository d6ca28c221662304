"""Writes replies of `generateContent`, whole and as a stream of partial replies, token counts and model lists.

A stream is server-sent events, or the elements of one JSON array.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    TokenLogprob,
    Usage,
)
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Request, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols.common.call_arguments import write_arguments
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_fields import MIN_LOGPROB
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.gemini.errors import error_body

FINISH_REASONS: Mapping[StopReason, str] = {
    "end": "STOP",
    "tool_calls": "STOP",
    "stop_string": "STOP",
    "max_tokens": "MAX_TOKENS",
    "window": "MAX_TOKENS",
    "repetition": "MAX_TOKENS",
    "content_filter": "SAFETY",
    "compaction": "STOP",
}
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


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
    """Base64: Google's SDKs refuse the whole reply otherwise. Most upstreams' signatures are base64 already."""
    signature = part.signature or pack_reasoning(part.text)
    return signature if _BASE64.fullmatch(signature) else base64.b64encode(signature.encode()).decode()


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
        "supportedGenerationMethods": _METHODS if "chat" in card.capabilities else _METHODS[3:],
    }


# --- the stream -------------------------------------------------------------------------------------------------------


class _Candidate:
    """One candidate: its open block with what its end needs, and the signature for its next part."""

    __slots__ = ("block", "pieces", "signature", "usage")

    def __init__(self) -> None:
        self.block = BlockStart(0, "text")
        self.pieces: list[str] = []
        self.signature = ""
        self.usage: Usage | None = None


class GeminiStreamWriter:
    """A call is written when it is complete, and an incomplete one never.

    Google's Python SDK reads a line that is no `data:` as JSON, so an SSE comment would end its stream with an error.
    Blank lines keep a connection alive.
    """

    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._trace = request, trace
        self._is_sse = request.dialect == "sse"
        self.content_type = b"text/event-stream; charset=utf-8" if self._is_sse else b"application/json"
        self._hides_thoughts = hides_thoughts(request)
        self._ids: dict[str, Any] = {}
        self._prompt = Usage()
        self._tail = b""
        self._candidates: dict[int, _Candidate] = {}
        self._chunks = 0
        self._failed = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        if self._failed:
            return b""
        if type(event) is BlockDelta:
            return self._write_delta(event, choice)
        if isinstance(event, BlockStart):
            candidate = self._candidates[choice]
            candidate.block, candidate.pieces = event, []
            return b""
        if isinstance(event, BlockEnd):
            return self._end_block(event, choice)
        if isinstance(event, Started):
            return self._start(event, choice)
        if isinstance(event, Finished):
            return self._finish(event, choice)
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return b"\n\n" if self._is_sse else b"\n"

    def end(self) -> bytes:
        """A stream with an unfinished candidate must not look complete."""
        if self._failed:
            return b""
        usages = [candidate.usage for candidate in self._candidates.values()]
        if not usages or None in usages:
            return self._fail(Incomplete("the answer ended before it was complete", id=self._trace))
        return b"" if self._is_sse else b"]"

    def _start(self, event: Started, choice: int) -> bytes:
        if not self._ids:
            self._ids, self._prompt = write_ids(event), event.usage
            usage = {"promptTokenCount": event.usage.prompt, "totalTokenCount": event.usage.prompt}
            self._tail = b"}]," + encode({"usageMetadata": usage} | self._ids)[1:]
        self._candidates[choice] = _Candidate()
        return b""

    def _write_delta(self, event: BlockDelta, choice: int) -> bytes:
        candidate = self._candidates[choice]
        kind = candidate.block.kind
        if kind != "text":
            candidate.pieces.append(event.text)
            if kind == "tool_call" or self._hides_thoughts or not event.text:
                return b""
            return self._chunk(b'{"text":' + encode(event.text) + b',"thought":true}', choice)
        if not event.text and not event.logprobs:
            return b""
        return self._chunk(b'{"text":' + encode(event.text) + self._signed(candidate) + b"}", choice, event.logprobs)

    def _signed(self, candidate: _Candidate) -> bytes:
        signature, candidate.signature = candidate.signature, ""
        return b',"thoughtSignature":' + encode(signature) if signature else b""

    def _end_block(self, event: BlockEnd, choice: int) -> bytes:
        candidate = self._candidates[choice]
        block, text = candidate.block, "".join(candidate.pieces)
        if block.kind == "thinking":
            candidate.signature = write_signature(Thinking(text, event.signature))
        if block.kind != "tool_call" or not event.complete:
            return b""
        call = encode(write_part(ToolCall(block.call_id, block.name, text)))
        return self._chunk(call[:-1] + self._signed(candidate) + b"}", choice)

    def _chunk(self, part: bytes, choice: int, logprobs: tuple[TokenLogprob, ...] = ()) -> bytes:
        more = b',"logprobsResult":' + encode(write_logprobs(logprobs)) if logprobs else b""
        head = b'{"candidates":[{"content":{"parts":['
        return self._framed(head + part + b'],"role":"model"},"index":%d' % choice + more + self._tail)

    def _finish(self, event: Finished, choice: int) -> bytes:
        """The counts are complete with the last candidate."""
        self._candidates[choice].usage = event.usage
        candidate = {
            "content": {"parts": [{"text": ""}], "role": "model"},
            "finishReason": FINISH_REASONS[event.reason],
            "index": choice,
        }
        usages = [one.usage for one in self._candidates.values() if one.usage is not None]
        return self._framed(encode({"candidates": [candidate], "usageMetadata": write_usage(usages)} | self._ids))

    def _framed(self, body: bytes) -> bytes:
        self._chunks += 1
        if self._is_sse:
            return b"data: " + body + b"\n\n"
        return (b"[" if self._chunks == 1 else b",\n") + body

    def _fail(self, error: ModelyardError) -> bytes:
        self._failed = True
        body = error_body(error)
        if self._is_sse:
            return b"data: " + body + b"\n\n"
        return self._framed(body) + b"]"
