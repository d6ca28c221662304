"""Writes events as a stream of partial replies: server-sent events, or the elements of one JSON array."""

from __future__ import annotations

from typing import Any

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
    Usage,
)
from modelyard.core.request import Request, Thinking, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.gemini.errors import error_body
from modelyard.protocols.gemini.reply import (
    FINISH_REASONS,
    hides_thoughts,
    write_ids,
    write_logprobs,
    write_part,
    write_signature,
    write_usage,
)


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
