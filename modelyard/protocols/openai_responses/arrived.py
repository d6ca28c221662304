"""A Responses reply as it stands on an upstream's wire: structs that forgive what real servers leave out."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from modelyard.core.events import BlockStart, StopReason, TokenLogprob, Usage

CALLS = frozenset({"function_call", "custom_tool_call"})
KNOWN = CALLS | {"message", "reasoning"}


Byte = Annotated[int, Meta(ge=0, le=255)]


class LogprobEntry(Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[Byte] | None = None
    top_logprobs: list[LogprobEntry] | None = None


class OutputPart(Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    logprobs: list[LogprobEntry] | None = None


class OutputItem(Struct):
    type: str = ""
    status: str | None = None
    content: list[OutputPart] | None = None
    summary: list[OutputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None

    def start(self, index: int) -> BlockStart:
        if self.type == "message":
            return BlockStart(index, "text")
        if self.type == "reasoning":
            return BlockStart(index, "thinking")
        custom = self.type == "custom_tool_call"
        return BlockStart(
            index, "tool_call", self.call_id or self.id or "", self.name or "", self.namespace or None, custom
        )

    @property
    def text(self) -> str:
        if self.type == "message":
            return "".join(part.text or part.refusal or "" for part in self.content or ())
        if self.type == "reasoning":
            shown = "".join(part.text or "" for part in self.content or ())
            return shown or "\n\n".join(part.text or "" for part in self.summary or ())
        written = self.input if self.type == "custom_tool_call" else self.arguments
        return written if isinstance(written, str) else ""

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(entry for part in self.content or () for entry in read_logprobs(part.logprobs))


class InputTokens(Struct):
    cached_tokens: int | None = None


class OutputTokens(Struct):
    reasoning_tokens: int | None = None


class UsageEntry(Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: InputTokens | None = None
    output_tokens_details: OutputTokens | None = None

    def read(self) -> Usage:
        cached = self.input_tokens_details.cached_tokens if self.input_tokens_details else None
        reasoning = self.output_tokens_details.reasoning_tokens if self.output_tokens_details else None
        return Usage(self.input_tokens or 0, cached or 0, self.output_tokens or 0, reasoning or 0)


class IncompleteDetails(Struct):
    reason: str | None = None


class Response(Struct):
    id: str | None = None
    model: str | None = None
    created_at: float | None = None
    status: str | None = None
    error: Any = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] | None = None
    usage: UsageEntry | None = None
    metrics: Any = None  # ours, if it is; other servers may mean something else by it

    def stop_reason(self, has_calls: bool) -> StopReason:
        if self.status == "incomplete":
            reason = self.incomplete_details.reason if self.incomplete_details else None
            return "content_filter" if reason == "content_filter" else "max_tokens"
        return "tool_calls" if has_calls else "end"


class StreamEvent(Struct):
    """Any event of the stream; `Any` where events that we do not read use the name for something else."""

    type: str = ""
    response: Response | None = None
    item: OutputItem | None = None
    output_index: int | None = None
    summary_index: int | None = None
    delta: Any = None
    logprobs: list[LogprobEntry] | None = None
    error: Any = None
    code: Any = None
    message: Any = None


RESPONSE = msgspec.json.Decoder(Response)
STREAM_EVENT = msgspec.json.Decoder(StreamEvent)


def read_logprobs(entries: list[LogprobEntry] | None) -> tuple[TokenLogprob, ...]:
    return tuple(_read_logprob(entry) for entry in entries or ())


def _read_logprob(entry: LogprobEntry) -> TokenLogprob:
    spelled = entry.token.encode() if entry.bytes is None else bytes(entry.bytes)
    return TokenLogprob(entry.token, entry.logprob, spelled, read_logprobs(entry.top_logprobs))
