"""OpenAI's legacy completions, both roles: `POST /v1/completions`, raw prompts in, text out.

    data: {"id": "cmpl-…", "object": "text_completion", "choices": [{"index": 0, "text": "Hi", "finish_reason": null}]}

Several prompts with n answers each make len(prompts) × n choices; a choice's index is prompt × n + answer. The protocol
has one channel only: the text of every block, of whatever kind, is part of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan, nan
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core import limits
from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError, Unsupported
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Reply,
    Started,
    StopReason,
    Timings,
    TokenLogprob,
    Usage,
)
from modelyard.core.request import Infill, Request
from modelyard.protocols.common.extensions import (
    MAX_TEMPERATURE,
    check_positive,
    present,
    read_constraint,
    read_priority,
    read_sampling,
    read_slot,
    take_biased_texts,
    write_extensions,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.llama_reply import UpstreamProgress, UpstreamTimings, write_progress, write_timings
from modelyard.protocols.common.openai_errors import error_body, http_error_writer, read_error_field, read_http_error
from modelyard.protocols.common.openai_fields import (
    DEFAULT_MODEL,
    DONE,
    FINGERPRINT,
    FINISH_REASONS,
    MAX_N,
    MIN_LOGPROB,
    OpenAIUsage,
    PromptField,
    PromptLogprobs,
    Prompts,
    ServerFields,
    StreamOptions,
    check_range,
    read_prompt_logprobs,
    read_prompts,
    read_session,
    read_stop,
    read_timings,
    read_upstream_prompt,
    read_usage,
    write_prompt_logprobs,
    write_usage,
)
from modelyard.protocols.common.sse import SseReader, comment, frame

NAME = "openai_completions"
PATHS: tuple[str, ...] = ("/v1/completions",)

_MAX_LOGPROBS = 5
_MAX_CHOICES = 2048  # each one is a stream of its own inside the server


# --- the request ----------------------------------------------------------------------------------------------------


class CompletionBody(ServerFields):
    model: limits.Name | None = None
    prompt: PromptField | None = None
    suffix: limits.Text | None = None
    echo: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    stop: limits.StopString | limits.StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: limits.Name | None = None
    prompt_cache_key: limits.Name | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    parsed = decode(_decoder, body)
    warnings: list[str] = []
    prompts, biased_texts = read_prompts(parsed.prompt, "prompt"), take_biased_texts(parsed)
    is_stream, echoes = parsed.stream is True, parsed.echo is True and not parsed.suffix
    check_range("logprobs", parsed.logprobs, 0, _MAX_LOGPROBS)
    if not (parsed.max_tokens == 0 and parsed.echo):  # nothing but the prompt: for its log probabilities
        check_positive("max_tokens", parsed.max_tokens)
    n = _read_n(parsed, len(prompts), warnings)
    return Request(
        model=parsed.model or DEFAULT_MODEL,
        prompts=prompts,
        sampling=read_sampling(parsed, MAX_TEMPERATURE),
        biased_texts=biased_texts,
        max_tokens=parsed.max_tokens,
        stop=read_stop(parsed.stop, warnings),
        n=n,
        logprobs=parsed.logprobs,
        prompt_logprobs=_read_prompt_logprobs(parsed, echoes, is_stream),
        constraint=read_constraint(parsed),
        stream=is_stream,
        include_usage=parsed.stream_options is not None and parsed.stream_options.include_usage is True,
        progress=parsed.return_progress is True and is_stream,
        timings=read_timings(parsed),
        lora_adapter=parsed.lora_adapter,
        priority=read_priority(parsed),
        session=read_session(headers, parsed.prompt_cache_key),
        slot=read_slot(parsed),
        user=parsed.user,
        echo=parsed.echo is True,
        infill=_read_infill(parsed.suffix, prompts),
        repeated=None if parsed.prompt_logprobs is None else {"prompt_logprobs": parsed.prompt_logprobs},
        warnings=tuple(warnings),
    )


def _read_prompt_logprobs(body: CompletionBody, echoes: bool, is_stream: bool) -> int | None:
    """For `echo`, for the reply's own field `prompt_logprobs`, or for both: then as many as the larger one."""
    asked = [read_prompt_logprobs(body, is_stream), body.logprobs if echoes else None]
    return max((count for count in asked if count is not None), default=None)


