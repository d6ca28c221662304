"""The front door put together: routes in a FastAPI app, the guard around it, uvicorn under it."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp
from uvicorn.loops.auto import auto_loop_factory

from modelyard import __version__
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.core.store import Store
from modelyard.gateway import Gateway
from modelyard.http import tokens
from modelyard.http.admin.context import AdminContext
from modelyard.http.admin.routes import admin
from modelyard.http.auth import Authenticator, Key
from modelyard.http.connection import BoundedHttp
from modelyard.http.errors import ours, wire, written
from modelyard.http.health import Health
from modelyard.http.inference import Inference
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.models import Models
from modelyard.http.openapi import describe
from modelyard.http.request_context import RequestContext
from modelyard.http.settings import HttpSettings
from modelyard.http.stored_responses import Responses, StoredResponses
from modelyard.telemetry.request_capture import CaptureSink

Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


# The guard counts and logs; FastAPI's own telemetry would look at the environment for exporters at every request.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
# Longer than clients keep an idle connection (httpx and the SDKs: 5 s). Were we the first to close it, a request that
# is just being sent on it would be lost.
_IDLE_S = 75
_TOLD = ("x-request-id", "request-id", "retry-after", "x-queue-position")  # what pages elsewhere may read of a reply


class Edge(Struct, frozen=True):
    """What the front door is made of."""

    gateway: Gateway
    settings: HttpSettings
    keys: tuple[Key, ...]
    store: Store
    scrape: Callable[[], Awaitable[bytes]]
    scribe: CaptureSink | None = None
    office: AdminContext | None = None  # None: there is no admin API
    workbench: ASGIApp | None = None


def build(edge: Edge, lifespan: Lifespan | None = None) -> ASGIApp:
    settings = edge.settings
    app = FastAPI(
        title="Modelyard",
        version=__version__,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        telemetry=_NO_TELEMETRY,
        lifespan=lifespan,
        exception_handlers={
            ModelyardError: _told,
            HTTPException: _told_http,
            RequestValidationError: _told_invalid,
            Exception: _told,
        },
    )
    routes = _routes(edge)
    app.router.routes[:0] = routes
    if edge.office is not None:
        app.include_router(admin(edge.office, settings.keepalive_s))
    describe(app)
    hot = {r.path: r.app for r in routes if isinstance(r, Route) and isinstance(r.app, Inference)}
    doorkeeper = Authenticator(settings, edge.keys)
    return _cors(RequestMiddleware(app, hot, settings, doorkeeper, edge.gateway.metrics, edge.workbench), settings)


def _routes(edge: Edge) -> list[BaseRoute]:
    stored = StoredResponses(edge.store)
    return [*_inference(edge, stored), *_counting(edge, stored), *_lookups(edge, stored)]


def _inference(edge: Edge, stored: StoredResponses) -> list[BaseRoute]:
    routes: list[BaseRoute] = []
    for name in ("anthropic_messages", "openai_chat", "openai_responses", "openai_completions"):
        spoken = wire(name)
        memory = stored if name == "openai_responses" else None
        handler = Inference(spoken, edge.gateway, edge.settings, edge.scribe, memory)
        routes += [Route(path, handler, methods=["POST"], name=name) for path in spoken.PATHS]
    return routes


def _counting(edge: Edge, stored: StoredResponses) -> list[BaseRoute]:
    chat, parts = wire("openai_chat"), (edge.gateway, edge.settings)
    embed = tokens.Embed(chat, *parts)
    return [
        _post("/v1/messages/count_tokens", tokens.CountTokens(wire("anthropic_messages"), *parts)),
        _post("/v1/responses/input_tokens", tokens.InputTokens(wire("openai_responses"), *parts, stored)),
        _post("/v1/embeddings", embed),
        _post("/embeddings", embed),
        _post("/tokenize", tokens.Tokenize(chat, *parts)),
        _post("/detokenize", tokens.Detokenize(chat, *parts)),
        _post("/apply-template", tokens.ApplyTemplate(chat, *parts)),
    ]


def _post(path: str, app: ASGIApp) -> Route:
    return Route(path, app, methods=["POST"])


def _lookups(edge: Edge, stored: StoredResponses) -> list[BaseRoute]:
    models, responses = Models(edge.gateway, int(time.time())), Responses(stored)
    health = Health(edge.gateway, edge.scrape)
    return [
        Route("/v1/models", models.all),
        Route("/models", models.all),
        Route("/v1/models/{id:path}", models.one),
        Route("/models/{id:path}", models.one),
        Route("/v1/responses/{id}", responses.get, methods=["GET"]),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", responses.input_items),
        Route("/health", health.health),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
        Route("/metrics", health.metrics),
        Route("/", health.root),
    ]


def _cors(app: ASGIApp, settings: HttpSettings) -> ASGIApp:
    """Around the guard: a browser's preflight carries no key, and a page may read why its request was refused."""
    if not settings.cors_enabled:
        return app
    origins = settings.cors_origins or ["*"]
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_TOLD)


async def _told(request: HttpRequest, error: Exception) -> Response:
    return _refusal(request, ours(error))


async def _told_invalid(request: HttpRequest, error: Exception) -> Response:
    """FastAPI's findings about a body or query, of which the first is enough to act on."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return _refusal(request, InvalidRequest(f"{where or 'the body'}: {first['msg']}", param=where or None))


async def _told_http(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method), told in the protocol of the path."""
    path, status = request.scope["path"][:256], error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        told: ModelyardError = NotFound(f"there is no {path} here; /docs lists what is", code="path_not_found")
    elif status == 405:
        told = InvalidRequest(f"{request.method} is not a method of {path}", code="method_not_allowed")
    else:
        told = InvalidRequest(str(getattr(error, "detail", error)))
    reply = _refusal(request, told)
    reply.status_code = status
    reply.headers.update(getattr(error, "headers", None) or {})  # which methods there are
    return reply


def _refusal(request: HttpRequest, error: ModelyardError) -> Response:
    visit = RequestContext.of(request.scope)
    visit.failed(error)
    answer = written(error, visit)
    ids = dict.fromkeys(("x-request-id", "request-id"), f"req_{visit.trace}")
    return Response(answer.body, answer.status, {**answer.headers, **ids}, answer.content_type)


async def _nothing() -> None:
    pass


class Server(uvicorn.Server):
    """uvicorn that asks its work to end before it waits for it, and for which having been stopped is success."""

    def __init__(self, config: uvicorn.Config, goodbye: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._goodbye = goodbye

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Together: what the goodbye makes the handlers write needs connections that still wait for it.
        await asyncio.gather(super().shutdown(sockets), self._goodbye())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn would raise the signal once more at the end, and the exit code would speak of a crash."""
        del frame
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where there is one: not on Windows."""
    return auto_loop_factory()


def server(app: ASGIApp, settings: HttpSettings, goodbye: Callable[[], Awaitable[None]] = _nothing) -> Server:
    """uvicorn as we want it: no access log of its own (the guard has one), bounded headers, a quick goodbye."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=BoundedHttp.bounded(settings.max_header_bytes),
        loop="none",  # whoever runs us has made the loop
        ws="websockets-sansio",  # for the workbench; the guard turns every other socket away
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=_IDLE_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    return Server(config, goodbye)
