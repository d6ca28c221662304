"""Log probabilities in Chat's shape: `{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from modelyard.core.events import TokenLogprob
from modelyard.protocols.common.openai_fields import MIN_LOGPROB


class TokenBody(Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[TokenBody] | None = None


class LogprobsBody(Struct):
    content: list[TokenBody] | None = None


def write_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [_token(t) | {"top_logprobs": [_token(alternative) for alternative in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    logprob = max(token.logprob, MIN_LOGPROB)
    return {"token": token.token, "logprob": logprob, "bytes": list(token.bytes) if token.bytes else None}


def read_logprobs(body: LogprobsBody | None) -> tuple[TokenLogprob, ...]:
    if body is None or not body.content:
        return ()
    return tuple(_read_token(token) for token in body.content)


def _read_token(token: TokenBody) -> TokenLogprob:
    return TokenLogprob(
        token.token,
        MIN_LOGPROB if token.logprob is None else token.logprob,
        bytes(byte & 255 for byte in token.bytes or ()),
        tuple(_read_token(alternative) for alternative in token.top_logprobs or ()),
    )
