"""Ollama's endpoints under /api that generate nothing: lists, descriptions, embeddings, and changes of the library.

`/api/chat` and `/api/generate` are inference endpoints like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from modelyard import __version__
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, TooLarge, Unimplemented
from modelyard.core.pool import ModelStatus, Pool
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import capability_names
from modelyard.gateway.request_work import RequestWork
from modelyard.http.auth import require
from modelyard.http.errors import as_modelyard_error, public_error
from modelyard.http.models import ModelEndpoints
from modelyard.http.request_context import RequestContext, read_body
from modelyard.http.settings import HttpSettings
from modelyard.http.tokens import JsonEndpoint
from modelyard.protocols.ollama import models as wire
from modelyard.protocols.ollama.errors import error_body
from modelyard.protocols.ollama.fields import NDJSON

# An Ollama version whose API this is: clients compare it before they use tools, schemas or thinking.
API_VERSION = "0.13.0"
_PROGRESS_S = 0.1  # between two lines about the bytes of one file
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

OnStatus = Callable[[str, int | None, int | None], None]  # what happens, bytes done, bytes in all


class ModelFile(Struct, frozen=True, kw_only=True):
    """What a model's file says; empty for a model without a file. `info` is its metadata under the file's names."""

    size: int = 0
    modified: float = 0.0
    format: str = ""
    architecture: str = ""
    parameters: int = 0
    quantization: str = ""
    parent: str = ""
    system: str = ""
    license: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


class LibraryOperations(Protocol):
    """Implemented by `modelyard.server.model_library`. Each change is complete when the server serves its result.
    `on_status` may be called in any thread; what it raises ends the work."""

    def describe(self, model: str, *, details: bool = False) -> ModelFile:
        """Reads files."""
        ...

    async def pull(self, source: str, on_status: OnStatus) -> None: ...
    async def remove(self, model: str) -> None: ...
    async def copy(self, source: str, destination: str) -> None: ...
    async def create(self, model: wire.NewModel, on_status: OnStatus) -> None: ...
    def blob(self, digest: str) -> Path:
        """Where the uploaded file with this digest is, or will be."""
        ...


class OllamaEndpoints:
    def __init__(
        self,
        gateway: Gateway,
        models: ModelEndpoints,
        settings: HttpSettings,
        pool: Pool | None,
        library: LibraryOperations | None,
    ) -> None:
        self._gateway, self._models, self._settings, self._pool = gateway, models, settings, pool
        self._library = library

    # --- lists --------------------------------------------------------------------------------------------------------

    async def version(self, _request: HttpRequest) -> Response:
        return _json(wire.write_version(API_VERSION), {"x-modelyard-version": __version__})

    async def tags(self, request: HttpRequest) -> Response:
        """Every model that can answer, also under its other names."""
        cards = self._models.answering(RequestContext.of(request.scope))
        rows = await asyncio.to_thread(lambda: [self._row(card.id, card.root) for card in cards])
        return _json(wire.write_tags(rows))

    async def ps(self, request: HttpRequest) -> Response:
        await _refresh(self._pool)
        loaded = [] if self._pool is None else self._pool.snapshot().models.values()
        visible = self._gateway.lookup.visible_models(RequestContext.of(request.scope).allowed)
        ready = [one for one in loaded if one.state in ("ready", "draining") and one.name in visible]
        rows = await asyncio.to_thread(lambda: [self._row(one.name, one.name, one) for one in ready])
        return _json(wire.write_ps(rows))

    def _row(self, name: str, model: str, loaded: ModelStatus | None = None) -> wire.OllamaModel:
        file = self._describe(model)
        estimate = loaded.estimate if loaded is not None else None
        size = (loaded.measured if loaded is not None else None) or (estimate.total if estimate else 0)
        on_gpu = estimate is not None and estimate.device != "cpu"
        share = estimate.gpu_layers / estimate.layers if estimate and estimate.layers else 1.0
        expires = None
        if loaded is not None and loaded.idle_ttl_s is not None:
            expires = (loaded.last_used or time.time()) + loaded.idle_ttl_s
        return wire.OllamaModel(
            name=name,
            size=file.size,
            modified=file.modified,
            format=file.format,
            family=file.architecture,
            parameters=file.parameters,
            quantization=file.quantization,
            parent=file.parent,
            context=self._gateway.lookup.target(name, "/api/ps").window
            if self._gateway.lookup.has_window(model)
            else None,
            loaded_size=size,
            gpu_size=int(size * share) if on_gpu else 0,
            expires=expires,
        )

    def _describe(self, model: str, *, details: bool = False) -> ModelFile:
        return ModelFile() if self._library is None else self._library.describe(model, details=details)

    async def show(self, request: HttpRequest) -> Response:
        name = wire.read_model(await self._body(request)).chosen
        context = RequestContext.of(request.scope)
        target, model = await self._gateway.lookup.find_defined(name, context.caller())
        engine = self._gateway.leases.engine(target.model)
        can = self._gateway.lookup.capabilities.effective(model, None if engine is None else engine.info.capabilities)
        file = await asyncio.to_thread(self._describe, target.model, details=True)
        row = await asyncio.to_thread(self._row, name, target.model)
        shown = wire.OllamaDescription(
            model=row,
            capabilities=capability_names(can),
            template=model.text.renderer.template_source if model.text is not None else "",
            system=file.system,
            license=file.license,
            parameters=file.sampling,
            info=file.info,
        )
        return _json(wire.write_show(shown))

    # --- changes ------------------------------------------------------------------------------------------------------

    async def pull(self, request: HttpRequest) -> Response:
        library, body = self._changes(), wire.read_model(await self._body(request))
        name = body.chosen
        if self._is_configured(name):  # nothing to fetch

            async def nothing(_on_status: OnStatus) -> None:
                pass

            return await _progress(request, nothing, body.stream is not False)
        require(RequestContext.of(request.scope), "operator")
        return await _progress(request, lambda on_status: library.pull(name, on_status), body.stream is not False)

    def _is_configured(self, name: str) -> bool:
        return self._gateway.lookup.router.catalog.find(name) is not None

    async def delete(self, request: HttpRequest) -> Response:
        library, body = self._changes(), wire.read_model(await self._body(request))
        await library.remove(_untagged(body.chosen))
        return Response(status_code=200)

    async def copy(self, request: HttpRequest) -> Response:
        library, body = self._changes(), wire.read_copy(await self._body(request))
        await library.copy(self._own_name(body.source), _untagged(body.destination))
        return Response(status_code=200)

    async def create(self, request: HttpRequest) -> Response:
        library, (model, stream) = self._changes(), wire.read_create(await self._body(request))
        base = self._own_name(model.base) if model.base else ""
        model = wire.renamed(model, _untagged(model.name), base)
        return await _progress(request, lambda on_status: library.create(model, on_status), stream)

    def _own_name(self, name: str) -> str:
        """The id of the model that a client's name means."""
        cache = self._gateway.lookup.router.catalog.find(name)
        if cache is None:
            raise NotFound(f"model {name!r} not found", code="model_not_found", param="model")
        return cache.model

    async def push(self, _request: HttpRequest) -> Response:
        self._changes()
        raise Unimplemented("models cannot be pushed from here")

    async def has_blob(self, request: HttpRequest) -> Response:
        path = self._changes().blob(_digest(request))
        return Response(status_code=200 if await asyncio.to_thread(path.is_file) else 404)

    async def put_blob(self, request: HttpRequest) -> Response:
        """Not limited by http.max_body_bytes, since a model is larger; only the owner may send one."""
        digest = _digest(request)
        path = self._changes().blob(digest)
        await _receive(request, path, digest.removeprefix("sha256:"))
        return Response(status_code=201)

    def _changes(self) -> LibraryOperations:
        if self._library is None:
            raise Unimplemented("this server has no library of models")
        return self._library

    async def _body(self, request: HttpRequest) -> bytes:
        return await read_body(request.receive, RequestContext.of(request.scope), self._settings)


