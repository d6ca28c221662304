"""One HTTP request as the edge knows it, from the guard at the door to the handler; and the plain ways to answer it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from msgspec import Struct, field
from starlette.types import Receive, Scope, Send

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.core.protocol import WireError
from modelyard.core.request import Caller
from modelyard.http.cycle import behind
from modelyard.http.json_limits import json_fault
from modelyard.http.settings import HttpSettings
from modelyard.telemetry.cache_diagnostics import CacheReuse

TIMEOUT = "x-modelyard-timeout"
_LONGEST_S = 7 * 86400
_KEY = "modelyard.visit"
INLINE_BYTES = 1 << 18  # looking through so many takes about a millisecond

P = ParamSpec("P")
T = TypeVar("T")


async def aside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does the work in a thread where `size` bytes make it long: on the loop it would hold up every stream."""
    if size > INLINE_BYTES:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


class RequestContext(Struct):
    """`key` names who asks; `status` is what was answered (0 until then); `path` is without a trailing slash.

    `error` is the code of what went wrong, if anything did: noted by whoever tells the client, counted by the guard.
    `reuse` is what a cache had of the prompt, where that is known.
    """

    trace: str
    path: str
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.perf_counter)
    key: str = ""
    admin: bool = False
    allow_remote: bool = False
    status: int = 0
    error: str = ""
    reuse: CacheReuse | None = None

    @property
    def caller(self) -> Caller:
        return Caller(
            trace=self.trace,
            endpoint=self.path,
            key=self.key,
            allow_remote=self.allow_remote,
            arrived=self.arrived,
            deadline=_deadline(self.headers.get(TIMEOUT)),
            idempotency=self.headers.get("idempotency-key"),
        )

    def failed(self, error: ModelyardError) -> None:
        self.error = self.error or error.code or error.kind

    def enter(self, scope: Scope) -> None:
        scope[_KEY] = self

    @staticmethod
    def of(scope: Scope) -> RequestContext:
        visit: RequestContext = scope[_KEY]
        return visit


def _deadline(told: str | None) -> float | None:
    """The unix time until which the client wants its answer; most never say."""
    if told is None:
        return None
    try:
        seconds = float(told)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidRequest(f"{TIMEOUT} takes seconds, more than 0 and up to {_LONGEST_S}, got {told[:40]!r}")
    return time.time() + seconds


async def read_body(receive: Receive, visit: RequestContext, settings: HttpSettings) -> bytes:
    """The whole body, or an error as soon as it is known to be too large, packed, or too deep."""
    if (body := body_at_hand(receive, visit, settings)) is not None:
        return body
    limit, depth = settings.max_body_bytes, settings.max_json_depth
    body = await _received(receive, visit.headers.get("content-length", ""), limit)
    _check(len(body), limit, await aside(len(body), json_fault, body, depth))
    return body


def body_at_hand(receive: Receive, visit: RequestContext, settings: HttpSettings) -> bytes | None:
    """The same where all of it is there, and not long; None, with nothing taken: it has to be waited for."""
    if visit.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise InvalidRequest("compressed request bodies are not accepted; send the JSON as it is", code="encoding")
    cycle = behind(receive)
    body = None if cycle is None else cycle.whole_body(INLINE_BYTES)
    if body is not None:
        _check(len(body), settings.max_body_bytes, json_fault(body, settings.max_json_depth))
    return body


def _check(size: int, limit: int, fault: str | None) -> None:
    if size > limit:
        raise _too_large(limit)
    if fault is not None:
        raise InvalidRequest(fault, code="invalid_json")


async def _received(receive: Receive, declared: str, limit: int) -> bytes:
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    return await _rest(receive, body, limit) if message.get("more_body") else body


async def _rest(receive: Receive, first: bytes, limit: int) -> bytes:
    chunks, size = [first], len(first)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client went away before the body was complete", code="disconnected")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(chunks)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than the limit of {limit} bytes (http.max_body_bytes)")


def _head(visit: RequestContext, content_type: bytes) -> bytes:
    """The lines that every reply has. Both SDKs look for the request's id, each under a name of its own."""
    trace = visit.trace.encode()
    lines = b"content-type: %b\r\nx-request-id: req_%b\r\nrequest-id: req_%b" % (content_type, trace, trace)
    return lines if visit.reuse is None else b"%b\r\nx-modelyard-cache: %b" % (lines, visit.reuse.header.encode())


def _pairs(head: bytes) -> list[tuple[bytes, bytes]]:
    """The same lines as ASGI wants them."""
    parts = [line.partition(b": ") for line in head.split(b"\r\n")]
    return [(name, value) for name, _, value in parts]


def headers(visit: RequestContext, content_type: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [*_pairs(_head(visit, content_type)), *more]


async def respond(send: Send, visit: RequestContext, status: int, body: bytes) -> None:
    """JSON, as a whole."""
    visit.status = status
    head = b"%b\r\ncontent-length: %d" % (_head(visit, b"application/json"), len(body))
    if (cycle := behind(send)) is not None and cycle.reply(status, head, body):
        return
    await send({"type": "http.response.start", "status": status, "headers": _pairs(head)})
    await send({"type": "http.response.body", "body": body})


async def respond_error(send: Send, visit: RequestContext, error: WireError) -> None:
    visit.status = error.status
    more = [(k.encode(), v.encode()) for k, v in error.headers.items() if k not in ("x-request-id", "request-id")]
    more.append((b"content-length", str(len(error.body)).encode()))
    if error.status == 413:
        more.append((b"connection", b"close"))  # the rest of the body is not worth reading
    start = headers(visit, error.content_type.encode(), *more)
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": error.body})
