"""The admin API: the endpoints under /v1/admin, and the FastAPI app that serves them and the documentation.

Each command is checked, passed to the pool, and answered with its result. Changes of configuration files have a
preview.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Body, Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.requests import Request as HttpRequest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response, StreamingResponse

from modelyard import __version__
from modelyard.accounts.owner import includes
from modelyard.core.chat import Chat
from modelyard.core.errors import (
    BY_ADMINISTRATOR,
    Cancelled,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from modelyard.core.pool import ModelStateChange, ModelStatus, Pool
from modelyard.core.request import Caller
from modelyard.http.admin import schemas
from modelyard.http.admin.context import AdminContext, ConfigChange, ConfigEditing
from modelyard.http.admin.keys import KeyRoutes
from modelyard.http.admin.peers import merge_requests
from modelyard.http.auth import require
from modelyard.http.errors import EXCEPTION_HANDLERS, error_response
from modelyard.http.openapi import ROLE_FIELD, DescribedApp, page_routes
from modelyard.http.request_context import RequestContext, read_body
from modelyard.http.routes import ADMIN
from modelyard.http.settings import HttpSettings
from modelyard.library.attempts import Attempts
from modelyard.protocols.common.json import encode
from modelyard.telemetry.log import recent_records
from modelyard.telemetry.masking import mask_secret_values

log = logging.getLogger(__name__)

Overrides = Annotated[dict[str, Any] | None, Body()]
_MAX_REQUESTS = 1000
_MAX_LINES = 2000
_MAX_CHATS, _MAX_SEARCH = 1000, 200
_CHAT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


def admin_router(context: AdminContext, settings: HttpSettings) -> APIRouter:
    routes = AdminRoutes(context, settings)
    groups = {"admin": routes, "keys": KeyRoutes(context, settings), "config": ConfigRoutes(context, settings)}
    router = APIRouter(tags=["admin"], dependencies=[Depends(routes.refresh)], route_class=JsonRoute)
    for row in ADMIN:
        group, _, name = row.handler.partition(".")
        about: dict[str, Any] = {"response_class": Response, "openapi_extra": {ROLE_FIELD: row.role}}
        router.add_api_route(row.path, getattr(groups[group], name), methods=[row.method], summary=row.summary, **about)
    return router


class JsonRoute(APIRoute):
    """Every body is JSON, whatever its content type says: `curl -d` calls it a form. `Origin` keeps web pages of others
    out, not the content type."""

    def get_route_handler(self) -> Callable[[StarletteRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def as_json(request: StarletteRequest) -> Response:
            others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            scope = {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(StarletteRequest(scope, request.receive))

        return as_json


class AdminRoutes:
    def __init__(self, context: AdminContext, settings: HttpSettings) -> None:
        self._context, self._settings = context, settings

    async def refresh(self) -> None:
        """Update the snapshot of a pool in another process."""
        refresh: Callable[[], Awaitable[None]] | None = getattr(self._context.pool, "refresh", None)
        if refresh is not None:
            await refresh()

    async def role(self, request: StarletteRequest) -> Response:
        context, mcp = RequestContext.of(request.scope), self._context.gateway.preparer.mcp
        servers = mcp.names_by_request() if mcp is not None else []
        return _json({"role": context.role, "key": context.key, "mcp_servers": servers})

    # --- models -------------------------------------------------------------------------------------------------------

    async def models(self, request: StarletteRequest) -> Response:
        return _json(self._list(request))

    def _list(self, request: StarletteRequest) -> dict[str, Any]:
        seen = self._context.pool.snapshot().models.values()
        return {"object": "list", "data": [self._describe(request, model) for model in seen]}

    async def model(self, request: StarletteRequest, name: str) -> Response:
        return _json(self._describe(request, self._snapshot(name)))

    async def log(self, name: str) -> Response:
        return _json({"id": self._snapshot(name).name, "lines": self._log_tail(name)})

    def _log_tail(self, name: str) -> list[str]:
        """Only an engine with its own process has log lines."""
        engines = self._context.pool.engines(name)
        return [line for engine in engines for line in getattr(engine, "log_tail", list)()]

    async def load(
        self, request: StarletteRequest, name: str, overrides: Overrides = None, wait: bool = True
    ) -> Response:
        """Answer when the model is ready, or with the reason why it is not. `wait=false` answers at once."""
        changes = overrides or {}
        if isinstance(changes.get("overrides"), dict) and len(changes) == 1:
            changes = changes["overrides"]
        self._check_overrides(request, name, changes)
        return await self._run_command(request, name, self._context.pool.load(name, changes or None), wait)

    def _check_overrides(self, request: StarletteRequest, name: str, overrides: dict[str, Any]) -> None:
        if self._context.service.names_files(self._snapshot(name).name, overrides):
            require(RequestContext.of(request.scope), "owner")

    async def unload(self, request: StarletteRequest, name: str, force: bool = False, wait: bool = True) -> Response:
        return await self._run_command(request, name, self._context.pool.unload(name, force), wait)

    async def drain(self, request: StarletteRequest, name: str, wait: bool = False) -> Response:
        return await self._run_command(request, name, self._context.pool.drain(name), wait)

    async def scale(self, request: StarletteRequest, name: str, body: Overrides = None, wait: bool = True) -> Response:
        replicas = (body or {}).get("replicas")
        if not isinstance(replicas, int) or isinstance(replicas, bool):
            raise InvalidRequest('the body is {"replicas": N}, with a whole number', param="replicas")
        return await self._run_command(request, name, self._context.pool.scale(name, replicas), wait)

    async def estimate(self, request: StarletteRequest, name: str, overrides: Overrides = None) -> Response:
        """Nothing is loaded. An override that a load would refuse is refused here too."""
        self._check_overrides(request, name, overrides or {})
        service = self._context.service
        taken, machine = await service.estimate(name, overrides or {}), await service.memory()
        return _json(schemas.estimate(name, taken, machine, self._context.pool.snapshot().devices))

    async def _run_command(
        self, request: StarletteRequest, name: str, command: asyncio.Future[None], wait: bool
    ) -> Response:
        """The command continues if its client disconnects."""
        if wait:
            await _wait_for(name, command)
        else:
            command.add_done_callback(_retrieve)
        return _json(self._describe(request, self._snapshot(name)), 200 if wait else 202)

    def _snapshot(self, name: str) -> ModelStatus:
        found = self._context.pool.snapshot().models.get(name)
        if found is None:
            raise NotFound(f"no model {name!r} is configured", code="model_not_found")
        return found

    def _describe(self, request: StarletteRequest, snapshot: ModelStatus) -> dict[str, Any]:
        """With the output of its process, which may quote prompts, for those who may read logs."""
        gateway, service = self._context.gateway, self._context.service
        engines = self._context.pool.engines(snapshot.name)
        loaded = engines[0].info.capabilities if engines else None
        can = gateway.lookup.capabilities.effective(gateway.lookup.models[snapshot.name], loaded)
        lines = self._log_tail(snapshot.name) if includes(RequestContext.of(request.scope).role, "operator") else []
        about, has_window = service.describe(snapshot.name), gateway.lookup.has_window(snapshot.name)
        return schemas.model(snapshot, about, can, lines, has_window=has_window)

    async def memory(self) -> Response:
        return _json(schemas.memory(await self._context.service.memory(), self._context.pool.snapshot()))

    async def caches(self) -> Response:
        pool = self._context.pool
        seen = pool.snapshot().models.values()
        has_window = self._context.gateway.lookup.has_window
        rows = (schemas.caches(m.name, m.caches, pool.engines(m.name), has_window(m.name)) for m in seen)
        return _json({"data": [row for of_model in rows for row in of_model]})

    # --- requests -----------------------------------------------------------------------------------------------------

    async def requests(
        self,
        request: StarletteRequest,
        limit: Annotated[int, Query(ge=0, le=_MAX_REQUESTS)] = 100,
        since: float = 0.0,
        own: bool = False,
    ) -> Response:
        """`since` (unix time): requests that ended before it are left out."""
        running = self._context.gateway.running.by_trace()
        seen = (*self._context.pool.requests(), *self._context.gateway.running.calling_tools())
        live = [schemas.live(one, running.get(one.trace)) for one in seen]
        recent = takewhile(lambda one: one.at >= since, self._context.gateway.history.recent(limit))
        ended = [schemas.finished(one) for one in recent]
        here: dict[str, Any] = {"live": live, "ended": ended}
        path = f"requests?limit={limit}&since={since!r}"
        others = [] if own else await self._context.peers.request("GET", path, request.headers)
        return _json(merge_requests(msgspec.to_builtins(here), others, limit) if others else here)

    async def request(self, request: StarletteRequest, id: str, own: bool = False) -> Response:
        trace, context = id.removeprefix("req_"), self._context
        running = context.gateway.running.by_trace().get(trace)
        seen = (*context.pool.requests(), *context.gateway.running.calling_tools())
        live = [schemas.live(one, running) for one in seen if one.trace == trace]
        ended = [schemas.finished(one) for one in context.gateway.history.find(trace)]
        texts = schemas.captured(context.captures.find(trace))
        if texts is None and running is not None and (watched := context.gateway.running.watch(trace)) is not None:
            prompt, output = watched
            texts = {"request": None, "prompt": prompt, "output": output, "response": None}
        if not ended and running is None and not own:
            answers = await context.peers.request("GET", f"requests/req_{trace}", request.headers)
            if known := next((one for one in answers if one["ended"] or one["texts"]), None):
                return _json(known)
        if not live and not ended:
            raise NotFound(f"no request {id!r} runs, and the history has none with this id")
        return _json({"id": f"req_{trace}", "live": live, "ended": ended, "texts": texts})

    async def cancel(self, request: StarletteRequest, id: str, own: bool = False) -> Response:
        trace = id.removeprefix("req_")
        ended = self._context.pool.cancel(trace)
        ended += self._context.gateway.running.cancel(trace, Cancelled(BY_ADMINISTRATOR))
        if not ended and not own:
            answers = await self._context.peers.request(
                "POST", f"requests/{quote(id, safe='')}/cancel", request.headers
            )
            ended = sum(one["cancelled"] for one in answers)
        if not ended:
            raise NotFound(f"no request {id!r} runs or waits")
        return _json({"id": id, "cancelled": ended})

    async def logs(
        self,
        request: StarletteRequest,
        limit: Annotated[int, Query(ge=0, le=_MAX_LINES)] = 200,
        since: float = 0.0,
        level: LogLevel = "debug",
        id: str = "",
        own: bool = False,
    ) -> Response:
        """`since` (unix time): lines after it. `id`: of a request, or its end. A line has `at`, its unix time."""
        query = since, logging.getLevelNamesMapping()[level.upper()], id.removeprefix("req_"), limit
        lines = recent_records.read(*query)
        if not own:
            lines += await self._context.service.scheduler_log(*query)
        path = f"logs?limit={limit}&since={since!r}&level={level}&id={quote(id, safe='')}"
        others = [] if own else await self._context.peers.request("GET", path, request.headers)
        lines += [line for other in others for line in other["lines"]]
        return _json({"lines": sorted(lines, key=lambda line: line["at"])[-limit:] if limit else []})

    async def history(self) -> Response:
        context = self._context
        slices = schemas.history(context.gateway.history.intervals(context.clock()))
        return _json({**slices, "texts": context.captures.enabled})

    async def keep(self, request: StarletteRequest, body: Overrides = None, own: bool = False) -> Response:
        on = (body or {}).get("texts")
        if not isinstance(on, bool):
            raise InvalidRequest('the body is {"texts": true} or {"texts": false}', param="texts")
        self._context.captures.set_enabled(on)
        if not own:
            await self._context.peers.request("POST", "history", request.headers, msgspec.json.encode({"texts": on}))
        return _json({"texts": on})

    # --- routes, events, reload ---------------------------------------------------------------------------------------

    async def route(self, model: str, endpoint: str = "/v1/chat/completions") -> Response:
        gateway = self._context.gateway
        target, found, _ = gateway.lookup.find(model, Caller(trace="", endpoint=endpoint, allow_remote=True))
        return _json(schemas.route(model, endpoint, target, gateway.lookup.router.catalog.models[found.name].backend))

    async def routes(self) -> Response:
        return _json({"object": "list", "data": self._context.service.routes()})

    async def events(self, request: StarletteRequest) -> Response:
        stream = pool_events(self._context.pool, self._list(request), self._settings.keepalive_s)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def tune(self) -> Response:
        return _json({"data": await asyncio.to_thread(tuning_runs, self._context.tune)})

    async def reload(self, request: StarletteRequest, own: bool = False) -> Response:
        """Gateways that share a scheduler follow it; others are told."""
        done = await self._context.service.reload()
        if not own and not self._context.shares_scheduler:
            await self._context.peers.request("POST", "reload", request.headers)
        return _json(done)

    # --- models of the hub and the library ----------------------------------------------------------------------------

    async def search_hub(self, search: Annotated[str, Query(max_length=_MAX_SEARCH)] = "") -> Response:
        return _json({"object": "list", "data": await self._context.downloads.search(search)})

    async def offer(self, source: str) -> Response:
        return _json(await self._context.downloads.offer(source))

    async def set_aside(self) -> Response:
        batches = [f"batch {id}" for id in await self._context.set_aside()] if self._context.set_aside else []
        return _json({"object": "list", "data": [*batches, *await asyncio.to_thread(Attempts().set_aside)]})

    async def downloads(self) -> Response:
        return _json({"object": "list", "data": self._context.downloads.all()})

    async def start_download(self, body: Overrides = None) -> Response:
        source, quant = (body or {}).get("source"), (body or {}).get("quant")
        if not isinstance(source, str) or not (quant is None or isinstance(quant, str)):
            message = 'the body is {"source": "owner/name"}, and "quant" if the server should not choose'
            raise InvalidRequest(message, param="source")
        return _json(self._context.downloads.start(source, quant), 202)

    async def cancel_download(self, id: str) -> Response:
        return _json(self._context.downloads.cancel(id))

    async def remove_model(self, name: str) -> Response:
        await self._context.remove_model(name)
        return _json({"id": name, "deleted": True})

    # --- chats of the workbench ---------------------------------------------------------------------------------------

    async def chats(
        self,
        request: StarletteRequest,
        search: Annotated[str, Query(max_length=_MAX_SEARCH)] = "",
        limit: Annotated[int, Query(ge=0, le=_MAX_CHATS)] = 100,
    ) -> Response:
        found = await self._context.chats.find(RequestContext.of(request.scope).key, search, limit)
        return _json({"object": "list", "data": found})

    async def chat(self, request: StarletteRequest, id: str) -> Response:
        return _chat(await self._context.chats.get(RequestContext.of(request.scope).key, id))

    async def store_chat(self, request: StarletteRequest, id: str) -> Response:
        context = RequestContext.of(request.scope)
        body = await read_body(request.receive, context, self._settings)
        try:
            chat = msgspec.json.decode(body, type=Chat)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the body is not a chat: {error}", code="invalid_chat") from None
        if chat.id != id or not _CHAT_ID.fullmatch(id):
            raise InvalidRequest(
                f"the chat's id is {chat.id!r}; the path names {id!r}", code="invalid_chat", param="id"
            )
        return _chat(await self._context.chats.put(context.key, chat))

    async def delete_chat(self, request: StarletteRequest, id: str) -> Response:
        await self._context.chats.delete(RequestContext.of(request.scope).key, id)
        return _json({"id": id, "deleted": True})


def _chat(chat: Chat) -> Response:
    """Not masked: it is the user's own text, which is stored again."""
    return Response(msgspec.json.encode(chat), media_type="application/json")


