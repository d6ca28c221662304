"""The context of one HTTP request, reading its body, and sending a whole reply."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar
from urllib.parse import quote

from msgspec import Struct, field
from starlette.types import Receive, Scope, Send

from modelyard.accounts.admission import RequestReservation
from modelyard.accounts.owner import Role
from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.core.events import CacheReuse, Finished
from modelyard.core.limits import MAX_WARNINGS
from modelyard.core.protocol import INLINE_BYTES, WireError
from modelyard.core.request import Caller, Priority
from modelyard.gateway.request_work import run_in_request_thread
from modelyard.gateway.stream import Stream
from modelyard.http.routes import Row
from modelyard.http.settings import HttpSettings
from modelyard.router.router import Target
from modelyard.telemetry.history import SkippedModel

SHUTTING_DOWN = "shutting_down"
TIMEOUT_HEADER = "x-modelyard-timeout"
GOOGLE_KEY = "x-goog-api-key"  # of Google's clients
_MAX_TIMEOUT_S = 7 * 86400
_PATH_CHARS = 200
CONTEXT_KEY = "modelyard.context"  # in the scope: its RequestContext

Headers = list[tuple[bytes, bytes]]
P = ParamSpec("P")
T = TypeVar("T")


class RequestContext(Struct):
    """`path` has no trailing slash, `row` is its row of the route table. `key` names the API key. `status` is the
    reply's status, 0 until it is sent.

    `error` is the code of the error that the client was sent; the middleware counts it. `reuse`, `ignored`,
    `not_enforced`, `compacted`, `fallback`, `stopped` and, if a rule chose the model, `target` become response headers.
    """

    trace: str
    path: str
    headers: Mapping[str, str]
    row: Row | None = None
    arrived: float = field(default_factory=time.perf_counter)
    key: str = ""
    role: Role = "member"
    allow_remote: bool = False
    forbid_remote: bool = False
    allowed: tuple[str, ...] = ()
    priority: Priority | None = None
    status: int = 0
    error: str = ""
    reuse: CacheReuse | None = None
    ignored: tuple[str, ...] = ()
    not_enforced: tuple[str, ...] = ()
    fallback: str = ""
    stopped: str = ""
    compacted: str = ""
    target: Target | None = None
    reservation: RequestReservation | None = None

    @staticmethod
    def of(scope: Scope) -> RequestContext:
        context: RequestContext = scope[CONTEXT_KEY]
        return context

    def caller(self) -> Caller:
        headers = self.headers
        timeout = headers.get(TIMEOUT_HEADER)
        return Caller(
            trace=self.trace,
            endpoint=self.path,
            key=self.key,
            allow_remote=self.allow_remote,
            forbid_remote=self.forbid_remote,
            allowed=self.allowed,
            arrived=self.arrived,
            deadline=None if timeout is None else _deadline(timeout),
            idempotency=headers.get("idempotency-key"),
            priority=self.priority,
            reservation=self.reservation,
        )

    def release(self) -> None:
        """Return what the request has reserved."""
        if self.reservation is not None:
            self.reservation.release()

    def failed(self, error: ModelyardError) -> None:
        self.error = self.error or error.code or error.kind

    def finished(self, last: Finished) -> None:
        """What the protocols have no word for."""
        if last.reason == "repetition":
            self.stopped = last.reason

    def read_result(self, source: Stream) -> None:
        """Take over what the response headers and the log line report about a stream."""
        self.reuse, self.target, self.not_enforced = source.reuse, source.prepared.target, source.prepared.not_enforced
        self.ignored = (*source.prepared.ignored, *source.ignored)
        self.compacted = source.prepared.compacted
        if skipped := source.prepared.skipped:
            self.fallback = fallback_header(skipped, source.prepared.model.name)

    def response_headers(self, content_type: bytes) -> Headers:
        """The headers of every reply. The OpenAI and Anthropic SDKs read the request id from different ones."""
        trace = b"req_" + self.trace.encode()
        headers: Headers = [(b"content-type", content_type), (b"x-request-id", trace), (b"request-id", trace)]
        if self.reuse is not None:
            headers.append((b"x-modelyard-cache", self.reuse.header.encode()))
        if self.target is not None and (rule := self.target.rule):
            headers += [(b"x-modelyard-model", _quoted(self.target.model)), (b"x-modelyard-route", _quoted(rule))]
        if self.fallback:
            headers.append((b"x-modelyard-fallback", self.fallback.encode()))
        if self.compacted:
            headers.append((b"x-modelyard-compacted", self.compacted.encode()))
        if self.ignored:
            headers.append((b"x-modelyard-ignored", _listed(self.ignored)))
        if self.stopped:
            headers.append((b"x-modelyard-stopped", self.stopped.encode()))
        if self.not_enforced:
            headers.append((b"x-modelyard-not-enforced", _listed(self.not_enforced)))
        return headers


def fallback_header(skipped: Sequence[SkippedModel], model: str) -> str:
    """`from=a; reason=overloaded; to=b`, once for each model that could not answer."""
    names = [quote(each.model, safe="/:@") for each in skipped] + [quote(model, safe="/:@")]
    steps = zip(skipped, names, names[1:], strict=False)
    return ", ".join(f"from={name}; reason={quote(each.reason)}; to={to}" for each, name, to in steps)


def _listed(paths: Sequence[str]) -> bytes:
    """As many as a header has room for. The names in them are the client's."""
    shown = [quote(path[:_PATH_CHARS], safe="/$ ") for path in paths[:MAX_WARNINGS]]
    return ", ".join([*shown, *(["..."] if len(paths) > MAX_WARNINGS else [])]).encode()


