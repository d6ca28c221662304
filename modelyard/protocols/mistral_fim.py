"""Mistral's fill-in-the-middle, server role: `POST /v1/fim/completions`, which editors such as Continue use.

    {"model": "m", "prompt": "def f():\\n    ", "suffix": "\\n", "max_tokens": 32, "stream": true}
    data: {"id": "…", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "return"}, …}]}

The request is that of a completion with a suffix; the reply has the shape of Chat Completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.core import limits
from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError
from modelyard.core.events import BlockDelta, Event, Failed, Finished, Reply, Started
from modelyard.core.request import Infill, Request, Text
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    check_positive,
    read_constraint,
    read_priority,
    read_sampling,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import error_body, http_error_writer
from modelyard.protocols.common.openai_fields import (
    DEFAULT_MODEL,
    DONE,
    FINISH_REASONS,
    read_session,
    read_stop,
    write_usage,
)
from modelyard.protocols.common.sse import comment, frame

NAME = "mistral_fim"
PATHS: tuple[str, ...] = ("/v1/fim/completions",)


class FimBody(ExtensionFields):
    model: limits.Name | None = None
    prompt: limits.Text | None = None
    suffix: limits.Text | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    random_seed: int | None = None
    stop: limits.StopString | limits.StopStrings | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(FimBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    parsed = decode(_decoder, body)
    if parsed.prompt is None:
        raise InvalidRequest("prompt is required; it may be empty", param="prompt", code="missing_required_parameter")
    limit = parsed.max_tokens if parsed.max_tokens is not None else parsed.max_completion_tokens
    check_positive("max_tokens", limit)
    if parsed.seed is None:
        parsed.seed = parsed.random_seed
    warnings: list[str] = []
    return Request(
        model=parsed.model or DEFAULT_MODEL,
        prompts=(parsed.prompt,),
        infill=Infill(parsed.suffix or ""),
        sampling=read_sampling(parsed),
        max_tokens=limit,
        stop=read_stop(parsed.stop, warnings),
        constraint=read_constraint(parsed),
        stream=parsed.stream is True,
        lora_adapter=parsed.lora_adapter,
        priority=read_priority(parsed),
        session=read_session(headers, None),
        warnings=tuple(warnings),
    )


def _reply_fields(started: Started, kind: str) -> dict[str, Any]:
    return {"id": started.id, "object": kind, "created": started.created, "model": started.model}


def write_reply(replies: list[Reply], request: Request) -> bytes:  # noqa: ARG001 - as in every protocol
    reply = replies[0]
    text = "".join(block.part.text for block in reply.blocks if isinstance(block.part, Text))
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": FINISH_REASONS[reply.finished.reason]}
    usage = write_usage([reply.finished.usage], [reply.finished.usage])
    return encode(_reply_fields(reply.started, "chat.completion") | {"choices": [choice], "usage": usage})


write_error = http_error_writer("prompt")


class FimStreamWriter:
    """The last chunk has the finish reason and the usage, as Mistral's has."""

    def __init__(self, trace: str) -> None:
        self._trace = trace
        self._fields: dict[str, Any] = {}
        self._over = False

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - there is one
        if self._over:
            return b""
        if isinstance(event, BlockDelta):
            return self._chunk(event.text, None) if event.text else b""
        if isinstance(event, Started):
            self._fields = _reply_fields(event, "chat.completion.chunk")
            return b""
        if isinstance(event, Finished):
            self._over = True
            usage = write_usage([event.usage], [event.usage])
            return self._chunk("", FINISH_REASONS[event.reason], usage=usage) + DONE
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def _chunk(self, text: str, reason: str | None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        return frame(encode(self._fields | {"choices": [choice]} | more))

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        """A stream without its last chunk must not look complete."""
        return b"" if self._over else self._fail(Incomplete("the answer ended before it was complete", id=self._trace))

    def _fail(self, error: ModelyardError) -> bytes:
        self._over = True
        return frame(encode({"error": error_body(error, "prompt")}))


def writer(request: Request, trace: str) -> FimStreamWriter:  # noqa: ARG001 - as in every protocol
    return FimStreamWriter(trace)