async def _wait_for(name: str, command: asyncio.Future[None]) -> None:
    """An InvalidRequest of the engine is not the administrator's: report it as Unavailable."""
    try:
        await asyncio.shield(command)
    except (InvalidRequest, NotFound) as error:
        message = f"the model {name!r} could not be loaded: {error.message}"
        raise Unavailable(message, code=error.code or "model_failed") from error


def _retrieve(command: asyncio.Future[None]) -> None:
    """Mark the exception as retrieved: the model's snapshot reports what went wrong."""
    if not command.cancelled():
        command.exception()


def _json(value: Any, status: int = 200) -> Response:
    """It is the state at this moment: no browser or proxy keeps it."""
    return Response(_encode(value), status, {"cache-control": "no-store"}, "application/json")


def _encode(value: Any) -> bytes:
    """Texts of engines and upstreams may quote secrets, and a difference of files may show them beside the change."""
    return encode(mask_secret_values(msgspec.to_builtins(value)))


# --- the pool's changes as server-sent events ------------------------------------------------------------------------

PING = b": ping\n\n"


def sse_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


async def pool_events(pool: Pool, first: Any, silence_s: float) -> AsyncIterator[bytes]:
    """A snapshot of the pool, then every change; a comment after `silence_s` without one.

    The pending `anext` is kept across a ping: cancelling it would lose a change.
    """
    changes = pool.subscribe()
    pending: asyncio.Future[ModelStateChange] | None = None
    try:
        yield sse_event("snapshot", first)
        while True:
            pending = pending or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait({pending}, timeout=silence_s)
            if not done:
                yield PING
                continue
            try:
                change, pending = pending.result(), None
            except StopAsyncIteration:
                return
            yield sse_event("model", change)
    finally:
        await _unsubscribe(changes, pending)


