"""Google's endpoints. The path names the model and the method, so they are patterns and not fixed paths.

POST /v1beta/models/{model}:generateContent, :streamGenerateContent, :countTokens, :embedContent, :batchEmbedContents
GET  /v1beta/models, /v1beta/models/{model}
"""

from __future__ import annotations

from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard.core.errors import NotFound
from modelyard.core.protocol import WireProtocol
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.request_work import RequestWork
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import GEMINI_METHODS
from modelyard.http.settings import HttpSettings
from modelyard.http.tokens import JsonEndpoint
from modelyard.protocols import gemini
from modelyard.protocols.gemini import embeddings
from modelyard.protocols.gemini.request import PATH, QUERY
from modelyard.telemetry.request_capture import CaptureSink


def gemini_apps(gateway: Gateway, settings: HttpSettings, captures: CaptureSink | None) -> dict[str, ASGIApp]:
    common = (cast(WireProtocol, gemini), gateway, settings, captures)
    apps: dict[str, ASGIApp] = {
        "gemini": InferenceEndpoint(*common),
        "gemini_count": GeminiCount(*common),
        "gemini_embed": GeminiEmbed(*common),
        "gemini_batch_embed": GeminiBatchEmbed(*common),
    }
    return {name: WithPath(app) for name, app in apps.items()}


async def not_served(request: HttpRequest) -> Response:
    """Google's methods that no other endpoint has, such as `batchGenerateContent`."""
    known = ", ".join(sorted(GEMINI_METHODS))
    method = request.path_params["method"][:64]
    raise NotFound(f"there is no method {method} of models here; there are {known}", code="path_not_found")


class WithPath:
    """Passes the path and the query on to the protocol, which reads headers and bodies only."""

    notes_status = True

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        query = scope["query_string"].decode("latin-1")
        context.headers = {**context.headers, PATH: scope["path"], QUERY: query}
        await self._app(scope, receive, send)


class GeminiCount(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = await work.run(gemini.read_count_request, body, context.headers)
        return gemini.write_count(await self._gateway.inputs.count(request, self.caller(request.model, context), work))


class GeminiEmbed(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = embeddings.read_embed(body, context.headers)
        result = await self._gateway.inputs.embed(request, self.caller(request.model, context), work)
        return embeddings.write_embedding(result.vectors, request)


class GeminiBatchEmbed(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = embeddings.read_batch_embed(body, context.headers)
        result = await self._gateway.inputs.embed(request, self.caller(request.model, context), work)
        return embeddings.write_embeddings(result.vectors, request)
