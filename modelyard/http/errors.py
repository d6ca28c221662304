"""Which protocol an error is told in: the one whose path was called, OpenAI's where nobody else's was."""

from __future__ import annotations

import logging
from typing import cast

from modelyard import plugins
from modelyard.core.errors import Internal, ModelyardError
from modelyard.core.protocol import WireError, WireProtocol
from modelyard.http.request_context import RequestContext
from modelyard.telemetry.log import event

log = logging.getLogger("modelyard.http")


def wire(name: str) -> WireProtocol:
    return cast(WireProtocol, plugins.load("protocols", name))


def dialect(visit: RequestContext) -> WireProtocol:
    if visit.path.startswith("/v1/messages") or "anthropic-version" in visit.headers:
        return wire("anthropic_messages")
    if visit.path.startswith("/v1/responses"):
        return wire("openai_responses")
    return wire("openai_chat")


def written(error: ModelyardError, visit: RequestContext) -> WireError:
    return dialect(visit).write_error(error, trace=visit.trace)


def ours(error: Exception) -> ModelyardError:
    """Our own errors as they are; anything else is a fault of ours: logged with its id, told without its details."""
    if isinstance(error, ModelyardError):
        return error
    fault = Internal("the server made a mistake; its log has the details")
    event(log, logging.ERROR, "unexpected error", error=error, error_id=fault.id)
    return fault
