"""Chat bodies for the tests: a request that says little, with whatever a test wants to say."""

from __future__ import annotations

from typing import Any

import msgspec

from modelyard.core.request import Request
from modelyard.protocols import openai_chat

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": HELLO} | fields)


def read(**fields: Any) -> Request:
    return openai_chat.read_request(body(**fields), {})


def written(request: Request) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(openai_chat.write_request(request))
    return out
