"""Errors over HTTP: which protocol they are written in, and how foreign exceptions become ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard import plugins
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, NotFound, with_message
from modelyard.core.protocol import WireError, WireProtocol
from modelyard.http.auth import GOOGLE_KEY
from modelyard.http.request_context import ADMIN_PATH, RequestContext, is_gemini
from modelyard.telemetry.log import log_event
from modelyard.telemetry.masking import hide_folders, mask_secrets

log = logging.getLogger("modelyard.http")


def load_protocol(name: str) -> WireProtocol:
    return cast(WireProtocol, plugins.load("protocols", name))


def protocol_of(context: RequestContext) -> WireProtocol:
    """The protocol of the path. For paths that belong to none, the client's: Anthropic's and Google's send a header
    of their own."""
    if context.path.startswith(("/v1/responses", "/responses")):
        return load_protocol("openai_responses")
    if context.path.startswith("/api/") and not context.path.startswith("/api/v0/"):  # LM Studio's are OpenAI's
        return load_protocol("ollama")
    if is_gemini(context.path, context.headers) or _is_google(context):
        return load_protocol("gemini")
    if context.path.startswith("/v1/messages"):
        return load_protocol("anthropic_messages")
    if "anthropic-version" in context.headers and context.path not in _protocol_paths():
        return load_protocol("anthropic_messages")
    return load_protocol("openai_chat")


def _is_google(context: RequestContext) -> bool:
    """Google's clients use paths of `/v1` too, of which only some are served here."""
    return GOOGLE_KEY in context.headers and context.path not in _protocol_paths()


@cache
def _protocol_paths() -> frozenset[str]:
    """Paths that belong to a protocol, whoever asks."""
    modules = [load_protocol(name) for name in plugins.names("protocols")]
    return frozenset(path for module in modules for path in getattr(module, "PATHS", ()))


def write_error(error: ModelyardError, context: RequestContext) -> WireError:
    return protocol_of(context).write_error(public_error(error, context), trace=context.trace)


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


# --- what the apps answer ---------------------------------------------------------------------------------------------


async def _on_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(request, as_modelyard_error(error))


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors (unknown path, wrong method) in the protocol of the path."""
    path, status = request.scope["path"][:256], error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        found: ModelyardError = NotFound(f"there is no {path} here; /docs lists the paths", code="path_not_found")
    elif status == 405:
        found = InvalidRequest(f"{request.method} is not a method of {path}", code="method_not_allowed")
    else:
        found = InvalidRequest(str(getattr(error, "detail", error)))
    reply = error_response(request, found)
    reply.status_code = status
    reply.headers.update(getattr(error, "headers", None) or {})  # `allow` lists the methods
    return reply


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
