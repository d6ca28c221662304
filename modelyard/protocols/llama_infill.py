"""llama-server's fill-in-the-middle, both roles: `POST /infill`, the texts around a gap in, what belongs into it out.

{"input_prefix": "def f():\\n    ", "input_suffix": "\\n", "prompt": "", "n_predict": 32, "stream": true,
 "input_extra": [{"filename": "a.py", "text": "…"}]}
data: {"index": 0, "content": "return", "tokens": [], "stop": false, …}
data: {"index": 0, "content": "", "stop": true, "stop_type": "eos", "timings": {…}, …}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import Incomplete, InvalidRequest, Unsupported
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Finished,
    Reply,
    Started,
    Usage,
)
from modelyard.core.request import Infill, Request
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    present,
    read_constraint,
    read_priority,
    read_sampling,
    read_slot,
    write_extensions,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.llama_reply import LlamaStreamWriter, UpstreamTimings, reply_text, selected, write_last
from modelyard.protocols.common.openai_errors import http_error_writer, read_error_field, read_http_error
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL, read_session, read_stop
from modelyard.protocols.common.sse import SseReader

NAME = "llama_infill"
PATHS: tuple[str, ...] = ("/infill",)

read_error = read_http_error

_MISSING = "missing_required_parameter"


# --- the request ------------------------------------------------------------------------------------------------------


class InfillBody(ExtensionFields):
    model: limits.Name | None = None
    input_prefix: limits.Text | None = None
    input_suffix: limits.Text | None = None
    input_extra: limits.ProjectFiles | None = None
    prompt: limits.Text | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    repeat_penalty: float | None = None
    stop: limits.StopString | limits.StopStrings | None = None
    stream: bool | None = None
    response_fields: limits.Words | None = None


_decoder = msgspec.json.Decoder(InfillBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """`n_predict` 0 only reads the prompt into the cache, and -1 is no limit."""
    parsed = decode(_decoder, body)
    if parsed.input_prefix is None or parsed.input_suffix is None:
        name = "input_prefix" if parsed.input_prefix is None else "input_suffix"
        raise InvalidRequest(f"{name} is required; it may be empty", param=name, code=_MISSING)
    limit = parsed.n_predict if parsed.n_predict is not None else parsed.max_tokens
    if limit is not None and limit < -1:
        raise InvalidRequest(f"n_predict must be -1, 0 or more, got {limit}", param="n_predict")
    sampling, warnings = read_sampling(parsed), list[str]()
    if parsed.repeat_penalty is not None:
        sampling = replace(sampling, repetition_penalty=parsed.repeat_penalty)
    files = tuple(_read_file(file, f"input_extra[{at}]") for at, file in enumerate(parsed.input_extra or ()))
    return Request(
        model=parsed.model or DEFAULT_MODEL,
        prompts=(parsed.input_prefix,),
        infill=Infill(parsed.input_suffix, parsed.prompt or "", files),
        sampling=sampling,
        max_tokens=None if limit == -1 else max(1, limit) if limit is not None else None,
        stop=read_stop(parsed.stop, warnings),
        constraint=read_constraint(parsed),
        stream=parsed.stream is True,
        lora_adapter=parsed.lora_adapter,
        priority=read_priority(parsed),
        session=read_session(headers, None),
        slot=read_slot(parsed),
        reply_fields=tuple(parsed.response_fields or ()),
        warnings=tuple(warnings),
    )


def _read_file(file: dict[str, Any], path: str) -> tuple[str, str]:
    name, text = file.get("filename", "tmp"), file.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidRequest(f"{path} must have a text and may have a filename", param=path)
    return name, text


# --- the reply --------------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    reply = replies[0]
    return encode(selected(write_last(reply_text(reply), reply.started, reply.finished), request.reply_fields))


write_error = http_error_writer("input_prefix")


def writer(request: Request, trace: str) -> LlamaStreamWriter:
    return LlamaStreamWriter(request, trace, "input_prefix")


# --- the client role --------------------------------------------------------------------------------------------------


def write_request(request: Request) -> bytes:
    """`/infill` has neither logprobs nor prompts of token ids."""
    infill = request.infill or Infill("")
    if request.logprobs is not None:
        raise Unsupported("llama-server fills gaps without logprobs", code="logprobs_unsupported", param="logprobs")
    files = [{"filename": name, "text": text} for name, text in infill.files or ()]
    body: dict[str, Any] = {"input_prefix": request.prompts[0], "input_suffix": infill.suffix}
    body |= {"prompt": infill.start, "input_extra": files} | write_extensions(request)
    if (penalty := body.pop("repetition_penalty", None)) is not None:
        body["repeat_penalty"] = penalty
    if "logit_bias" in body:
        body["logit_bias"] = [[int(token), bias] for token, bias in body["logit_bias"].items()]
    schema = request.constraint.text if request.constraint and request.constraint.kind == "json_schema" else None
    return encode(
        body
        | present(
            n_predict=request.max_tokens,
            stop=request.stop or None,
            stream=request.stream or None,
            json_schema=None if schema is None else msgspec.Raw(schema.encode()),
        )
    )


class UpstreamPiece(Struct):
    """A chunk of the stream, or the whole reply. The last one has the counts."""

    content: str = ""
    stop: bool = False
    model: str | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    timings: UpstreamTimings | None = None
    error: Any = None


_piece_decoder = msgspec.json.Decoder(UpstreamPiece)


def _read_finished(piece: UpstreamPiece) -> Finished:
    cached = piece.timings.cached if piece.timings is not None else 0
    usage = Usage(piece.tokens_evaluated or 0, cached, piece.tokens_predicted or 0)
    if piece.stop_type == "word":
        return Finished("stop_string", usage, piece.stopping_word)
    return Finished("max_tokens" if piece.stop_type == "limit" else "end", usage)


def read_reply(body: bytes) -> Reply:
    return InfillStreamReader().read_whole(body)


class InfillStreamReader(SseReader):
    """One block of text."""

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def _read(self, data: bytes) -> None:
        if self._done or data == b"[DONE]":
            return
        try:
            piece = _piece_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(Incomplete(f"the upstream sent a chunk that cannot be read: {error}"))
            return
        if piece.error:
            self._fail(read_error_field(piece.error))
            return
        if not self._started:
            self._started = self._has_answer = True
            self._out += [Started("", piece.model or "", 0), BlockStart(0, "text")]
        if piece.content:
            self._out.append(BlockDelta(0, piece.content))
        if piece.stop:
            self._done = True
            self._out += [BlockEnd(0), _read_finished(piece)]


def reader() -> InfillStreamReader:
    return InfillStreamReader()