def _quoted(text: str) -> bytes:
    return quote(text, safe="/:@*?![] |").encode()


def _deadline(value: str) -> float:
    """Until when the client waits for its reply, on the monotonic clock: a jump of the wall clock ends no request."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} takes seconds, more than 0 and up to {_MAX_TIMEOUT_S}, got {value[:40]!r}"
        )
    return time.monotonic() + seconds


async def read_body(
    receive: Receive, context: RequestContext, settings: HttpSettings, limit: int | None = None
) -> bytes:
    """The whole body. Raise as soon as it is known to be too large, compressed, or too deeply nested."""
    if context.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise InvalidRequest("compressed request bodies are not accepted; send the JSON as it is", code="encoding")
    limit, declared = limit or settings.max_body_bytes, context.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    reserve = (lambda _: None) if context.reservation is None else context.reservation.grow
    message = await receive()
    body: bytes = message.get("body", b"")
    reserve(len(body))
    if message.get("more_body"):
        chunks, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the client disconnected before the body was complete", code="disconnected")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise _too_large(limit)
            reserve(len(chunks[-1]))
        body = b"".join(chunks)
    if len(body) > limit:
        raise _too_large(limit)
    depth = settings.max_json_depth
    is_large = len(body) > INLINE_BYTES
    fault = await run_in_request_thread(json_fault, body, depth) if is_large else json_fault(body, depth)
    if fault is not None:
        raise InvalidRequest(fault, code="invalid_json")
    return body


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than the limit of {limit} bytes (http.max_body_bytes)")


async def send_json(send: Send, context: RequestContext, status: int, body: bytes) -> None:
    context.status = status
    headers = context.response_headers(b"application/json")
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, context: RequestContext, error: WireError) -> None:
    context.status = error.status
    headers = context.response_headers(error.content_type.encode())
    headers += [(k.encode(), v.encode()) for k, v in error.headers.items() if k not in ("x-request-id", "request-id")]
    headers.append((b"content-length", str(len(error.body)).encode()))
    if error.status == 413 or context.error == SHUTTING_DOWN:  # do not read the rest of the body, nor another request
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})


# --- JSON limits: depth and number of values, checked before parsing --------------------------------------------------
#
# A parser creates an object for every value and blocks the event loop: two bytes of a hostile body become sixty.

MAX_CONTAINERS = 500_000  # ten thousand tools have about a tenth of them
MAX_VALUES = 2_000_000  # as many token ids as a batch of embeddings may need

_NOT_STRUCTURE = bytes(i for i in range(256) if i not in b"[]{},")
_AS_PARENTHESES = bytes.maketrans(b"[]{}", b"()()")
_SLICE = 1 << 18  # bytes per C call, which holds the GIL for a few milliseconds


def json_fault(body: bytes, limit: int) -> str | None:
    """What is wrong with the structure, or None. The parser checks whether brackets match."""
    few = len(body) <= MAX_VALUES or body.count(b",") <= MAX_VALUES  # a body has at most as many commas as bytes
    if few and body.count(b"[") + body.count(b"{") <= limit:
        return None
    found: list[bytes] = []
    opened = values = 0
    for marks in _structure(body):
        opened, values = opened + marks.count(b"("), values + marks.count(b",")
        if opened > MAX_CONTAINERS:
            return f"the JSON body has more than {MAX_CONTAINERS} arrays and objects"
        if values > MAX_VALUES:
            return f"the JSON body has more than {MAX_VALUES} values"
        found.append(marks.replace(b",", b""))
    return f"the JSON body is nested more than {limit} levels deep" if _too_deep(b"".join(found), limit) else None


def _structure(body: bytes) -> Iterator[bytes]:
    """The commas and brackets outside strings, slice by slice; all brackets as parentheses.

    Escapes are removed first, so that every quote is a delimiter. Outside strings a backslash is a parse error.
    """
    carried = b""  # an open string's quote, and half an escape
    for at in range(0, len(body), _SLICE):
        piece = carried + body[at : at + _SLICE]
        half = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece.removesuffix(half).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        carried = half if len(parts) % 2 else b'"' + half
        yield b"".join(parts[::2]).translate(_AS_PARENTHESES, _NOT_STRUCTURE)


def _too_deep(brackets: bytes, limit: int) -> bool:
    """Each round removes the innermost level, until no bracket opens or none closes."""
    for done in range(limit):
        rest = brackets.replace(b"()", b"")
        if len(rest) == len(brackets):
            return rest.count(b"(") > limit - done
        brackets = rest
    return b"(" in brackets
