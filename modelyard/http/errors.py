"""Errors over HTTP: which protocol they are written in, and how foreign exceptions become ours."""

from __future__ import annotations

import logging
from typing import cast

from modelyard import plugins
from modelyard.core.errors import Internal, ModelyardError
from modelyard.core.protocol import WireError, WireProtocol
from modelyard.http.request_context import RequestContext
from modelyard.telemetry.log import log_event

log = logging.getLogger("modelyard.http")


def load_protocol(name: str) -> WireProtocol:
    return cast(WireProtocol, plugins.load("protocols", name))


def protocol_of(context: RequestContext) -> WireProtocol:
    """The protocol of the path. For paths that belong to none, the client's: Anthropic's send a header of their own."""
    if context.path.startswith("/v1/responses"):
        return load_protocol("openai_responses")
    if context.path.startswith("/v1/messages") or "anthropic-version" in context.headers:
        return load_protocol("anthropic_messages")
    return load_protocol("openai_chat")


def write_error(error: ModelyardError, context: RequestContext) -> WireError:
    return protocol_of(context).write_error(error, trace=context.trace)


def as_modelyard_error(error: Exception) -> ModelyardError:
    """Any other exception is a bug: it is logged with an id, and the client gets the id without the details."""
    if isinstance(error, ModelyardError):
        return error
    internal = Internal("the server made a mistake; its log has the details")
    log_event(log, logging.ERROR, "unexpected error", error=error, error_id=internal.id)
    return internal
