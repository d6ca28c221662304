"""The first thing every request meets: it gets an id, is let in or turned away, is counted and is logged."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.core.errors import ModelyardError, TooLarge
from modelyard.http.auth import Authenticator, is_workbench
from modelyard.http.errors import ours, written
from modelyard.http.request_context import RequestContext, respond_error
from modelyard.http.settings import HttpSettings
from modelyard.http.together import own_task
from modelyard.telemetry.log import current_trace, event, line
from modelyard.telemetry.metrics import Metrics

log = logging.getLogger("modelyard.http")

# Metrics name the route, never the client's own path: that would be a new series for every path anybody tries.
_ROUTES = frozenset(
    {
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/completions",
        "/v1/embeddings",
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
_UNPREFIXED = frozenset({"/chat/completions", "/completions", "/embeddings", "/responses"})
_TRACE_BYTES = 12
_FEW_NAMES, _SHORT_NAME = 256, 40
_QUIET = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/"})
_READ = "/v1/admin/"  # by open pages, every second


class RequestMiddleware:
    """`hot` are handlers of POST routes that need nothing of the app around them: they keep `visit.status` and answer
    their own errors. Going through the app's layers would cost them 9 µs a request, and four more calls an event.
    """

    def __init__(
        self,
        app: ASGIApp,
        hot: Mapping[str, ASGIApp],
        settings: HttpSettings,
        doorkeeper: Authenticator,
        metrics: Metrics,
        workbench: ASGIApp | None = None,
    ) -> None:
        self._app, self._hot, self._doorkeeper, self._metrics = app, hot, doorkeeper, metrics
        self._workbench = workbench
        self._max_header_bytes = settings.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        path = scope["path"]
        if path not in _ROUTES:  # those are as they should be
            path = scope["path"] = _canonical(path)
        headers, size = _headers(scope)
        visit = RequestContext(new_trace(), path, headers)
        visit.enter(scope)
        current_trace.set(visit.trace)
        try:
            self._check_size(scope, size)
            self._doorkeeper.admit(visit)
            if scope["method"] == "POST" and (handler := self._hot.get(path)) is not None:
                await handler(scope, receive, send)
            else:
                await own_task(scope)
                await self._inner(path)(scope, receive, _noting(visit, send))
        except Exception as error:
            await self._refuse(visit, send, error)
        finally:
            self._account(visit, scope["method"], time.perf_counter() - visit.arrived)

    async def _refuse(self, visit: RequestContext, send: Send, error: Exception) -> None:
        if visit.status:  # a reply is under way: it cannot be taken back, only cut off
            if not visit.error:
                visit.failed(ours(error))
            raise error
        refusal = ours(error)
        visit.failed(refusal)
        await respond_error(send, visit, written(refusal, visit))

    def _inner(self, path: str) -> ASGIApp:
        return self._workbench if self._workbench is not None and is_workbench(path) else self._app

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A web page may open a socket to any server: only pages of our own may do it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope["path"] = _canonical(scope["path"])
        if self._workbench is None or not self._may_connect(scope):
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._workbench(scope, receive, send)

    def _may_connect(self, scope: Scope) -> bool:
        try:
            headers, size = _headers(scope)
            self._check_size(scope, size)
            self._doorkeeper.admit(RequestContext(new_trace(), scope["path"], headers))
        except ModelyardError as error:
            event(log, logging.WARNING, "socket refused", path=scope["path"], why=error.message)
            return False
        return is_workbench(scope["path"])

    def _check_size(self, scope: Scope, headers: int) -> None:
        limit = self._max_header_bytes
        if len(scope.get("raw_path", b"")) + len(scope["query_string"]) + headers > limit:
            raise TooLarge(f"the request headers are larger than {limit} bytes (http.max_header_bytes)")

    def _account(self, visit: RequestContext, method: str, seconds: float) -> None:
        path = visit.path
        route = path if path in _ROUTES else _pattern(path)
        self._metrics.http(route, method, visit.status, seconds)
        if visit.error:
            self._metrics.failed(visit.error)
        watched = route != path and (is_workbench(path) or (method == "GET" and path.startswith(_READ)))
        level = logging.DEBUG if watched or path in _QUIET else logging.INFO
        line(log, level, "request", partial(_facts, visit, method, seconds))


def _noting(visit: RequestContext, send: Send) -> Send:
    """Whoever answers by messages tells the status there."""

    async def noting(message: Message) -> None:
        if not visit.status and message["type"] == "http.response.start":
            visit.status = message["status"]
        await send(message)

    return noting


def _facts(visit: RequestContext, method: str, seconds: float) -> dict[str, Any]:
    """Which token and message were the first to be read anew is said only where something is amiss."""
    ms = round(seconds * 1e3, 2)
    told = {"method": method, "path": visit.path, "status": visit.status, "ms": ms, "key": visit.key}
    if (reuse := visit.reuse) is not None:
        told |= {"reused": reuse.reused, "evaluated": reuse.evaluated, "cause": reuse.cause}
        if reuse.message is not None:
            told |= {"token": reuse.token, "message": reuse.message, "role": reuse.role}
    return told


def _traces() -> Iterator[str]:
    """Random ids, many from one call to the system instead of one call each."""
    while True:
        noise = secrets.token_hex(_TRACE_BYTES * 256)
        yield from [noise[at : at + 2 * _TRACE_BYTES] for at in range(0, len(noise), 2 * _TRACE_BYTES)]


new_trace = _traces().__next__


def _headers(scope: Scope) -> tuple[dict[str, str], int]:
    """The headers as text, and their bytes."""
    headers: dict[str, str] = {}
    size = 0
    for name, value in scope["headers"]:
        size += len(name) + len(value)
        headers[_names.get(name) or _named(name)] = value.decode("latin-1")
    return headers, size


_names: dict[bytes, str] = {}  # most clients send the same ones


def _named(name: bytes) -> str:
    text = name.decode("latin-1")
    if len(_names) < _FEW_NAMES and len(name) <= _SHORT_NAME:
        _names[name] = text
    return text


def _canonical(path: str) -> str:
    """A slash too many or a /v1 too few leads to the same place, with the same routes, errors and metrics."""
    path = path.rstrip("/") or "/"
    return f"/v1{path}" if path in _UNPREFIXED else path


def _pattern(path: str) -> str:
    for prefix in ("/v1/models/", "/models/", "/v1/responses/", "/v1/admin/"):
        if path.startswith(prefix):
            return prefix + "{id}"
    return "/workbench" if is_workbench(path) else "other"
