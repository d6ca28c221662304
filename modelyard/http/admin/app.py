"""The app of the admin API and of the documentation of all routes: what FastAPI serves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard import __version__
from modelyard.core.errors import InvalidRequest
from modelyard.http.admin.context import AdminContext
from modelyard.http.admin.routes import admin_router
from modelyard.http.errors import EXCEPTION_HANDLERS, error_response
from modelyard.http.openapi import describe, page_routes
from modelyard.http.settings import HttpSettings

# The middleware counts and logs. FastAPI's telemetry would search the environment for exporters at every request.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def build_admin_app(context: AdminContext | None, settings: HttpSettings) -> FastAPI:
    """`context` None: no admin API."""
    app = FastAPI(
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
    describe(app)
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
