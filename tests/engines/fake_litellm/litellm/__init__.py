"""A fake of the LiteLLM library: it answers the calls of the engine in the shapes of the library.

The model name chooses the behaviour: `says/TEXT`, `hangs/TEXT`, `breaks/TEXT`, `refuses/STATUS`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

telemetry = True
suppress_debug_info = False
calls: list[dict[str, Any]] = []
closed: list[str] = []


class APIError(Exception):
    """As in the library: a status, a message, and the headers of the provider."""

    def __init__(self, status_code: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status_code, self.message = status_code, f"litellm.APIError: {message}"
        self.headers = None
        self.litellm_response_headers = headers


class ModelResponseStream:
    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump_json(self, *, exclude_none: bool) -> str:
        assert exclude_none
        return json.dumps(self._fields)


def _chunk(delta: dict[str, Any], finish: str | None = None) -> ModelResponseStream:
    choice = {"index": 0, "delta": delta} | ({"finish_reason": finish} if finish else {})
    return ModelResponseStream(id="chatcmpl-1", model="theirs", created=1, choices=[choice])


class CustomStreamWrapper:
    def __init__(self, how: str, text: str) -> None:
        self._how, self._text = how, text
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        end = [_chunk({}, "stop"), ModelResponseStream(id="chatcmpl-1", choices=[], usage=usage)]
        self._chunks = [_chunk({"role": "assistant", "content": text}), *(end if how == "says" else [])]

    def __aiter__(self) -> CustomStreamWrapper:
        return self

    async def __anext__(self) -> ModelResponseStream:
        if self._chunks:
            return self._chunks.pop(0)
        if self._how == "hangs":
            await asyncio.Event().wait()
        if self._how == "breaks":
            raise APIError(503, "the provider is gone", {})
        raise StopAsyncIteration

    async def aclose(self) -> None:
        closed.append(self._text)


async def acompletion(model: str, messages: list[Any], stream: bool = False, **more: Any) -> CustomStreamWrapper:
    calls.append({"model": model, "messages": messages, "stream": stream, **more})
    how, _, rest = model.partition("/")
    if how == "refuses" and not (rest.endswith("once") and len(calls) > 1):
        raise APIError(int(rest.removesuffix("once")), "no", {"retry-after": "3"} if rest == "429" else {})
    return CustomStreamWrapper("says" if how == "refuses" else how, rest)
