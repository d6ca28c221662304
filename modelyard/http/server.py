"""The HTTP server: routes in a FastAPI app, the middleware around it, uvicorn below it."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, cast

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

from modelyard import __version__
from modelyard.accounts.keys import KeyRing
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.core.protocol import WireProtocol
from modelyard.gateway.batches import Batches
from modelyard.gateway.files import Files
from modelyard.gateway.gateway import Gateway
from modelyard.http import ollama, tokens
from modelyard.http.admin.context import AdminContext
from modelyard.http.admin.routes import admin_router
from modelyard.http.auth import Authenticator
from modelyard.http.batches import BatchEndpoints, FileEndpoints, LineExecutor, MessageBatchEndpoints
from modelyard.http.connection import LimitedConnection
from modelyard.http.conversations import ConversationEndpoints
from modelyard.http.engine_lookups import EngineLookups
from modelyard.http.errors import as_modelyard_error, load_protocol, write_error
from modelyard.http.gemini import gemini_routes
from modelyard.http.health import HealthEndpoints
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.models import ModelEndpoints
from modelyard.http.openapi import describe, page_routes
from modelyard.http.request_context import RequestContext
from modelyard.http.responses_socket import ResponsesSocket
from modelyard.http.settings import HttpSettings
from modelyard.http.stored_responses import StoredResponseEndpoints
from modelyard.protocols.ollama import generate as ollama_generate
from modelyard.protocols.openai_responses import compaction
from modelyard.telemetry.request_capture import CaptureSink

Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]

# The middleware counts and logs. FastAPI's telemetry would search the environment for exporters at every request.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
# Longer than clients keep an idle connection (httpx and the SDKs: 5 s). If the server closed it first, a request that
# is being sent on it would be lost.
_KEEP_ALIVE_S = 75
_EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "x-queue-position",
    "x-modelyard-ignored",
    "x-modelyard-fallback",
)


class HttpContext(Struct, frozen=True):
    """Everything that the HTTP layer uses."""

    gateway: Gateway
    settings: HttpSettings
    keys: KeyRing
    scrape: Callable[[], Awaitable[bytes]]
    captures: CaptureSink | None = None
    admin: AdminContext | None = None  # None: no admin API
    workbench: ASGIApp | None = None
    library: ollama.LibraryOperations | None = None  # None: models cannot be pulled, created or removed over HTTP
    files: Files | None = None
    batches: Batches | None = None


def build_app(context: HttpContext, lifespan: Lifespan | None = None) -> ASGIApp:
    settings = context.settings
    app = FastAPI(
        title="Modelyard",
        version=__version__,
        docs_url=None,  # see page_routes
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        telemetry=_NO_TELEMETRY,
        lifespan=lifespan,
        exception_handlers={
            ModelyardError: _on_error,
            HTTPException: _on_http_error,
            RequestValidationError: _on_invalid,
            Exception: _on_error,
        },
    )
    inference, token_routes = _inference_routes(context), _token_routes(context)
    app.router.routes[:0] = [*inference, *token_routes, *_lookup_routes(context), *_stored_routes(context)]
    app.router.routes += page_routes() if settings.docs else []
    if context.admin is not None:
        app.include_router(admin_router(context.admin, settings))
    describe(app)
    handlers = {route.path: route.app for route in inference}
    authenticator = Authenticator(settings, context.keys)
    if context.batches is not None:
        runnable = {route.path: route.app for route in (*inference, *token_routes)}
        context.batches.execute = LineExecutor(runnable, authenticator)
    metrics = context.gateway.metrics
    middleware = RequestMiddleware(app, handlers, settings, authenticator, metrics, context.workbench)
    if context.gateway.stored is not None:
        middleware.sockets["/v1/responses"] = ResponsesSocket(middleware, context.gateway.stored, settings)
    return _with_cors(middleware, settings)


_LLAMA = ("llama_completion", "bare_completions")
_GAPS = ("llama_infill", "mistral_fim")  # protocols that fill a gap in a text
_OTHERS = ("ollama",)


def _inference_routes(context: HttpContext) -> list[Route]:
    routes: list[Route] = []
    for name in (
        "anthropic_messages",
        "openai_chat",
        "openai_responses",
        "openai_completions",
        *_LLAMA,
        *_GAPS,
        *_OTHERS,
    ):
        protocol = load_protocol(name)
        stored = context.gateway.stored if name == "openai_responses" else None
        endpoint = InferenceEndpoint(protocol, context.gateway, context.settings, context.captures, stored)
        routes += [Route(path, endpoint, methods=["POST"], name=name) for path in protocol.PATHS]
    generate = InferenceEndpoint(
        cast(WireProtocol, ollama_generate), context.gateway, context.settings, context.captures
    )
    routes += [Route(path, generate, methods=["POST"], name=ollama_generate.NAME) for path in ollama_generate.PATHS]
    compact = InferenceEndpoint(cast(WireProtocol, compaction), context.gateway, context.settings, context.captures)
    routes += [Route(path, compact, methods=["POST"], name=compaction.NAME) for path in compaction.PATHS]
    return routes


def _token_routes(context: HttpContext) -> list[Route]:
    chat, common = load_protocol("openai_chat"), (context.gateway, context.settings, context.captures)
    embeddings = tokens.EmbeddingsEndpoint(load_protocol("openai_embeddings"), *common)
    ranking = tokens.RerankEndpoint(load_protocol("rerank"), *common)
    endpoints: dict[str, ASGIApp] = {
        "/api/embed": ollama.OllamaEmbed(load_protocol("ollama"), *common),
        "/api/embeddings": ollama.OllamaEmbeddings(load_protocol("ollama"), *common),
        "/v1/messages/count_tokens": tokens.CountTokens(load_protocol("anthropic_messages"), *common),
        "/v1/responses/input_tokens": tokens.InputTokens(load_protocol("openai_responses"), *common),
        **dict.fromkeys(("/v1/embeddings", "/embeddings"), embeddings),
        **dict.fromkeys(("/v1/rerank", "/rerank"), ranking),
        "/v1/chat/completions/input_tokens": tokens.ChatInputTokens(chat, *common),
        "/embedding": tokens.LlamaEmbedding(load_protocol("openai_embeddings"), *common),
        **dict.fromkeys(("/v1/score", "/score"), tokens.ScoreEndpoint(load_protocol("rerank"), *common)),
        "/tokenize": tokens.Tokenize(chat, *common),
        "/detokenize": tokens.Detokenize(chat, *common),
        "/apply-template": tokens.ApplyTemplate(chat, *common),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


def _lookup_routes(context: HttpContext) -> list[BaseRoute]:
    models = ModelEndpoints(context.gateway, int(time.time()))
    health = HealthEndpoints(context.gateway, context.scrape, has_workbench=context.workbench is not None)
    lookups = EngineLookups(context.gateway)
    pool = context.admin.pool if context.admin is not None else None
    tags = ollama.OllamaEndpoints(context.gateway, context.settings, pool, context.library)
    routes: list[BaseRoute] = [
        Route("/v1/models", models.all),
        Route("/models", models.all),
        Route("/v1/models/{id:path}", models.one),
        Route("/models/{id:path}", models.one),
        Route("/health", health.health),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
        Route("/metrics", health.metrics),
        Route("/props", lookups.props),
        Route("/slots", lookups.slots),
        Route("/lora-adapters", lookups.lora_adapters),
        Route("/version", lookups.version),
        Route("/", health.root),
        *tags.routes(),
        *gemini_routes(context.gateway, context.settings, context.captures, models),
    ]
    return routes


def _stored_routes(context: HttpContext) -> list[BaseRoute]:
    """What clients have stored here: responses, conversations, files and batches."""
    routes: list[BaseRoute] = []
    stored, settings = context.gateway.stored, context.settings
    if stored is not None:
        routes += StoredResponseEndpoints(stored, settings).routes()
        if stored.conversations is not None:
            routes += ConversationEndpoints(stored.conversations, settings).routes()
    if context.files is not None:
        routes += FileEndpoints(context.files).routes()
    if context.batches is not None:
        routes += BatchEndpoints(context.batches, settings).routes()
        routes += MessageBatchEndpoints(context.batches, settings).routes()
    return routes


def _with_cors(app: ASGIApp, settings: HttpSettings) -> ASGIApp:
    """Outside the middleware: a browser's preflight carries no key, and a page may read why it was refused."""
    if not settings.cors_enabled:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins or ["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )


async def _on_error(request: HttpRequest, error: Exception) -> Response:
    return _error_response(request, as_modelyard_error(error))


async def _on_invalid(request: HttpRequest, error: Exception) -> Response:
    """FastAPI's findings about a body or query; the first is enough to act on."""
    other: dict[str, Any] = {"loc": (), "msg": str(error)}
    first = error.errors()[0] if isinstance(error, RequestValidationError) else other
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        message = f"the body is not JSON: {reason} at character {first['loc'][-1]}"
        return _error_response(request, InvalidRequest(message, code="invalid_json"))
    if first.get("type") in ("dict_type", "model_attributes_type"):
        return _error_response(request, InvalidRequest("the body must be a JSON object", code="invalid_body"))
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return _error_response(request, InvalidRequest(f"{where or 'the body'}: {first['msg']}", param=where or None))


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors (unknown path, wrong method) in the protocol of the path."""
    path, status = request.scope["path"][:256], error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        found: ModelyardError = NotFound(f"there is no {path} here; /docs lists the paths", code="path_not_found")
    elif status == 405:
        found = InvalidRequest(f"{request.method} is not a method of {path}", code="method_not_allowed")
    else:
        found = InvalidRequest(str(getattr(error, "detail", error)))
    reply = _error_response(request, found)
    reply.status_code = status
    reply.headers.update(getattr(error, "headers", None) or {})  # `allow` lists the methods
    return reply


def _error_response(request: HttpRequest, error: ModelyardError) -> Response:
    context = RequestContext.of(request.scope)
    context.failed(error)
    written = write_error(error, context)
    ids = dict.fromkeys(("x-request-id", "request-id"), f"req_{context.trace}")
    return Response(written.body, written.status, {**written.headers, **ids}, written.content_type)


async def _no_cleanup() -> None:
    pass


class Server(uvicorn.Server):
    """uvicorn that ends its requests before it waits for them, and exits with status 0 after a signal."""

    def __init__(self, config: uvicorn.Config, before_shutdown: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._before_shutdown = before_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Concurrently: the handlers write their last events to connections that uvicorn keeps open for them.
        await asyncio.gather(super().shutdown(sockets), self._before_shutdown())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn would raise the signal again at the end, and the exit status would report a crash."""
        del frame
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def make_server(
    app: ASGIApp, settings: HttpSettings, before_shutdown: Callable[[], Awaitable[None]] = _no_cleanup
) -> Server:
    """uvicorn without its access log (the middleware has one), with bounded headers and a quick shutdown."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=LimitedConnection.configured(settings.max_header_bytes, settings.stall_s),
        loop="none",  # the caller runs the event loop
        ws="websockets-sansio",  # for the workbench and /v1/responses; the middleware refuses every other WebSocket
        ws_max_size=settings.max_body_bytes,
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    return Server(config, before_shutdown)
