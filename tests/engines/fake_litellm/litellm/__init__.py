"""A fake of the LiteLLM library: it answers the calls of the engine in the shapes of the library.

The model name chooses the behaviour: `says/TEXT`, `hangs/TEXT`, `breaks/TEXT`, `refuses/STATUS`, and `fails/CAUSE` for
what the library reports as 500 although no provider said so.
"""

from __future__ import annotations

import asyncio
import json
import socket
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


def _fail(cause: str) -> None:
    """As in the library: the message may hold a traceback, and the cause is the context of the error."""
    folder = "/home/somebody/site-packages/litellm/main.py"
    trace = f'Traceback (most recent call last):\n  File "{folder}", line 1, in acompletion\n'
    if cause == "bug":
        raise TypeError(f"{folder} got an unexpected argument")
    if cause == "request":
        raise APIError(400, f"the model is unknown\n{trace}", {})
    try:
        if cause == "package":
            raise ModuleNotFoundError("No module named 'mcp'", name="mcp")
        if cause == "name":
            raise socket.gaierror(-2, "Name or service not known")
        raise ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)")
    except OSError as error:
        raise APIError(500, f"Cannot connect to host a.b ssl:<ssl.SSLContext object at 0x7f> [{error}]", {})  # noqa: B904
    except ImportError as error:
        raise APIError(500, f"{error}\n{trace}", {})  # noqa: B904


async def acompletion(model: str, messages: list[Any], stream: bool = False, **more: Any) -> CustomStreamWrapper:
    calls.append({"model": model, "messages": messages, "stream": stream, **more})
    how, _, rest = model.partition("/")
    if how == "refuses" and not (rest.endswith("once") and len(calls) > 1):
        raise APIError(int(rest.removesuffix("once")), "no", {"retry-after": "3"} if rest == "429" else {})
    if how == "fails":
        _fail(rest)
    return CustomStreamWrapper("says" if how == "refuses" else how, rest)