async def _unsubscribe(
    changes: AsyncIterator[ModelStateChange], pending: asyncio.Future[ModelStateChange] | None
) -> None:
    if pending is not None:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    close = getattr(changes, "aclose", None)
    if close is not None:
        await close()


# --- results of the optimizer: one JSON file per run ------------------------------------------------------------------

_MAX_RUNS = 50


def tuning_runs(folder: Path) -> list[dict[str, Any]]:
    """The newest first. A file that is not a result is skipped with a warning."""
    files = sorted(folder.glob("*.json"), reverse=True)[:_MAX_RUNS] if folder.is_dir() else []
    return [found for file in files if (found := _run(file)) is not None]


def _run(file: Path) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is not a result of the optimizer: %s", file, error)
        return None
    return {"id": file.stem, **found}


# --- the app ----------------------------------------------------------------------------------------------------------

# The middleware counts and logs. FastAPI's telemetry would search the environment for exporters at every request.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def build_admin_app(context: AdminContext | None, settings: HttpSettings) -> FastAPI:
    """`context` None: no admin API."""
    app = DescribedApp(
        title="Modelyard",
        version=__version__,
        docs_url=None,  # see page_routes
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        telemetry=_NO_TELEMETRY,
        exception_handlers={**EXCEPTION_HANDLERS, RequestValidationError: _on_invalid},
    )
    app.router.routes += page_routes() if settings.docs else []
    if context is not None:
        app.include_router(admin_router(context, settings))
    return app