def _read_infill(suffix: str | None, prompts: Prompts) -> Infill | None:
    """Editors send an empty suffix where there is nothing behind the gap; without text in it there is no gap."""
    if not suffix:
        return None
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest("with a suffix the prompt must be text, not token ids", param="prompt")
    return Infill(suffix)


def _read_n(body: CompletionBody, prompts: int, warnings: list[str]) -> int:
    check_range("n", body.n, 1, MAX_N)
    n = 1 if body.n is None else body.n
    if prompts * n > _MAX_CHOICES:
        raise InvalidRequest(
            f"{prompts} prompts with n = {n} make {prompts * n} answers; at most {_MAX_CHOICES} are allowed", param="n"
        )
    if body.best_of is not None and body.best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n}), got {body.best_of}", param="best_of")
    if body.best_of is not None and body.best_of > n:
        warnings.append("best_of_ignored: only n answers are generated")
    return n


# --- the whole reply ------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    usages = [reply.finished.usage for reply in replies]
    fields = _completion_fields(replies[0].started) | {
        "choices": [_write_choice(i, reply, request) for i, reply in enumerate(replies)],
        "usage": write_usage(usages[:: request.n], usages),
    }
    if request.timings is not None:
        fields["timings"] = write_timings(usages[0], replies[0].finished.timings)
    return encode(fields)


def _completion_fields(started: Started) -> dict[str, Any]:
    return {
        "id": f"cmpl-{started.id}",
        "object": "text_completion",
        "created": started.created,
        "model": started.model,
        "system_fingerprint": FINGERPRINT,
    }


def _write_choice(index: int, reply: Reply, request: Request) -> dict[str, Any]:
    echo, logprobs = reply.started.prompt, None
    if request.logprobs is not None:
        prompt = _echoed(reply.started, request)
        tokens = [*prompt, *(token for block in reply.blocks for token in block.logprobs)]
        logprobs = _write_logprobs(tokens, 0 if prompt else len(echo), request.logprobs)
    choice = {
        "index": index,
        "text": echo + "".join(block.text for block in reply.blocks),
        "logprobs": logprobs,
        "finish_reason": _finish_reason(reply.finished),
    }
    if (top := (request.repeated or {}).get("prompt_logprobs")) is not None:
        choice["prompt_logprobs"] = write_prompt_logprobs(reply.started.prompt_logprobs, top)
    return choice


def _echoed(started: Started, request: Request) -> tuple[TokenLogprob, ...]:
    """A token that the model requires before the client's text has no text itself, and is not repeated."""
    tokens = started.prompt_logprobs if request.echo else ()
    return tokens[1:] if tokens and isnan(tokens[0].logprob) and not tokens[0].token else tokens


def _finish_reason(finished: Finished) -> str:
    return "stop" if finished.reason == "tool_calls" else FINISH_REASONS[finished.reason]


def _write_logprobs(tokens: Iterable[TokenLogprob], offset: int, top: int) -> dict[str, Any]:
    """`offset` is the position of the first token in the text. Alternatives are listed only where `top` is not 0. The
    first token of a prompt has no log probability."""
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    for token in tokens:
        out["tokens"].append(token.token)
        is_known = not isnan(token.logprob)
        out["token_logprobs"].append(max(token.logprob, MIN_LOGPROB) if is_known else None)
        out["text_offset"].append(offset)
        offset += len(token.token)
        if top:
            top_tokens = {t.token: max(t.logprob, MIN_LOGPROB) for t in token.top[:top] or (token,)}
            out["top_logprobs"].append(top_tokens if is_known else None)
    return out


write_error = http_error_writer("prompt")


# --- the stream -----------------------------------------------------------------------------------------------------


class _Choice:
    """One choice: the bytes before its text, the offset of its next token, and its usage once it has ended."""

    __slots__ = ("offset", "start", "usage")

    def __init__(self, start: bytes, offset: int) -> None:
        self.start, self.offset = start, offset
        self.usage: Usage | None = None


class CompletionStreamWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._trace = request, trace
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._chunk_end = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._text_end = b',"logprobs":null,"finish_reason":null' + self._chunk_end
        self._timings: dict[str, Any] | None = None
        self._failed = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        if self._failed:
            return b""
        if isinstance(event, BlockDelta):
            return self._write_delta(event, self._choices[choice])
        if isinstance(event, Started):
            return self._start(event, choice)
        if isinstance(event, Finished):
            return self._finish(event, self._choices[choice])
        if isinstance(event, PromptRead):
            progress = b"," + encode(write_progress(event))[1:] + b"\n\n"
            return (self._choices[choice].start + b'""' + self._text_end).removesuffix(b"}\n\n") + progress
        if isinstance(event, Measured):
            self._set_timings(event.usage, event.timings)
            return b""
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        """Usage and [DONE]. A stream with an unfinished choice must not look complete: it ends with an error chunk."""
        if self._failed:
            return b""
        usages = [self._choices[choice].usage for choice in sorted(self._choices)]
        finished = [usage for usage in usages if usage is not None]
        if not finished or len(finished) < len(usages):
            return self._fail(Incomplete("the answer ended before it was complete", id=self._trace))
        if not self._request.include_usage:
            return DONE
        fields = self._fields | {"choices": [], "usage": write_usage(finished[:: self._request.n], finished)}
        if self._timings is not None:
            fields["timings"] = self._timings
        return frame(encode(fields)) + DONE

    def _set_timings(self, usage: Usage, timings: Timings) -> None:
        """The chunks from here on have these times."""
        self._timings = write_timings(usage, timings)
        usage_field = b'}],"usage":null' if self._request.include_usage else b"}]"
        self._chunk_end = usage_field + b',"timings":' + encode(self._timings) + b"}\n\n"
        self._text_end = b',"logprobs":null,"finish_reason":null' + self._chunk_end

    def _start(self, event: Started, choice: int) -> bytes:
        """The first choice to start gives the id, time and model of every chunk."""
        if not self._fields:
            self._fields = _completion_fields(event)
        start = b"data: " + encode(self._fields)[:-1] + b',"choices":[{"index":%d,"text":' % choice
        echo, prompt = event.prompt, _echoed(event, self._request)
        self._choices[choice] = _Choice(start, len(echo))
        if not prompt or self._request.logprobs is None:
            return start + encode(echo) + self._text_end if echo else b""
        logprobs = encode(_write_logprobs(prompt, 0, self._request.logprobs))
        return start + encode(echo) + b',"logprobs":' + logprobs + b',"finish_reason":null' + self._chunk_end

    def _write_delta(self, event: BlockDelta, state: _Choice) -> bytes:
        if not event.logprobs or self._request.logprobs is None:
            return state.start + encode(event.text) + self._text_end if event.text else b""
        logprobs = encode(_write_logprobs(event.logprobs, state.offset, self._request.logprobs))
        state.offset += sum(len(token.token) for token in event.logprobs)
        end = b',"logprobs":' + logprobs + b',"finish_reason":null' + self._chunk_end
        return state.start + encode(event.text) + end

    def _finish(self, event: Finished, state: _Choice) -> bytes:
        state.usage = event.usage
        if self._request.timings is not None:
            self._set_timings(event.usage, event.timings)
        reason = _finish_reason(event).encode()
        return state.start + b'"","logprobs":null,"finish_reason":"%s"' % reason + self._chunk_end

    def _fail(self, error: ModelyardError) -> bytes:
        self._failed = True
        return frame(encode({"error": error_body(error, "prompt")}))


def writer(request: Request, trace: str) -> CompletionStreamWriter:
    return CompletionStreamWriter(request, trace)


# --- the client role ------------------------------------------------------------------------------------------------

read_error = read_http_error


def write_request(request: Request) -> bytes:
    """One prompt. `echo` is sent for the prompt's log probabilities only: the server then repeats the prompt, otherwise
    the gateway does."""
    prompt, infill = request.prompts[0], request.infill
    if infill is not None and infill.files:
        raise Unsupported("this model's server takes no other files beside the gap", param="input_extra")
    if infill is not None and isinstance(prompt, str):
        prompt += infill.start
    body: dict[str, Any] = {"model": request.model, "prompt": prompt} | write_extensions(request)
    body |= present(
        suffix=infill.suffix if infill is not None else None,
        max_tokens=request.max_tokens,
        stop=request.stop or None,
        logprobs=request.logprobs,
        echo=True if request.echo and request.prompt_logprobs is not None else None,
        prompt_logprobs=None if request.echo else request.prompt_logprobs,
        stream=request.stream or None,
        stream_options={"include_usage": True} if request.include_usage else None,
        prompt_cache_key=request.session,
        user=request.user,
    )
    if request.constraint is not None and request.constraint.kind == "json_schema":
        body["json_schema"] = msgspec.Raw(request.constraint.text.encode())
    return encode(body)


