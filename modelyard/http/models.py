"""GET /v1/models in the shape of each protocol: `anthropic-version` selects Anthropic's, /v1beta Google's, and the name
of Mistral's SDKs theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard.core.errors import InvalidRequest
from modelyard.core.pool import ModelStatus
from modelyard.core.protocol import ModelCard
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import capability_names
from modelyard.http.errors import protocol_of
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import GEMINI_METHODS, MethodNotAllowed
from modelyard.protocols import anthropic_messages, gemini, openai_chat
from modelyard.router.router import Target


class ModelEndpoints:
    def __init__(self, gateway: Gateway, started: int) -> None:
        self._gateway, self._started = gateway, started

    async def all(self, request: HttpRequest) -> Response:
        """What can answer a request: models that are loaded, being loaded, or loaded on request."""
        cards = self.answering(RequestContext.of(request.scope))
        if request.query_params.get("loaded") == "true":
            cards = [card for card in cards if card.state == "ready"]
        protocol = protocol_of(RequestContext.of(request.scope)).NAME
        if protocol == gemini.NAME:
            query = request.query_params
            return _json(gemini.write_models(cards, query.get("pageSize"), query.get("pageToken")))
        if protocol == anthropic_messages.NAME:
            query = request.query_params
            page = anthropic_messages.write_models(
                cards,
                limit=_limit(query.get("limit")),
                after_id=query.get("after_id"),
                before_id=query.get("before_id"),
            )
            return _json(page)
        return _json(openai_chat.write_models(cards, for_mistral=_is_mistral(request)))

    async def one(self, request: HttpRequest) -> Response:
        """Any name that a request may use: a model, an alias, or a name that matches a route."""
        name = request.path_params["id"]
        context = RequestContext.of(request.scope)
        if name.rpartition(":")[2] in GEMINI_METHODS:
            raise MethodNotAllowed(request.method, context.path, "POST")
        card, protocol = self.card(name, context), protocol_of(context).NAME
        if protocol == gemini.NAME:
            return _json(gemini.write_model(card))
        if protocol == anthropic_messages.NAME:
            return _json(anthropic_messages.write_model(card))
        return _json(openai_chat.write_model(card, for_mistral=_is_mistral(request)))

    def answering(self, context: RequestContext) -> list[ModelCard]:
        """The models that can answer this caller."""
        names = self._gateway.lookup.names(context.allowed, context.path)
        targets, statuses = {name: self._gateway.lookup.target(name, context.path) for name in names}, self._statuses()
        return [
            self._card(name, target, status)
            for name, target in targets.items()
            if _answers(status := statuses.get(target.model) or ModelStatus(name=target.model))
        ]

    def card(self, name: str, context: RequestContext) -> ModelCard:
        """Of any name that a request may use."""
        if name not in self._gateway.lookup.names(context.allowed, context.path):
            self._gateway.lookup.find(name, context.caller())  # raises if the caller may not use it
        context.target = target = self._gateway.lookup.target(name, context.path)
        return self._card(name, target, self._statuses().get(target.model) or ModelStatus(name=target.model))

    def _statuses(self) -> Mapping[str, ModelStatus]:
        return self._gateway.leases.status()

    def _card(self, name: str, target: Target, status: ModelStatus) -> ModelCard:
        """Of the model that answers to this name."""
        gateway, entry = self._gateway, self._gateway.lookup.router.catalog.models[target.model]
        window = target.window if gateway.lookup.has_window(entry.name) else None
        aliases = tuple(entry.settings.aliases) if name == entry.name else ()
        model = gateway.lookup.models.get(entry.name)
        card = ModelCard(name, self._started, window, window, status.state, aliases=aliases)
        card = replace(card, root=entry.name, route=target.rule)
        if model is None:
            return replace(card, modalities=tuple(entry.settings.modalities))
        engine = gateway.leases.engine(entry.name)
        can = gateway.lookup.capabilities.effective(model, None if engine is None else engine.info.capabilities)
        return replace(card, modalities=model.modalities, capabilities=capability_names(can))


def _answers(status: ModelStatus) -> bool:
    return status.state in ("ready", "loading") or status.loads_on_request


def _is_mistral(request: HttpRequest) -> bool:
    return request.headers.get("user-agent", "").startswith("mistral-client-")


def _limit(text: str | None) -> int:
    if text is None:
        return 1000
    if not re.fullmatch("0*[1-9][0-9]{0,3}", text):
        raise InvalidRequest(f"limit must be a whole number from 1 to 9999, got {text[:40]!r}", param="limit")
    return int(text)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
