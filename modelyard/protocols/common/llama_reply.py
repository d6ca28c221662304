"""llama-server's `timings` and `prompt_progress`, and the replies of its own endpoints, /completion and /infill: the
last object with its counts, and the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Reply,
    Started,
    StopReason,
    Timings,
    Usage,
)
from modelyard.core.request import Request
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_errors import error_body
from modelyard.protocols.common.sse import comment, frame

_STOP_TYPES: Mapping[StopReason, str] = {
    "end": "eos",
    "stop_string": "word",
    "max_tokens": "limit",
    "window": "limit",
    "repetition": "limit",
}


def reply_text(reply: Reply) -> str:
    """The text of every block: these endpoints have one channel."""
    return "".join(block.text for block in reply.blocks)


def write_last(content: str, started: Started, finished: Finished, index: int = 0) -> dict[str, Any]:
    """The whole reply, or the last chunk of a stream. Slots have no numbers here: -1."""
    usage, timings = finished.usage, finished.timings
    return {
        "index": index,
        "content": content,
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": started.model,
        "tokens_predicted": usage.output,
        "tokens_evaluated": usage.prompt,
        "tokens_cached": usage.prompt + usage.output,
        "truncated": finished.reason == "window",
        "stop_type": _STOP_TYPES.get(finished.reason, "none"),
        "stopping_word": finished.stop_string or "",
        "timings": write_timings(usage, timings),
    }


def write_timings(usage: Usage, timings: Timings) -> dict[str, Any]:
    read, made = usage.prompt - usage.cached, usage.output
    prompt_s, decode_s = timings.first_token or 0.0, timings.decode or 0.0
    return {
        "cache_n": usage.cached,
        "prompt_n": read,
        "prompt_ms": prompt_s * 1000,
        "prompt_per_token_ms": prompt_s * 1000 / max(1, read),
        "prompt_per_second": read / prompt_s if prompt_s else 0.0,
        "predicted_n": made,
        "predicted_ms": decode_s * 1000,
        "predicted_per_token_ms": decode_s * 1000 / max(1, made),
        "predicted_per_second": made / decode_s if decode_s else 0.0,
    }


class UpstreamTimings(Struct):
    """`timings` of a llama-server. A number that it did not measure may be null."""

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None

    @property
    def cached(self) -> int:
        return self.cache_n or 0

    @property
    def event(self) -> Measured:
        usage = Usage((self.prompt_n or 0) + self.cached, self.cached, self.predicted_n or 0)
        return Measured(usage, Timings(first_token=_seconds(self.prompt_ms), decode=_seconds(self.predicted_ms)))


def _seconds(milliseconds: float | None) -> float:
    return (milliseconds or 0.0) / 1000


class UpstreamProgress(Struct):
    """`prompt_progress` of a llama-server."""

    total: int = 0
    cache: int = 0
    processed: int = 0
    time_ms: float = 0.0

    @property
    def event(self) -> PromptRead:
        return PromptRead(self.total, self.cache, self.processed, self.time_ms / 1000)


def write_progress(read: PromptRead) -> dict[str, Any]:
    """The fields of a chunk that reports how much of the prompt is read."""
    progress = {"total": read.total, "cache": read.cached, "processed": read.done, "time_ms": int(read.seconds * 1000)}
    return {
        "prompt_progress": progress,
        "timings": write_timings(Usage(read.done, read.cached), Timings(first_token=read.seconds)),
    }


def selected(reply: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Only the fields with these names. A name with slashes reaches into an object and stays the name."""
    if not names:
        return reply
    chosen: dict[str, Any] = {}
    for name in names:
        value: Any = reply
        for key in name.split("/"):
            value = value.get(key, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            chosen[name] = value
    return chosen


class LlamaStreamWriter:
    """`write_piece` adds an endpoint's own fields to a chunk, `write_end` to the last chunk of a choice."""

    def __init__(
        self,
        request: Request,
        trace: str,
        overflow_param: str,
        write_piece: Callable[[BlockDelta, int], dict[str, Any]] | None = None,
        write_end: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        self._fields, self._trace, self._overflow_param = request.reply_fields, trace, overflow_param
        self._write_piece, self._write_end = write_piece, write_end
        self._running: dict[int, Started] = {}
        self._timings: dict[int, Measured] = {}
        self._ended = 0
        self._failed = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        if self._failed:
            return b""
        if isinstance(event, BlockDelta):
            return self._write_delta(event, choice) if event.text or event.logprobs else b""
        if isinstance(event, Started):
            self._running[choice] = event
            return b""
        if isinstance(event, Measured):
            self._timings[choice] = event
            return b""
        if isinstance(event, PromptRead):
            return self._write_progress(event, choice)
        if isinstance(event, Finished) and choice in self._running:
            self._ended += 1
            last = write_last("", self._running.pop(choice), event, choice)
            return frame(encode(selected(last | (self._write_end(choice) if self._write_end else {}), self._fields)))
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def _write_delta(self, event: BlockDelta, choice: int) -> bytes:
        """A chunk for each token, if their probabilities are told and they are whole texts."""
        tokens = event.logprobs
        if len(tokens) > 1 and "".join([token.token for token in tokens]) == event.text:
            each = (msgspec.structs.replace(event, text=token.token, logprobs=(token,)) for token in tokens)
            return b"".join(self._write_delta(one, choice) for one in each)
        piece = {"index": choice, "content": event.text, "tokens": [], "stop": False, "id_slot": -1}
        if (measured := self._timings.get(choice)) is not None:
            piece["timings"] = write_timings(measured.usage, measured.timings)
        return frame(encode(piece | (self._write_piece(event, choice) if self._write_piece else {})))

    def _write_progress(self, read: PromptRead, choice: int) -> bytes:
        piece = {"index": choice, "content": "", "tokens": [], "stop": False, "id_slot": -1}
        return frame(encode(piece | write_progress(read)))

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        """A stream without its last chunk must not look complete."""
        if self._failed or (self._ended and not self._running):
            return b""
        return self._fail(Incomplete("the answer ended before it was complete", id=self._trace))

    def _fail(self, error: ModelyardError) -> bytes:
        self._failed = True
        return frame(encode({"error": error_body(error, self._overflow_param)}))
