"""`POST /completions` without /v1: OpenAI's body and reply for clients whose base URL lacks /v1, llama-server's own for
its clients. Only llama-server's have no `model`, or `n_predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Raw, Struct

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Reply
from modelyard.core.protocol import EventWriter, WireError
from modelyard.core.request import Request
from modelyard.protocols import llama_completion, openai_completions
from modelyard.protocols.common.json import decode

NAME = "bare_completions"
PATHS: tuple[str, ...] = ("/completions",)


class DialectKeys(Struct):
    model: Raw | None = None
    n_predict: Raw | None = None


_decoder = msgspec.json.Decoder(DialectKeys)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    keys = decode(_decoder, body)
    is_openai = keys.model is not None and keys.n_predict is None
    return (openai_completions if is_openai else llama_completion).read_request(body, headers)


def write_reply(replies: list[Reply], request: Request) -> bytes:
    reply: bytes = _dialect(request).write_reply(replies, request)
    return reply


def write_error(
    error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
) -> WireError:
    return openai_completions.write_error(error, trace=trace, streaming=streaming, request=request)


def writer(request: Request, trace: str) -> EventWriter:
    made: Any = _dialect(request).writer(request, trace)
    return made  # type: ignore[no-any-return]


def _dialect(request: Request) -> ModuleType:
    return llama_completion if request.dialect == llama_completion.DIALECT else openai_completions