async def _on_invalid(request: HttpRequest, error: Exception) -> Response:
    return error_response(request, _invalid_request(error))


def _invalid_request(error: Exception) -> InvalidRequest:
    """FastAPI's findings about a body or query; the first is enough to act on."""
    other: dict[str, Any] = {"loc": (), "msg": str(error)}
    first = error.errors()[0] if isinstance(error, RequestValidationError) else other
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return InvalidRequest(f"the body is not JSON: {reason} at character {first['loc'][-1]}", code="invalid_json")
    if first.get("type") in ("dict_type", "model_attributes_type"):
        return InvalidRequest("the body must be a JSON object", code="invalid_body")
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return InvalidRequest(f"{where or 'the body'}: {first['msg']}", param=where or None)


# --- the configuration files ------------------------------------------------------------------------------------------

T = TypeVar("T")


class FieldsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`values` are those of the form: the engine may depend on them."""

    section: Literal["models", "caches", "routes"]
    name: str = ""
    values: dict[str, Any] = {}


class ConfigRoutes:
    def __init__(self, context: AdminContext, settings: HttpSettings) -> None:
        self._context, self._settings = context, settings

    async def overview(self) -> Response:
        return _json({**await self._editor().overview(), "editable": self._settings.edit_config})

    async def fields(self, request: StarletteRequest) -> Response:
        query = await self._read(request, FieldsQuery)
        return _json(await self._editor().fields(query.section, query.name, query.values))

    async def preview(self, request: StarletteRequest) -> Response:
        return _json(await self._editor().preview(await self._read(request, ConfigChange)))

    async def apply(self, request: StarletteRequest) -> Response:
        if not self._settings.edit_config:
            raise Forbidden(
                "this server's files are not changed over HTTP (http.edit_config = false)", code="read_only"
            )
        done = await self._editor().apply(await self._read(request, ConfigChange))
        if not self._context.shares_scheduler:
            await self._context.peers.request("POST", "reload", request.headers)
        return _json(done)

    def _editor(self) -> ConfigEditing:
        if self._context.editor is None:
            raise Conflict("this server's configuration does not come from a file", code="no_file")
        return self._context.editor

    async def _read(self, request: StarletteRequest, kind: type[T]) -> T:
        body = await read_body(request.receive, RequestContext.of(request.scope), self._settings)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the body is not a {kind.__name__}: {error}", code="invalid_body") from None
