"""Google's endpoints. The path names the model and the method, so they are patterns and not fixed paths.

POST /v1beta/models/{model}:generateContent, :streamGenerateContent, :countTokens, :embedContent, :batchEmbedContents
GET  /v1beta/models, /v1beta/models/{model}
"""

from __future__ import annotations

from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard.core.errors import NotFound
from modelyard.core.protocol import WireProtocol
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.request_work import RequestWork
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.models import ModelEndpoints
from modelyard.http.request_context import GEMINI_METHODS, RequestContext
from modelyard.http.settings import HttpSettings
from modelyard.http.tokens import JsonEndpoint
from modelyard.protocols import gemini
from modelyard.protocols.gemini import embeddings
from modelyard.protocols.gemini.request import PATH, QUERY
from modelyard.telemetry.request_capture import CaptureSink


def gemini_routes(
    gateway: Gateway, settings: HttpSettings, captures: CaptureSink | None, models: ModelEndpoints
) -> list[Route]:
    protocol = cast(WireProtocol, gemini)
    common = (protocol, gateway, settings, captures)
    inference = InferenceEndpoint(*common)
    methods: dict[str, ASGIApp] = {
        "generateContent": inference,
        "streamGenerateContent": inference,
        "countTokens": GeminiCount(*common),
        "embedContent": GeminiEmbed(*common),
        "batchEmbedContents": GeminiBatchEmbed(*common),
    }
    named = {name: WithPath(app) for name, app in methods.items()}
    posts = [
        Route(f"{prefix}/{{id:path}}:{method}", app, methods=["POST"])
        for prefix in gemini.PREFIXES
        for method, app in named.items()
    ]
    unknown = [Route(f"{prefix}/{{id:path}}:{{method}}", not_served, methods=["POST"]) for prefix in gemini.PREFIXES]
    lists = [route for version in ("v1beta", "v1alpha") for route in _lists(f"/{version}/models", models)]
    return [*posts, *unknown, *lists]


async def not_served(request: HttpRequest) -> Response:
    """Google's methods that no other endpoint has, such as `batchGenerateContent`."""
    known = ", ".join(sorted(GEMINI_METHODS))
    method = request.path_params["method"][:64]
    raise NotFound(f"there is no method {method} of models here; there are {known}", code="path_not_found")


def _lists(path: str, models: ModelEndpoints) -> list[Route]:
    return [Route(path, models.all), Route(path + "/{id:path}", models.one)]


class WithPath:
    """Passes the path and the query on to the protocol, which reads headers and bodies only."""

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