def _digest(request: HttpRequest) -> str:
    digest: str = request.path_params["digest"]
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest('a digest is "sha256:" and 64 hex digits', param="digest")
    return digest


def _untagged(name: str) -> str:
    return name.removesuffix(":latest")


async def _refresh(pool: Pool | None) -> None:
    """Update the snapshot of a pool in another process."""
    refresh: Callable[[], Awaitable[None]] | None = getattr(pool, "refresh", None)
    if refresh is not None:
        await refresh()


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, headers=dict(headers or {}), media_type="application/json")


async def _receive(request: HttpRequest, path: Path, expected: str) -> None:
    """Write the body to the file, whose name is right only if it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, digest = path.with_suffix(f".{RequestContext.of(request.scope).trace}"), hashlib.sha256()
    try:
        with part.open("wb") as file:
            async for chunk in request.stream():
                digest.update(chunk)
                await asyncio.to_thread(file.write, chunk)
        if digest.hexdigest() != expected:
            raise InvalidRequest("the body does not have this digest: send the file again", param="digest")
        await asyncio.to_thread(part.replace, path)
    except OSError as error:
        raise TooLarge(f"the file cannot be stored: {error.strerror}", code="disk_full") from error
    finally:
        part.unlink(missing_ok=True)


# --- progress ---------------------------------------------------------------------------------------------------------


class _Abandoned(Exception):
    """The client has gone: ends the work in its thread at the next report."""


class _Progress:
    """Lines about work in another thread, for one reader."""

    def __init__(self) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
        self._last: tuple[str, float] = ("", 0.0)
        self.is_abandoned = False

    def report(self, status: str, completed: int | None = None, total: int | None = None) -> None:
        if self.is_abandoned:
            raise _Abandoned
        now = time.monotonic()
        is_same = self._last[0] == status and now - self._last[1] < _PROGRESS_S
        if is_same and completed != total:
            return
        self._last = (status, now)
        more = {} if total is None else {"digest": _name_digest(status), "total": total, "completed": completed or 0}
        self._put(wire.write_status(status, **more))

    def end(self) -> None:
        self._put(None)

    def _put(self, line: bytes | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, line)

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._queue.get()) is not None:
            yield line


def _name_digest(status: str) -> str:
    """Clients tell the bars of several files apart by their digests."""
    return "sha256:" + hashlib.sha256(status.encode()).hexdigest()


async def _progress(request: HttpRequest, work: Callable[[OnStatus], Awaitable[None]], stream: bool) -> Response:
    if not stream:
        await work(lambda *_: None)
        return _json(wire.write_status("success").strip())
    progress = _Progress()

    async def run() -> None:
        try:
            await work(progress.report)
            progress.report("success")
        finally:
            progress.end()

    async def lines() -> AsyncIterator[bytes]:
        """If the client disconnects, the work ends; what has arrived of a download stays for the next one."""
        task = asyncio.create_task(run())
        try:
            async for line in progress.lines():
                yield line
            if (error := await _result(task)) is not None:
                context = RequestContext.of(request.scope)
                context.failed(error)
                yield error_body(public_error(error, context)) + b"\n"
        finally:
            progress.is_abandoned = True
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    return StreamingResponse(lines(), media_type=NDJSON.decode())


async def _result(task: asyncio.Task[None]) -> ModelyardError | None:
    try:
        await task
    except Exception as error:
        return as_modelyard_error(error)
    return None


# --- embeddings -------------------------------------------------------------------------------------------------------


class OllamaEmbed(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = wire.read_embed(body)
        result = await self._gateway.inputs.embed(request, self.caller(request.model, context), work)
        return wire.write_embed(result.vectors, result.prompt_tokens, request, time.perf_counter() - context.arrived)


class OllamaEmbeddings(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = wire.read_embeddings(body)
        result = await self._gateway.inputs.embed(request, self.caller(request.model, context), work)
        return wire.write_embeddings(result.vectors)