class UpstreamTokenLogprobs(Struct):
    """OpenAI's lists, or the entries of Chat Completions, which llama-server sends here too."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[dict[str, Any]] | None = None


class UpstreamText(Struct):
    index: int = 0
    text: str | None = None
    logprobs: UpstreamTokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_logprobs: PromptLogprobs | None = None


class UpstreamTextChunk(Struct):
    """A chunk of the stream, or the whole reply."""

    id: str | None = None
    created: float | None = None
    model: str | None = None
    choices: list[UpstreamText] | None = None
    usage: OpenAIUsage | None = None
    timings: UpstreamTimings | None = None
    prompt_progress: UpstreamProgress | None = None
    error: Any = None


_chunk_decoder = msgspec.json.Decoder(UpstreamTextChunk)


def read_reply(body: bytes) -> Reply:
    """An `error` field or an unreadable body raises."""
    return CompletionStreamReader().read_whole(body)


def _read_finish(choice: UpstreamText) -> tuple[StopReason, str | None]:
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.finish_reason == "content_filter":
        return "content_filter", None
    return ("stop_string", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("end", None)


def _read_logprobs(found: UpstreamTokenLogprobs | None) -> tuple[TokenLogprob, ...]:
    if found is None:
        return ()
    if found.content is not None:
        return tuple(_read_logprob(entry) for entry in found.content)
    tokens, values = found.tokens or [], found.token_logprobs or []
    tops = found.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenLogprob(
            token,
            nan if value is None else value,
            token.encode("utf-8", "replace"),
            tuple(
                TokenLogprob(text, logprob, text.encode("utf-8", "replace")) for text, logprob in (top or {}).items()
            ),
        )
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _read_logprob(entry: dict[str, Any]) -> TokenLogprob:
    token, logprob = str(entry.get("token", "")), entry.get("logprob")
    top = tuple(_read_logprob(other) for other in entry.get("top_logprobs") or () if isinstance(other, dict))
    value = float(logprob) if isinstance(logprob, int | float) else MIN_LOGPROB
    return TokenLogprob(token, value, token.encode("utf-8", "replace"), top)


class CompletionStreamReader(SseReader):
    """One block of text."""

    def __init__(self) -> None:
        super().__init__()
        self._started = False
        self._stop: tuple[StopReason, str | None] | None = None
        self._usage: Usage | None = None

    def _end(self) -> None:
        if self._stop is not None:
            self._finish()
        else:
            super()._end()

    def _read(self, data: bytes) -> None:
        if self._done:
            return
        if data == b"[DONE]":
            self._finish()
            return
        try:
            chunk = _chunk_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(Incomplete(f"the upstream sent a chunk that cannot be read: {error}"))
            return
        if chunk.error:
            self._fail(read_error_field(chunk.error))
            return
        self._read_chunk(chunk)

    def _read_chunk(self, chunk: UpstreamTextChunk) -> None:
        if not self._started:
            self._started = True
            id = (chunk.id or "").removeprefix("cmpl-")
            found = next((choice.prompt_logprobs for choice in chunk.choices or () if choice.index == 0), None)
            logprobs = read_upstream_prompt(found)
            self._out.append(Started(id, chunk.model or "", int(chunk.created or 0), prompt_logprobs=logprobs))
            self._out.append(BlockStart(0, "text"))
        if chunk.prompt_progress is not None:
            self._out.append(chunk.prompt_progress.event)
        if chunk.timings is not None and self._stop is None:
            self._out.append(chunk.timings.event)
        for choice in chunk.choices or ():
            if choice.index != 0 or self._stop is not None:
                continue
            self._has_answer = True
            logprobs = _read_logprobs(choice.logprobs)
            if choice.text or logprobs:
                self._out.append(BlockDelta(0, choice.text or "", logprobs))
            if choice.finish_reason is not None:
                self._stop = _read_finish(choice)
        if chunk.usage is not None:
            self._usage = read_usage(chunk.usage)
        if self._stop is not None and self._usage is not None:
            self._finish()

    def _finish(self) -> None:
        """[DONE] without a finish_reason ends an answer that has begun."""
        if self._done:
            return
        if not self._started:
            self._fail(Incomplete("the upstream's stream has no answer"))
            return
        self._done = True
        reason, stop = self._stop or ("end", None)
        self._out += [BlockEnd(0), Finished(reason, self._usage or Usage(), stop)]


def reader() -> CompletionStreamReader:
    return CompletionStreamReader()
