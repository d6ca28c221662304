"""Forwarding a request to another server: its answer as events, retries before the first byte, and its errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, Unauthenticated, Unavailable, Unsupported
from modelyard.core.events import reply_events
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.engines.upstream.client import HttpReply, UpstreamAddress, UpstreamHttpClient
from modelyard.engines.upstream.jobs import Emit

_DRAIN_S = 1.0  # a stream read to its end leaves a connection that can be reused

# --- retries ----------------------------------------------------------------------------------------------------------

_TRANSIENT = frozenset({"rate_limited", "overloaded", "unavailable", "timeout", "internal"})
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_AUTH_FAILED = "upstream_auth_failed"


class RetryableError(Exception):
    """The attempt failed before the first byte of the answer. `has_retry_after`: the upstream named a delay."""

    def __init__(self, error: ModelyardError, has_retry_after: bool = False) -> None:
        super().__init__(error.message)
        self.error, self.has_retry_after = error, has_retry_after


class RetryPolicy(Struct, frozen=True):
    """Allows `max_retries` attempts after the first, and no delay longer than `max_delay` seconds."""

    max_retries: int = 0
    max_delay: float = _MAX_DELAY_S

    def delay(self, failure: RetryableError, attempts: int) -> float | None:
        """Seconds until the next attempt; None: give up. The delay doubles unless the upstream names one."""
        error = failure.error
        if attempts > self.max_retries or error.kind not in _TRANSIENT or error.code == _AUTH_FAILED:
            return None
        delay = error.retry_after if failure.has_retry_after else None
        delay = _FIRST_DELAY_S * 2 ** (attempts - 1) if delay is None else delay
        return delay if delay <= self.max_delay else None


async def with_retries(attempt: Callable[[], Awaitable[None]], policy: RetryPolicy) -> None:
    """Repeats the attempt while it raises RetryableError; raises the error of the last one."""
    attempts = 1
    while True:
        try:
            return await attempt()
        except RetryableError as failure:
            delay = policy.delay(failure, attempts)
            if delay is None:
                raise failure.error from failure.__cause__
        await asyncio.sleep(delay)
        attempts += 1


# --- forwarding -------------------------------------------------------------------------------------------------------


class Upstream:
    """Another server. Create it on the event loop that uses it."""

    def __init__(self, address: UpstreamAddress, retries: RetryPolicy = RetryPolicy()) -> None:
        self.address, self._retries = address, retries
        self._http = UpstreamHttpClient(address)

    async def close(self) -> None:
        await self._http.close()

    async def stream_chat(self, path: str, body: bytes, protocol: WireProtocol, emit: Emit) -> None:
        """Emits the events of the answer. Retries only before its first byte."""

        async def attempt() -> None:
            async with await self._post(path, body) as reply:
                if reply.status >= 300:
                    raise await self._refusal(reply, protocol)
                if reply.headers.get("content-type", "").startswith("application/json"):
                    await emit(list(reply_events(protocol.read_reply(await reply.read()))))
                else:
                    await _emit_events(reply.chunks(), protocol, emit)

        await with_retries(attempt, self._retries)

    async def _post(self, path: str, body: bytes) -> HttpReply:
        try:
            return await self._http.post(path, body)
        except ModelyardError as error:
            raise RetryableError(error) from error.__cause__

    async def _refusal(self, reply: HttpReply, protocol: WireProtocol) -> RetryableError:
        try:
            body = await reply.read()
        except ModelyardError:
            body = b""  # the status is enough
        error = protocol.read_error(reply.status, reply.headers, body)
        return RetryableError(map_auth_error(error, self.address), "retry-after" in reply.headers)

    async def request_json(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Status and JSON of a short request; None if the reply is not JSON."""
        status, content = await self._http.request(method, path, body)
        try:
            return status, msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return status, None


async def _emit_events(chunks: AsyncIterator[bytes], protocol: WireProtocol, emit: Emit) -> None:
    reader = protocol.reader()
    async for chunk in chunks:
        if (events := reader.feed(chunk)) and await emit(events):
            break
    else:
        await emit(reader.finish())
        return
    try:
        async with asyncio.timeout(_DRAIN_S):
            async for _ in chunks:
                pass
    except (TimeoutError, ModelyardError):
        return  # the answer is complete


def map_auth_error(error: ModelyardError, address: UpstreamAddress) -> ModelyardError:
    """A rejected key is the gateway's: the client's own key is valid, so the client gets no 401 or 403."""
    if isinstance(error, Unauthenticated):
        message = f"{address.name} rejected the key of this gateway: check {address.key_source}"
        return Unavailable(message, code=_AUTH_FAILED)
    if isinstance(error, Forbidden):
        return Unavailable(f"{address.name} rejected this gateway: {error.message}", code=_AUTH_FAILED)
    return error


def read_api_key(model: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise InvalidRequest(
            f"the model {model!r} takes its key from the environment variable {variable!r}, which is not set",
            code="remote_key_missing",
        )
    return key


def reject_bare_prompts(request: Request) -> None:
    if request.prompts:
        raise Unsupported(
            "this model takes conversations only: send messages, not a bare prompt", code="completions_unsupported"
        )


def append_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Appends fields to a JSON object without parsing it: it may hold a long conversation."""
    return body[:-1] + b"," + msgspec.json.encode(fields)[1:] if fields else body
