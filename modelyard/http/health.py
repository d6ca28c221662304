"""/health for people and probes, /metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from modelyard import __version__
from modelyard.core.errors import Forbidden
from modelyard.core.pool import ModelStatus
from modelyard.gateway.gateway import Gateway
from modelyard.http.request_context import RequestContext
from modelyard.telemetry.masking import hide_folders, mask_secrets

HealthStatus = Literal["healthy", "degraded", "unhealthy"]


def health_status(models: Mapping[str, ModelStatus], is_connected: bool = True) -> HealthStatus:
    """Unhealthy: no model can answer now or soon, or the scheduler in another process does not answer, so that nothing
    is known of the models. Degraded: some enabled model cannot answer now."""
    if not is_connected:
        return "unhealthy"
    wanted = [m for m in models.values() if m.state != "stopped"]
    if wanted and all(m.state == "ready" for m in wanted):
        return "healthy"
    if any(m.state in ("ready", "loading", "draining") for m in wanted):
        return "degraded"
    return "unhealthy" if wanted or not models else "healthy"


class HealthEndpoints:
    """`needed` are the models that the configuration promises to requests."""

    def __init__(
        self,
        gateway: Gateway,
        scrape: Callable[[], Awaitable[bytes]],
        needed: Callable[[], Collection[str]] = tuple,
        *,
        has_workbench: bool = False,
    ) -> None:
        self._gateway, self._scrape, self._needed, self._has_workbench = gateway, scrape, needed, has_workbench
        self._has_started = False

    async def health(self, request: HttpRequest) -> Response:
        models, is_connected = self._gateway.leases.status(), self._gateway.leases.is_connected
        waiting = self._without_tokenizer()
        status = health_status({name: _usable(m, name in waiting) for name, m in models.items()}, is_connected)
        body: dict[str, Any] = {
            "status": status,
            "version": __version__,
            "scheduler_connected": is_connected,
            "tokenizer_loaded": not waiting,
            "active_requests": self._gateway.metrics.active,
        }
        context = RequestContext.of(request.scope)
        is_admin = context.role != "member"
        if context.key or is_admin:  # anonymous clients do not see which models run
            visible = self._gateway.lookup.visible_models(context.allowed)
            body["models"] = {name: _row(model, is_admin) for name, model in models.items() if name in visible}
        return _json(body, 503 if status == "unhealthy" else 200)

    async def live(self, _request: HttpRequest) -> Response:
        return _json({"status": "alive"}, 200)

    async def ready(self, _request: HttpRequest) -> Response:
        """For load balancers. A server has started when every model that it needs answers, or would be loaded on
        request: `modelyard check` says beforehand whether it will. Later one such model is enough, so that a model that
        fails or is loaded again does not take the others with it."""
        if self._gateway.draining:
            return _json({"status": "draining"}, 503)
        waiting, needed = self._without_tokenizer(), self._needed()
        usable = {
            name
            for name, model in self._gateway.leases.status().items()
            if name not in waiting and (model.state in ("ready", "draining") or model.loads_on_request)
        }
        self._has_started = self._has_started or usable.issuperset(needed)
        ready = self._gateway.leases.is_connected and self._has_started and bool(usable or not needed)
        return _json({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    def _without_tokenizer(self) -> set[str]:
        """The models whose tokenizer has not arrived, or could not be read: they cannot answer. Models of the library
        are defined at their first request."""
        models = self._gateway.lookup.models
        return {name for name, m in models.items() if m.kind == "text" and m.define is None and m.text is None}

    async def metrics(self, request: HttpRequest) -> Response:
        if RequestContext.of(request.scope).allowed:
            raise Forbidden("metrics name every model and key, and this key may use only some models")
        return Response(await self._scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def root(self, request: HttpRequest) -> Response:
        """Browsers get the workbench. Clients of Ollama look for its sentence; who asks for JSON gets it."""
        accepted = request.headers.get("accept", "")
        if "text/html" in accepted and self._has_workbench:
            return RedirectResponse("/workbench")
        if "json" in accepted or "text/html" in accepted:
            return _json({"name": "modelyard", "version": __version__, "docs": "/docs"}, 200)
        return PlainTextResponse("Ollama is running")


def _usable(model: ModelStatus, without_tokenizer: bool) -> ModelStatus:
    is_up = without_tokenizer and model.state in ("ready", "draining")
    return replace(model, state="failed") if is_up else model


def _row(model: ModelStatus, is_admin: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"state": model.state, "running": model.running, "waiting": model.waiting}
    if model.reason:
        reason = mask_secrets(model.reason)
        row["reason"] = reason if is_admin else hide_folders(reason)
    if model.state == "loading":
        row |= {"progress": round(model.progress, 3), "phase": model.phase}
    return row


def _json(body: dict[str, Any], status: int) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
