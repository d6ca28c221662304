"""`POST /api/generate`: one prompt in, its continuation out.

    {"model": "m", "created_at": …, "response": "Hi", "done": false}
    {…, "response": "", "done": true, "done_reason": "stop", "context": [1, …], "total_duration": 4883583458, …}

The prompt is a user's message; with `raw`, or if the model has no chat template, it is what the model reads, and with
`suffix` the text before a gap. The
`context` of a reply carries the conversation so far in numbers, and a client that sends it back continues there. It is
not made of token ids, so that it survives a change of the model or its template, and has no images.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Finished, Reply
from modelyard.core.request import Infill, Message, Request, Text
from modelyard.protocols.common.extensions import Ignored, ignored_fields, present
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.ollama.errors import write_error
from modelyard.protocols.ollama.fields import Images, OllamaBody, read_images, write_logprobs
from modelyard.protocols.ollama.reply import LineWriter, write_end, write_start
from modelyard.protocols.ollama.request import read_common

NAME = "ollama_generate"
PATHS: tuple[str, ...] = ("/api/generate",)

__all__ = ["NAME", "PATHS", "read_request", "write_error", "write_reply", "writer"]


# --- the request ------------------------------------------------------------------------------------------------------


class OllamaGenerateBody(OllamaBody):
    prompt: limits.Text | None = None
    suffix: limits.Text | None = None
    system: limits.Text | None = None
    template: Ignored = None  # the configuration sets the template of a model
    context: limits.TokenIds | None = None
    raw: bool | None = None
    images: Images | None = None
    height: Ignored = None  # these three of a picture to generate; without effect
    steps: Ignored = None
    width: Ignored = None


_decoder = msgspec.json.Decoder(OllamaGenerateBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    parsed = decode(_decoder, body)
    common = read_common(parsed, headers)
    warnings = [*common.warnings, *ignored_fields(parsed)]
    prompt, is_bare = parsed.prompt or "", parsed.raw is True or bool(parsed.suffix)
    if is_bare and parsed.images:
        raise InvalidRequest("images belong to a message: leave raw and suffix out", param="images")
    load_only = not prompt and not parsed.images and not parsed.suffix
    messages = () if is_bare or load_only else _read_messages(parsed, warnings)
    return replace(
        common,
        messages=messages,
        prompts=(prompt,) if is_bare and not load_only else (),
        infill=Infill(parsed.suffix) if parsed.suffix else None,
        load_only=load_only,
        is_text=bool(messages),
        warnings=tuple(warnings),
    )


def _read_messages(body: OllamaGenerateBody, warnings: list[str]) -> tuple[Message, ...]:
    """The context's own system text counts only where the request has none."""
    past = _read_context(body.context, warnings) if body.context else ()
    if body.system:
        past = (Message("system", (Text(body.system),)), *(m for m in past if m.role != "system"))
    text = (Text(body.prompt),) if body.prompt else ()
    return (*past, Message("user", (*text, *read_images(body.images))))


# --- the context ------------------------------------------------------------------------------------------------------

_MAGIC = (2_718_281_828 % 2**31, 1)  # no token id of any vocabulary, and a version
_MAX_CONTEXT = 16 << 20  # bytes; a small hostile list must not decompress without limit


class PastTurn(msgspec.Struct, array_like=True):
    role: Literal["system", "user", "assistant"]
    text: str


_context_decoder = msgspec.json.Decoder(list[PastTurn])


def write_context(request: Request, text: str) -> list[int] | None:
    """None for a bare prompt, as with Ollama."""
    if request.prompts or request.load_only:
        return None
    turns = [PastTurn(m.role, _text(m)) for m in request.messages if m.role in ("system", "user", "assistant")]
    return [*_MAGIC, *zlib.compress(encode([*turns, PastTurn("assistant", text)]), 1)]


def _text(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, Text))


def _read_context(context: Sequence[int], warnings: list[str]) -> tuple[Message, ...]:
    if tuple(context[:2]) != _MAGIC:
        warnings.append("field_ignored:context is not from this server")
        return ()
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(bytes(context[2:]), _MAX_CONTEXT)
        turns = _context_decoder.decode(packed) if unpacker.eof else []
    except (ValueError, zlib.error, msgspec.DecodeError):
        raise InvalidRequest(
            "context is damaged: send the one of a reply unchanged, or none", param="context"
        ) from None
    return tuple(Message(turn.role, (Text(turn.text),)) for turn in turns)


# --- the reply --------------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    reply = replies[0]
    body: dict[str, Any] = write_start(reply) | {"response": reply.text}
    if reply.thinking:
        body["thinking"] = reply.thinking
    body |= write_end(reply.finished, request) | present(context=write_context(request, reply.text))
    if request.logprobs is not None:
        tokens = [token for block in reply.blocks if isinstance(block.part, Text) for token in block.logprobs]
        body["logprobs"] = write_logprobs(tokens)
    return encode(body)


class GenerateLineWriter(LineWriter):
    text_start = b',"response":'
    thinking_start = b',"response":"","thinking":'
    delta_end = b',"done":false}\n'

    def __init__(self, request: Request, trace: str) -> None:
        super().__init__(request, trace)
        self._text: list[str] = []

    def empty(self) -> dict[str, Any]:
        return {"response": ""}

    def note_text(self, text: str) -> None:
        self._text.append(text)

    def last_fields(self, event: Finished) -> dict[str, Any]:  # noqa: ARG002 - the reason changes nothing
        return present(context=write_context(self._request, "".join(self._text)))


def writer(request: Request, trace: str) -> GenerateLineWriter:
    return GenerateLineWriter(request, trace)
