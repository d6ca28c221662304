"""What an upstream's HTTP status means where its body says no more."""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core import errors
from modelyard.core.errors import ContextOverflow, ModelyardError
from modelyard.core.request import Message, Request, Text, Tool
from modelyard.protocols.common.json import encode

ERROR_BY_STATUS: Mapping[int, type[ModelyardError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthenticated,
    402: errors.Forbidden,
    403: errors.Forbidden,
    404: errors.NotFound,
    408: errors.Timeout,
    409: errors.Conflict,
    413: errors.TooLarge,
    422: errors.InvalidRequest,
    501: errors.Unimplemented,
    504: errors.Timeout,
}


# What a client is told whose own prompt, before anybody has said a word, is larger than the window. Pure.


def overflow_hint(error: ModelyardError, request: Request | None, less: str) -> str:
    """A sentence to put behind the refusal, or nothing. `less` says how such a client is started with a smaller one."""
    if not isinstance(error, ContextOverflow) or request is None or not request.tools:
        return ""
    needed = round(error.prompt_tokens * _own_share(request))
    if needed < error.window:
        return ""  # it is the conversation that is too long: making room helps
    return (
        f" The client's own instructions and tools take about {needed} of them, so it cannot work with this window: "
        f"serve the model with a larger n_ctx, or {less}."
    )


def _own_share(request: Request) -> float:
    """How much of a prompt the client brings along, by its characters: system text and tools."""
    own = sum(_size(m) for m in request.messages if m.role in ("system", "developer"))
    own += sum(len(encode([tool.description, tool.parameters])) for tool in request.tools if _is_shown(tool))
    said = sum(_size(m) for m in request.messages if m.role not in ("system", "developer"))
    return own / max(1, own + said)


def _size(message: Message) -> int:
    return sum(len(part.text) if isinstance(part, Text) else len(encode(part)) for part in message.parts)


def _is_shown(tool: Tool) -> bool:
    return not tool.deferred and tool.kind != "server"
