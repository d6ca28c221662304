"""The HTTP server: the routes, the middleware around them, uvicorn below it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard.accounts.keys import KeyRing
from modelyard.accounts.owner import OwnerProof
from modelyard.core.protocol import WireProtocol
from modelyard.gateway.batches import Batches
from modelyard.gateway.files import Files
from modelyard.gateway.gateway import Gateway
from modelyard.http import ollama, tokens
from modelyard.http.admin.context import AdminContext
from modelyard.http.auth import Authenticator, is_docs
from modelyard.http.batches import BatchEndpoints, LineExecutor, MessageBatchEndpoints
from modelyard.http.connection import LimitedConnection, WebSocketConnection
from modelyard.http.engine_lookups import EngineLookups
from modelyard.http.errors import EXCEPTION_HANDLERS, load_protocol
from modelyard.http.files import FileEndpoints
from modelyard.http.gemini import gemini_routes
from modelyard.http.health import HealthEndpoints
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.models import ModelEndpoints
from modelyard.http.request_context import ADMIN_PATH
from modelyard.http.responses import ConversationEndpoints, ResponsesSocket, StoredResponseEndpoints
from modelyard.http.settings import HttpSettings
from modelyard.protocols.ollama import generate as ollama_generate
from modelyard.protocols.openai_responses import compaction
from modelyard.telemetry.request_capture import CaptureSink

Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]

# Longer than clients keep an idle connection (httpx and the SDKs: 5 s). If the server closed it first, a request that
# is being sent on it would be lost.
_KEEP_ALIVE_S = 75
_POLL_S = 0.05  # while requests finish before the end
_EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "x-queue-position",
    "x-modelyard-model",
    "x-modelyard-route",
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
    owner: OwnerProof | None = None
    needed: Callable[[], Collection[str]] = tuple  # the models without which the server is not ready


def build_app(context: HttpContext, lifespan: Lifespan | None = None) -> ASGIApp:
    settings = context.settings
    inference, token_routes = _inference_routes(context), _token_routes(context)
    app = Starlette(
        routes=[*inference, *token_routes, *_lookup_routes(context), *_stored_routes(context)],
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    handlers = {route.path: route.app for route in inference}
    authenticator = Authenticator(settings, context.keys, context.owner)
    admission = context.gateway.accounts.admission
    if context.batches is not None:
        runnable = {route.path: route.app for route in (*inference, *token_routes)}
        context.batches.execute = LineExecutor(runnable, authenticator, admission)
    metrics = context.gateway.metrics
    served = WithAdminApp(app, context.admin, settings)
    middleware = RequestMiddleware(served, handlers, settings, authenticator, metrics, context.workbench, admission)
    middleware.is_draining = lambda: context.gateway.draining
    if context.gateway.stored is not None:
        middleware.sockets["/v1/responses"] = ResponsesSocket(middleware, context.gateway.stored, settings)
    return _with_cors(middleware, settings)


class WithAdminApp:
    """The app of clients, and beside it the admin API and the documentation, which FastAPI serves. FastAPI takes 0.3 s
    to import, and many servers never need it: its app is made at its first request, in a thread, while streams go on.
    """

    def __init__(self, app: Starlette, admin: AdminContext | None, settings: HttpSettings) -> None:
        self.app, self._admin, self._settings = app, admin, settings
        self._admin_app: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] == "http" and (scope["path"].startswith(f"{ADMIN_PATH}/") or is_docs(scope["path"])):
            self._admin_app = self._admin_app or asyncio.ensure_future(asyncio.to_thread(self._make_admin_app))
            app = await asyncio.shield(self._admin_app)
        await app(scope, receive, send)

    def _make_admin_app(self) -> ASGIApp:
        from modelyard.http.admin.routes import build_admin_app

        return build_admin_app(self._admin, self._settings)


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
    health = HealthEndpoints(
        context.gateway, context.scrape, context.needed, has_workbench=context.workbench is not None
    )
    lookups = EngineLookups(context.gateway, models, context.library)
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
        Route("/api/v0/models", lookups.lm_studio_models),
        Route("/api/v0/models/{id:path}", lookups.lm_studio_model),
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


class Stoppable(Protocol):
    """What answers the requests."""

    async def drain(self) -> None:
        """Refuse new requests from here on."""
        ...

    def is_busy(self) -> bool: ...
    async def stop(self) -> None:
        """End the requests that still run."""
        ...


class Server(uvicorn.Server):
    """uvicorn that lets its requests finish, ends those that take too long, and exits with status 0 after a signal.

    While it drains it still accepts connections: a client reads 503 with the reason, and a probe that it is not ready.
    """

    def __init__(self, config: uvicorn.Config, answering: Stoppable | None, drain_s: float) -> None:
        super().__init__(config)
        self._answering, self._drain_s, self._signals = answering, drain_s, 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (answering := self._answering) is None:
            await super().shutdown(sockets)
            return
        await answering.drain()
        await self._wait_while_busy(answering)
        # Concurrently: the handlers write their last events to connections that uvicorn keeps open for them.
        await asyncio.gather(super().shutdown(sockets), answering.stop())

    async def _wait_while_busy(self, answering: Stoppable) -> None:
        deadline = time.monotonic() + self._drain_s
        if answering.is_busy() and self._drain_s:
            message = "requests still run: they have %g s to finish; a second signal ends them now"
            logging.getLogger("modelyard").info(message, self._drain_s)
        while answering.is_busy() and self._signals < 2 and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn would raise the signal again at the end, and the exit status would report a crash."""
        del frame
        self._signals += 1
        self.force_exit = self.force_exit or (self._signals > 2 and sig == signal.SIGINT)
        self.should_exit = True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def make_server(app: ASGIApp, settings: HttpSettings, answering: Stoppable | None = None) -> Server:
    """uvicorn without its access log (the middleware has one), with bounded headers and a bounded shutdown."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=LimitedConnection.configured(settings.max_header_bytes, settings.stall_s),
        loop="none",  # the caller runs the event loop
        ws=WebSocketConnection,  # for the workbench and /v1/responses; the middleware refuses every other WebSocket
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
    return Server(config, answering, settings.drain_s)
