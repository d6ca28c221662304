"""The middleware around every request: assigns an id, authenticates, counts and logs."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.accounts.admission import Admission
from modelyard.core.errors import ModelyardError, NotFound, TooLarge, Unavailable
from modelyard.http.auth import GOOGLE_KEY, Authenticator, is_workbench
from modelyard.http.connection import user_of
from modelyard.http.errors import as_modelyard_error, write_error
from modelyard.http.request_context import (
    CONTEXT_KEY,
    GEMINI_METHODS,
    SHUTTING_DOWN,
    RequestContext,
    is_gemini,
    send_error,
)
from modelyard.http.settings import HttpSettings
from modelyard.processes.sandbox import current_client
from modelyard.telemetry.log import current_trace, log_event, log_request
from modelyard.telemetry.masking import mask_keys
from modelyard.telemetry.metrics import Metrics

log = logging.getLogger("modelyard.http")

# Metrics are labelled with the route, not the client's path: every path would be a new time series.
_ROUTES = frozenset(
    {
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/batches",
        "/v1/batches",
        "/v1/files",
        "/upload/v1beta/files",
        "/v1beta/files",
        "/v1/conversations",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/fim/completions",
        "/infill",
        "/completion",
        "/completions",
        "/embedding",
        "/v1/score",
        "/v1/chat/completions/input_tokens",
        "/props",
        "/slots",
        "/lora-adapters",
        "/version",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/tags",
        "/api/ps",
        "/api/show",
        "/api/version",
        "/api/pull",
        "/api/delete",
        "/api/copy",
        "/api/create",
        "/v1beta/models",
        "/api/v0/models",
        "/v1/models",
        "/models",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/",
    }
)
_UNPREFIXED = frozenset({"/chat/completions", "/embeddings", "/rerank", "/responses", "/score"})
_OTHER_NAMES = {
    **dict.fromkeys(("/v2/rerank", "/reranking", "/v1/reranking"), "/v1/rerank"),  # Cohere's and llama-server's
    "/v1/infill": "/infill",
    "/v1/health": "/health",
    "/v1/lora-adapters": "/lora-adapters",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/fim/completions": "/v1/fim/completions",
    **{f"/api/v0/{name}": f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings")},  # LM Studio's
}
_WITH_ID = (
    "/v1/models/",
    "/models/",
    "/v1/responses/",
    "/v1/admin/",
    "/v1beta/models/",
    "/api/v0/models/",
    "/api/blobs/",
    "/v1/conversations/",
    "/v1/files/",
    "/v1beta/files/",
    "/v1/batches/",
    "/v1/messages/batches/",
)
_DEBUG_ONLY = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/"})
_READING = ("GET", "HEAD", "OPTIONS")  # answered while the server drains
_POLLED = "/v1/admin/"  # open pages read it every second


class RequestMiddleware:
    """`inference` are the handlers of POST routes that need nothing of the app around them: they set
    `context.status` and write their own errors. Its layers cost some µs a request and calls per event."""

    def __init__(
        self,
        app: ASGIApp,
        inference: Mapping[str, ASGIApp],
        settings: HttpSettings,
        authenticator: Authenticator,
        metrics: Metrics,
        workbench: ASGIApp | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._app, self._inference, self._authenticator, self._metrics = app, inference, authenticator, metrics
        self._workbench, self._admission = workbench, admission
        self.sockets: dict[str, ASGIApp] = {}  # path → the app of its WebSockets
        self.is_draining: Callable[[], bool] = lambda: False
        self._max_header_bytes = settings.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        if path not in _ROUTES:
            path = scope["path"] = _canonical(path)
        headers, size = _read_headers(scope)
        if scope["query_string"] and is_gemini(path):
            _read_query_key(scope, headers)
        scope[CONTEXT_KEY] = context = RequestContext(new_trace(), path, headers)
        current_trace.set(context.trace)
        try:
            if size > self._max_header_bytes:
                raise _too_large(self._max_header_bytes)
            self._authenticator.admit(context, user_of(scope))
            if method not in _READING and self.is_draining():
                raise _shutting_down()
            current_client.set(context.key)
            if self._admission is not None:
                context.reservation = self._admission.open(context.key)
            if method == "POST" and (handler := self._inference.get(path)) is not None:
                await handler(scope, receive, send)
            elif self._workbench is not None and is_workbench(path):
                await self._workbench(scope, receive, _noting_status(context, send))
            else:
                await self._app(scope, receive, _noting_status(context, send))
        except Exception as error:
            if context.status and context.error:
                raise
            refusal = as_modelyard_error(error)
            context.failed(refusal)
            if context.status:  # a reply is on its way; it can only be cut off
                raise
            await send_error(send, context, write_error(refusal, context))
        finally:
            context.release()
            self._account(context, method, time.perf_counter() - context.arrived)

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Web pages may open WebSockets to any server: `Origin` is checked as for every request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope["path"] = _canonical(scope["path"])
        app = self.sockets.get(scope["path"], self._workbench if is_workbench(scope["path"]) else None)
        headers, size = _read_headers(scope)
        context = RequestContext(new_trace(), scope["path"], headers)
        try:
            if size > self._max_header_bytes:
                raise _too_large(self._max_header_bytes)
            self._authenticator.admit(context, user_of(scope))
            if self.is_draining():
                raise _shutting_down()
            if app is None:
                raise NotFound(f"there is no WebSocket at {scope['path'][:256]}", code="path_not_found")
        except ModelyardError as error:
            path, why = mask_keys(scope["path"]), mask_keys(error.message)
            log_event(log, logging.WARNING, "websocket refused", path=path, why=why)
            await _refuse_socket(scope, send, context, error)
            return
        await app(scope, receive, send)

    def _account(self, context: RequestContext, method: str, seconds: float) -> None:
        path = context.path
        route = path if path in _ROUTES else _pattern(path)
        if route != path:
            path = mask_keys(path)
        self._metrics.http_request(route, method, context.status, seconds)
        if context.error:
            self._metrics.request_failed(context.error)
        polled = route != path and (is_workbench(path) or (method == "GET" and path.startswith(_POLLED)))
        level = logging.DEBUG if polled or path in _DEBUG_ONLY else logging.INFO
        log_request(level, method, path, context.status, seconds, context.key, context.reuse)


async def _refuse_socket(scope: Scope, send: Send, context: RequestContext, error: ModelyardError) -> None:
    """With the status and body that a request would get, where the server can send them: SDKs show why."""
    if is_workbench(context.path) or "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return

    async def send_http(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await send_error(send_http, context, write_error(error, context))


def _noting_status(context: RequestContext, send: Send) -> Send:
    async def noting(message: Message) -> None:
        if not context.status and message["type"] == "http.response.start":
            context.status = message["status"]
        await send(message)

    return noting


def _random_traces() -> Iterator[str]:
    """Random ids, 256 from one system call."""
    while True:
        digits = secrets.token_hex(12 * 256)
        yield from [digits[at : at + 24] for at in range(0, len(digits), 24)]


new_trace = _random_traces().__next__


def _read_headers(scope: Scope) -> tuple[dict[str, str], int]:
    """The headers as text, and their size in bytes, with that of the address."""
    headers: dict[str, str] = {}
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    for name, value in scope["headers"]:
        size += len(name) + len(value)
        headers[name.decode("latin-1")] = value.decode("latin-1")
    return headers, size


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down: try again when it runs again", retry_after=5, code=SHUTTING_DOWN)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request headers are larger than {limit} bytes (http.max_header_bytes)")


def _read_query_key(scope: Scope, headers: dict[str, str]) -> None:
    """Google's clients may send the key in the query. It is taken out: a query may be written down elsewhere."""
    fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    headers.setdefault(GOOGLE_KEY, next((value for name, value in fields if name == "key"), ""))
    scope["query_string"] = urlencode([(name, value) for name, value in fields if name != "key"]).encode()


def _canonical(path: str) -> str:
    """A trailing slash, a missing /v1 or another name leads to the same route, with the same errors and metrics."""
    path = path.rstrip("/") or "/"
    return f"/v1{path}" if path in _UNPREFIXED else _OTHER_NAMES.get(path, path)


def _pattern(path: str) -> str:
    if is_gemini(path) and ":" in path:
        method = path.rpartition(":")[2]
        return f"/v1beta/models/{{id}}:{method}" if method in GEMINI_METHODS else "other"
    for prefix in _WITH_ID:
        if path.startswith(prefix):
            return prefix + "{id}"
    return "/workbench" if is_workbench(path) else "other"
