"""The HTTP server: the routes, the middleware around them, uvicorn below it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from msgspec import Struct
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard import plugins
from modelyard.accounts.keys import KeyRing
from modelyard.accounts.owner import OwnerProof
from modelyard.core.protocol import WireProtocol
from modelyard.gateway.batches import Batches
from modelyard.gateway.files import Files
from modelyard.gateway.gateway import Gateway
from modelyard.http import ollama, tokens
from modelyard.http.admin.context import AdminContext
from modelyard.http.auth import Authenticator
from modelyard.http.batches import BatchEndpoints, LineExecutor, MessageBatchEndpoints
from modelyard.http.connection import LimitedConnection, WebSocketConnection
from modelyard.http.engine_lookups import EngineLookups
from modelyard.http.errors import load_protocol
from modelyard.http.files import FileEndpoints
from modelyard.http.gemini import gemini_apps, not_served
from modelyard.http.health import HealthEndpoints
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.middleware import RequestMiddleware
from modelyard.http.models import ModelEndpoints
from modelyard.http.responses import ConversationEndpoints, RequestWith, ResponsesSocket, StoredResponseEndpoints
from modelyard.http.routes import ROWS, WORKBENCH, RouteTable, Row
from modelyard.http.settings import HttpSettings
from modelyard.protocols.ollama import generate as ollama_generate
from modelyard.protocols.openai_responses import compaction
from modelyard.telemetry.request_capture import CaptureSink
from modelyard.telemetry.tracing import find_observers

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
    "x-modelyard-compacted",
    "x-modelyard-ignored",
    "x-modelyard-not-enforced",
    "x-modelyard-fallback",
    "x-modelyard-stopped",
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
    settings, gateway = context.settings, context.gateway
    authenticator, admission = Authenticator(settings, context.keys, context.owner), gateway.accounts.admission

    async def request(scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """A message of a WebSocket is a request as any other."""
        await middleware(scope, receive, send, app)

    table = RouteTable(_served(context, request))
    if context.batches is not None:
        context.batches.execute = LineExecutor(table.posts(), authenticator, admission)
    middleware = RequestMiddleware(
        table,
        Router(lifespan=lifespan),
        settings,
        authenticator,
        gateway.metrics,
        admission,
        gateway,
        find_observers(),
    )
    return _with_cors(middleware, settings)


def _served(context: HttpContext, request: RequestWith) -> Iterator[tuple[Row, ASGIApp]]:
    """The rows whose handlers this server has, and those of protocols from other packages."""
    apps, groups = _apps(context, request), _groups(context)
    for row in ROWS:
        group, _, name = row.handler.rpartition(".")
        if row.handler in apps:
            yield row, apps[row.handler]
        elif group in apps:
            yield row, apps[group]
        elif group in groups:
            yield row, request_response(getattr(groups[group], name))
    listed = {path for row in ROWS for path in (row.path, *row.also)}
    for name in plugins.outside("protocols"):
        try:
            protocol = load_protocol(name)
        except plugins.BrokenPlugin as error:  # the others are served
            logging.getLogger("modelyard").error("%s", error.message)
            continue
        paths = [path for path in protocol.PATHS if path not in listed]
        endpoint = InferenceEndpoint(protocol, context.gateway, context.settings, context.captures)
        yield Row("POST", paths[0], name, also=tuple(paths[1:]), protocol=name), endpoint
    for name in plugins.outside("endpoints"):
        try:
            yield from plugins.load("endpoints", name)(context)
        except plugins.MissingLibrary as error:
            logging.getLogger("modelyard").error("%s", error.message)


_PROTOCOLS = (
    "openai_completions",
    "llama_completion",
    "bare_completions",
    "llama_infill",
    "mistral_fim",
    "ollama",
)


def _apps(context: HttpContext, request: RequestWith) -> dict[str, ASGIApp]:
    gateway, settings = context.gateway, context.settings
    common, chat = (gateway, settings, context.captures), load_protocol("openai_chat")
    embeddings, ranking, own = (load_protocol(name) for name in ("openai_embeddings", "rerank", "ollama"))
    responses, messages = load_protocol("openai_responses"), load_protocol("anthropic_messages")
    admin = AdminApp(context.admin, settings)
    stored, storing = gateway.stored, InferenceEndpoint(responses, *common, gateway.stored, settings.responses_dialect)
    apps: dict[str, ASGIApp | None] = {
        **{name: InferenceEndpoint(load_protocol(name), *common) for name in _PROTOCOLS},
        "anthropic_messages": InferenceEndpoint(messages, *common, stored and stored.threads()),
        "openai_chat": InferenceEndpoint(chat, *common, dialect=settings.chat_dialect),
        "openai_responses": storing,
        "responses_socket": ResponsesSocket(request, storing, stored, settings) if stored is not None else None,
        "compaction": InferenceEndpoint(cast(WireProtocol, compaction), *common),
        "ollama_generate": InferenceEndpoint(cast(WireProtocol, ollama_generate), *common),
        **gemini_apps(*common),
        "not_served": request_response(not_served),
        "count_tokens": tokens.CountTokens(messages, *common),
        "input_tokens": tokens.InputTokens(responses, *common),
        "chat_input_tokens": tokens.ChatInputTokens(chat, *common),
        "embeddings": tokens.EmbeddingsEndpoint(embeddings, *common),
        "llama_embedding": tokens.LlamaEmbedding(embeddings, *common),
        "ollama_embed": ollama.OllamaEmbed(own, *common),
        "ollama_embeddings": ollama.OllamaEmbeddings(own, *common),
        "rerank": tokens.RerankEndpoint(ranking, *common),
        "score": tokens.ScoreEndpoint(ranking, *common),
        "tokenize": tokens.Tokenize(chat, *common),
        "detokenize": tokens.Detokenize(chat, *common),
        "apply_template": tokens.ApplyTemplate(chat, *common),
        WORKBENCH: context.workbench,
        "pages": admin if settings.docs else None,
        **dict.fromkeys(("admin", "keys", "config"), admin if context.admin is not None else None),
    }
    return {name: app for name, app in apps.items() if app is not None}


def _groups(context: HttpContext) -> dict[str, object]:
    """Endpoints whose methods take a request and return a response."""
    gateway, settings, stored = context.gateway, context.settings, context.gateway.stored
    models = ModelEndpoints(gateway, int(time.time()))
    pool = context.admin.pool if context.admin is not None else None
    groups: dict[str, object] = {
        "models": models,
        "health": HealthEndpoints(gateway, context.scrape, context.needed, has_workbench=context.workbench is not None),
        "lookups": EngineLookups(gateway, models, settings, context.library),
        "library": ollama.OllamaEndpoints(gateway, models, settings, pool, context.library),
    }
    if stored is not None:
        groups["responses"] = StoredResponseEndpoints(stored, settings)
        if stored.conversations is not None:
            groups["conversations"] = ConversationEndpoints(stored.conversations, settings)
    if context.files is not None:
        groups["files"] = FileEndpoints(context.files)
    if context.batches is not None:
        groups["batches"] = BatchEndpoints(context.batches, settings)
        groups["message_batches"] = MessageBatchEndpoints(context.batches, settings)
    return groups


class AdminApp:
    """The admin API and the documentation, which FastAPI serves. It takes 0.3 s to import, and many servers never need
    it: the app is made at its first request, in a thread, while streams go on."""

    def __init__(self, admin: AdminContext | None, settings: HttpSettings) -> None:
        self._admin, self._settings = admin, settings
        self._app: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = self._app or asyncio.ensure_future(asyncio.to_thread(self._make))
        await (await asyncio.shield(self._app))(scope, receive, send)

    def _make(self) -> ASGIApp:
        from modelyard.http.admin.routes import build_admin_app

        return build_admin_app(self._admin, self._settings)


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
