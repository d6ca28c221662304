"""The middleware around every request: assigns an id, authenticates, counts and logs."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.accounts.admission import Admission
from modelyard.core.errors import ModelyardError, NotFound, TooLarge, Unavailable
from modelyard.gateway.gateway import Gateway
from modelyard.http.auth import Authenticator, require
from modelyard.http.connection import user_of
from modelyard.http.errors import as_modelyard_error, write_error
from modelyard.http.request_context import CONTEXT_KEY, GOOGLE_KEY, SHUTTING_DOWN, RequestContext, send_error
from modelyard.http.routes import OTHER, WORKBENCH, RouteTable, path_protocol
from modelyard.http.settings import HttpSettings
from modelyard.processes.sandbox import current_client
from modelyard.telemetry.log import current_trace, log_event, log_request
from modelyard.telemetry.masking import mask_keys
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.tracing import EndedRequest, Observer, current_traceparent, read_traceparent

log = logging.getLogger("modelyard.http")

_REFUSED_LOADS = ("model_too_large", "model_failed", "model_unreadable", "cannot_run")  # an administrator should know
_READING = ("GET", "HEAD", "OPTIONS")  # answered while the server drains


class RequestMiddleware:
    """Finds the row of the route table, and passes the request on to its handler."""

    def __init__(
        self,
        table: RouteTable,
        lifespan: ASGIApp,
        settings: HttpSettings,
        authenticator: Authenticator,
        metrics: Metrics,
        admission: Admission | None = None,
        gateway: Gateway | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.table, self._lifespan, self._authenticator, self._metrics = table, lifespan, authenticator, metrics
        self._admission, self._gateway, self._observers = admission, gateway, observers
        self._max_header_bytes = settings.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp | None = None) -> None:
        """`app` takes the place of the route's handler: a message of a WebSocket has its connection's."""
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        method = scope["method"]
        found = self.table.find(scope["path"], method)
        path = scope["path"] = found.path
        headers, size = _read_headers(scope)
        if scope["query_string"] and path_protocol(found.row, path) == "gemini":
            _read_query_key(scope, headers)
        scope[CONTEXT_KEY] = context = RequestContext(new_trace(), path, headers, found.row)
        current_trace.set(context.trace)
        parent = read_traceparent(headers["traceparent"]) if "traceparent" in headers else ""
        for observer in self._observers:
            parent = observer.traceparent(context.trace, parent)
        current_traceparent.set(parent)
        try:
            if size > self._max_header_bytes:
                raise _too_large(self._max_header_bytes)
            self._authenticator.admit(context, user_of(scope))
            if method not in _READING and self._gateway is not None and self._gateway.draining:
                raise _shutting_down()
            current_client.set(context.key)
            if self._admission is not None:
                context.reservation = self._admission.open(context.key)
            app = app or found.app
            if app is None or found.row is None:
                raise found.refusal(method)
            if found.row.role != "member":
                require(context, found.row.role)
            scope["path_params"] = found.params
            await app(scope, receive, send if found.is_direct else _noting_status(context, send))
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
            self._account(context, method)

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Web pages may open WebSockets to any server: `Origin` is checked as for every request."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        found = self.table.find(scope["path"], "WEBSOCKET")
        scope["path"] = found.path
        headers, size = _read_headers(scope)
        context = RequestContext(new_trace(), found.path, headers, found.row)
        try:
            if size > self._max_header_bytes:
                raise _too_large(self._max_header_bytes)
            self._authenticator.admit(context, user_of(scope))
            if self._gateway is not None and self._gateway.draining:
                raise _shutting_down()
            if found.app is None:
                raise NotFound(f"there is no WebSocket at {scope['path'][:256]}", code="path_not_found")
        except ModelyardError as error:
            path, why = mask_keys(scope["path"]), mask_keys(error.message)
            log_event(log, logging.WARNING, "websocket refused", path=path, why=why)
            await _refuse_socket(scope, send, context, error)
            return
        await found.app(scope, receive, send)

    def _account(self, context: RequestContext, method: str) -> None:
        # In this order: what observers compute as its beginning is not later than that of its parts.
        ended, seconds, path, row = time.time(), time.perf_counter() - context.arrived, context.path, context.row
        label = OTHER if row is None else row.label
        if label != path:
            path = mask_keys(path)
        self._metrics.http_request(label, method, context.status, seconds)
        if context.error:
            self._metrics.errors.add((context.error,))
        is_quiet = row is not None and row.is_quiet
        level = logging.DEBUG if is_quiet else logging.INFO
        says_wait = is_quiet and context.status == 503  # a probe asks whether all is ready, and 503 is its answer
        if (context.status >= 500 and not says_wait) or context.error in _REFUSED_LOADS:
            level = logging.WARNING
        gateway = self._gateway
        records = gateway.history.ended(context.trace) if gateway is not None and context.target is not None else []
        for observer in self._observers if level != logging.DEBUG else ():
            observer.ended(
                EndedRequest(
                    trace=context.trace,
                    traceparent=read_traceparent(context.headers.get("traceparent", "")),
                    method=method,
                    path=path,
                    status=context.status,
                    error=context.error,
                    seconds=seconds,
                    ended=ended,
                    records=records,
                )
            )
        log_request(level, method, path, context.status, seconds, context.key, context.reuse, context.error, records)


async def _refuse_socket(scope: Scope, send: Send, context: RequestContext, error: ModelyardError) -> None:
    """With the status and body that a request would get, where the server can send them: SDKs show why."""
    is_workbench = context.row is not None and context.row.handler == WORKBENCH
    if is_workbench or "websocket.http.response" not in scope.get("extensions", {}):
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
