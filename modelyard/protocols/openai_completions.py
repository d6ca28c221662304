"""OpenAI's legacy completions, server role: `POST /v1/completions`, raw prompts in, text out.

    data: {"id": "cmpl-…", "object": "text_completion", "choices": [{"index": 0, "text": "Hi", "finish_reason": null}]}

Several prompts with n answers each make len(prompts) × n choices; choice prompt × n + answer. The wire has one channel
only: whatever kind a block is, its text is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError
from modelyard.core.events import BlockDelta, Event, Failed, Finished, Reply, Started, TokenLogprob, Usage
from modelyard.core.protocol import WireError
from modelyard.core.request import Request, ToolCall
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    check_positive,
    read_constraint,
    read_priority,
    read_sampling,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import error_body, write_http_error
from modelyard.protocols.common.openai_fields import (
    DONE,
    FINGERPRINT,
    FINISH_REASONS,
    MAX_N,
    MIN_LOGPROB,
    PromptField,
    Prompts,
    check_range,
    read_prompts,
    read_session,
    read_stop,
    require_model,
    write_usage,
)
from modelyard.protocols.common.sse import comment, frame

NAME = "openai_completions"
PATHS: tuple[str, ...] = ("/v1/completions", "/completions")

_MAX_LOGPROBS = 5
_MAX_CHOICES = 2048  # each one is a stream of its own in here
_encode = msgspec.json.Encoder().encode


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CompletionBody(ExtensionFields):
    model: str | None = None
    prompt: PromptField | None = None
    suffix: str | None = None
    echo: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    asked = decode(_decoder, body)
    warnings: list[str] = []
    prompts = read_prompts(asked.prompt, "prompt")
    check_range("logprobs", asked.logprobs, 0, _MAX_LOGPROBS)
    check_positive("max_tokens", asked.max_tokens)
    return Request(
        model=require_model(asked.model),
        prompts=prompts,
        sampling=read_sampling(asked),
        max_tokens=asked.max_tokens,
        stop=read_stop(asked.stop, warnings),
        n=_read_n(asked, len(prompts), warnings),
        logprobs=asked.logprobs,
        constraint=read_constraint(asked),
        stream=asked.stream is True,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage is True,
        lora_adapter=asked.lora_adapter,
        priority=read_priority(asked),
        session=read_session(headers, asked.prompt_cache_key),
        user=asked.user,
        echo=_read_echo(asked, prompts, warnings),
        suffix=asked.suffix,
        warnings=tuple(warnings),
    )


def _read_n(asked: CompletionBody, prompts: int, warnings: list[str]) -> int:
    check_range("n", asked.n, 1, MAX_N)
    n = 1 if asked.n is None else asked.n
    if prompts * n > _MAX_CHOICES:
        raise InvalidRequest(
            f"{prompts} prompts with n = {n} make {prompts * n} answers; at most {_MAX_CHOICES} are allowed", param="n"
        )
    if asked.best_of is not None and asked.best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n}), got {asked.best_of}", param="best_of")
    if asked.best_of is not None and asked.best_of > n:
        warnings.append("best_of_ignored: only n answers are made")
    return n


def _read_echo(asked: CompletionBody, prompts: Prompts, warnings: list[str]) -> bool:
    if asked.echo and not all(isinstance(prompt, str) for prompt in prompts):
        warnings.append("echo_ignored: a prompt of token ids has no text to echo")
    return asked.echo is True


# --- the whole reply ------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    started, usages = replies[0].started, [reply.finished.usage for reply in replies]
    return encode(
        _fields(started)
        | {
            "choices": [_choice(i, reply, request) for i, reply in enumerate(replies)],
            "usage": write_usage(usages[:: request.n], usages),
        }
    )


def _fields(started: Started) -> dict[str, Any]:
    return {
        "id": f"cmpl-{started.id}",
        "object": "text_completion",
        "created": started.created,
        "model": started.model,
        "system_fingerprint": FINGERPRINT,
    }


def _choice(index: int, reply: Reply, request: Request) -> dict[str, Any]:
    echo, logprobs = _echo(request, index), None
    parts = [block.part for block in reply.blocks]
    if request.logprobs is not None:
        tokens = [token for block in reply.blocks for token in block.logprobs]
        logprobs = _write_logprobs(tokens, len(echo), request.logprobs)
    return {
        "index": index,
        "text": echo + "".join(part.arguments if isinstance(part, ToolCall) else part.text for part in parts),
        "logprobs": logprobs,
        "finish_reason": _finish(reply.finished),
    }


def _finish(finished: Finished) -> str:
    return "stop" if finished.reason == "tool_calls" else FINISH_REASONS[finished.reason]


def _echo(request: Request, choice: int) -> str:
    prompt = request.prompts[choice // request.n] if request.echo else ""
    return prompt if isinstance(prompt, str) else ""


def _write_logprobs(tokens: Iterable[TokenLogprob], offset: int, top: int) -> dict[str, Any]:
    """`offset` is where in the text the first token stands; alternatives are listed only where some were asked for."""
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    for token in tokens:
        out["tokens"].append(token.token)
        out["token_logprobs"].append(max(token.logprob, MIN_LOGPROB))
        out["text_offset"].append(offset)
        offset += len(token.token)
        if top:
            alternatives = token.top or (token,)
            out["top_logprobs"].append({t.token: max(t.logprob, MIN_LOGPROB) for t in alternatives})
    return out


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte both kinds of request get the same HTTP error
    request: Request | None = None,  # noqa: ARG001
) -> WireError:
    return write_http_error(error, trace, overflow_param="prompt")


# --- the stream -----------------------------------------------------------------------------------------------------


class _Lane:
    """One choice: the bytes before its text, where in its text it stands, and its usage once it has ended."""

    __slots__ = ("before", "offset", "usage")

    def __init__(self, before: bytes, offset: int) -> None:
        self.before, self.offset = before, offset
        self.usage: Usage | None = None


class CompletionsWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._trace = request, trace
        self._fields: dict[str, Any] = {}
        self._lanes: dict[int, _Lane] = {}
        self._close = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._plain = b',"logprobs":null,"finish_reason":null' + self._close
        self._failed = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        if self._failed:
            return b""
        if isinstance(event, BlockDelta):
            return self._delta(event, self._lanes[choice])
        if isinstance(event, Started):
            return self._start(event, choice)
        if isinstance(event, Finished):
            return self._finish(event, self._lanes[choice])
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        """Usage and [DONE]. A stream whose answers have not all ended must not look as if they had."""
        if self._failed:
            return b""
        usages = [self._lanes[choice].usage for choice in sorted(self._lanes)]
        ended = [usage for usage in usages if usage is not None]
        if not ended or len(ended) < len(usages):
            return self._fail(Incomplete("the answer broke off before its end", id=self._trace))
        if not self._request.include_usage:
            return DONE
        usage = write_usage(ended[:: self._request.n], ended)
        return frame(encode(self._fields | {"choices": [], "usage": usage})) + DONE

    def _start(self, event: Started, choice: int) -> bytes:
        if not self._fields:
            self._fields = _fields(event)
        before = b"data: " + encode(self._fields)[:-1] + b',"choices":[{"index":%d,"text":' % choice
        echo = _echo(self._request, choice)
        self._lanes[choice] = _Lane(before, len(echo))
        return before + _encode(echo) + self._plain if echo else b""

    def _delta(self, event: BlockDelta, lane: _Lane) -> bytes:
        if not event.logprobs or self._request.logprobs is None:
            return lane.before + _encode(event.text) + self._plain if event.text else b""
        logprobs = encode(_write_logprobs(event.logprobs, lane.offset, self._request.logprobs))
        lane.offset += sum(len(token.token) for token in event.logprobs)
        return lane.before + _encode(event.text) + b',"logprobs":' + logprobs + b',"finish_reason":null' + self._close

    def _finish(self, event: Finished, lane: _Lane) -> bytes:
        lane.usage = event.usage
        return lane.before + b'"","logprobs":null,"finish_reason":"%s"' % _finish(event).encode() + self._close

    def _fail(self, error: ModelyardError) -> bytes:
        self._failed = True
        return frame(encode({"error": error_body(error, "prompt")}))


def writer(request: Request, trace: str) -> CompletionsWriter:
    return CompletionsWriter(request, trace)
