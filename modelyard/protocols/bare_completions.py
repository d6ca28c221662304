"""`POST /completions` without /v1: OpenAI's body and reply for clients whose base URL lacks /v1, llama-server's own for
its clients. Only llama-server's have no `model`, or `n_predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.events import Reply
from modelyard.core.protocol import EventWriter
from modelyard.core.request import Request
from modelyard.protocols import llama_completion, openai_completions
from modelyard.protocols.common.json import decode

NAME = "bare_completions"
PATHS: tuple[str, ...] = ("/completions",)


class DialectKeys(Struct):
    model: Any = None
    n_predict: Any = None


_decoder = msgspec.json.Decoder(DialectKeys)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    keys = decode(_decoder, body)
    if keys.model is not None and keys.n_predict is None:
        return openai_completions.read_request(body, headers)
    return llama_completion.read_request(body, headers)


def write_reply(replies: list[Reply], request: Request) -> bytes:
    if request.dialect == llama_completion.DIALECT:
        return llama_completion.write_reply(replies, request)
    return openai_completions.write_reply(replies, request)


write_error = openai_completions.write_error


def writer(request: Request, trace: str) -> EventWriter:
    if request.dialect == llama_completion.DIALECT:
        return llama_completion.writer(request, trace)
    return openai_completions.writer(request, trace)
