"""Errors over HTTP: which protocol they are written in, and how foreign exceptions become ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard import plugins
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, with_message
from modelyard.core.protocol import WireError, WireProtocol
from modelyard.http.request_context import GOOGLE_KEY, RequestContext
from modelyard.http.routes import ADMIN_PATH, MethodNotAllowed, path_protocol
from modelyard.telemetry.log import log_event
from modelyard.telemetry.masking import hide_folders, mask_secrets

log = logging.getLogger("modelyard.http")


def load_protocol(name: str) -> WireProtocol:
    return cast(WireProtocol, plugins.load("protocols", name))


def protocol_of(context: RequestContext) -> WireProtocol:
    """The protocol of the path. For paths that belong to none, the client's: Anthropic's and Google's send a header
    of their own."""
    name = path_protocol(context.row, context.path)
    if not name:
        own = {GOOGLE_KEY: "gemini", "anthropic-version": "anthropic_messages"}
        name = next((protocol for header, protocol in own.items() if header in context.headers), "openai_chat")
    return load_protocol(name)


def write_error(error: ModelyardError, context: RequestContext) -> WireError:
    written = protocol_of(context).write_error(public_error(error, context), trace=context.trace)
    if isinstance(error, MethodNotAllowed):
        return replace(written, status=405, headers={**written.headers, "allow": error.allow})
    return written


def public_error(error: ModelyardError, context: RequestContext) -> ModelyardError:
    """The error as the client may see it: without secrets and, except in the admin API, without folders of this
    machine."""
    message = mask_secrets(error.message)
    if not context.path.startswith(ADMIN_PATH):
        message = hide_folders(message)
    return error if message == error.message else with_message(error, message)


def as_modelyard_error(error: Exception) -> ModelyardError:
    """Any other exception is a bug: it is logged with an id, and the client gets the id without the details."""
    if isinstance(error, ModelyardError):
        return error
    internal = Internal("the server made a mistake; its log has the details")
    log_event(log, logging.ERROR, "unexpected error", error=error, error_id=internal.id)
    return internal


# --- what the admin app answers ---------------------------------------------------------------------------------------


async def _on_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(request, as_modelyard_error(error))


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """FastAPI's own errors, about bodies that it cannot read."""
    return error_response(request, InvalidRequest(str(getattr(error, "detail", error))))


def error_response(request: HttpRequest, error: ModelyardError) -> Response:
    context = RequestContext.of(request.scope)
    context.failed(error)
    written = write_error(error, context)
    ids = dict.fromkeys(("x-request-id", "request-id"), f"req_{context.trace}")
    return Response(written.body, written.status, {**written.headers, **ids}, written.content_type)


EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[HttpRequest, Any], Coroutine[Any, Any, Response]]] = {
    ModelyardError: _on_error,
    HTTPException: _on_http_error,
    Exception: _on_error,
}
