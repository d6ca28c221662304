"""Anthropic Messages, both roles: requests, replies, streams, errors, token counts and model lists.

    POST /v1/messages  →  message_start · ping · (content_block_start · content_block_delta* · content_block_stop)*
                          · message_delta · message_stop      each an `event:` line and a `data:` line

The request is read leniently: unknown fields, blocks, enum values and betas are never an error; what cannot be carried
over is named in `Request.warnings`.
"""

from __future__ import annotations

from modelyard.core.request import Request
from modelyard.protocols.anthropic_messages.errors import read_error, write_error
from modelyard.protocols.anthropic_messages.listing import write_count, write_model, write_models
from modelyard.protocols.anthropic_messages.outgoing import write_request
from modelyard.protocols.anthropic_messages.reply import read_reply, write_reply
from modelyard.protocols.anthropic_messages.request import read_request
from modelyard.protocols.anthropic_messages.stream_in import Reader
from modelyard.protocols.anthropic_messages.stream_out import Writer

NAME = "anthropic_messages"
PATHS: tuple[str, ...] = ("/v1/messages",)


def writer(request: Request, trace: str) -> Writer:
    return Writer(request, trace)


def reader() -> Reader:
    return Reader()


__all__ = [
    "NAME",
    "PATHS",
    "Reader",
    "Writer",
    "read_error",
    "read_reply",
    "read_request",
    "reader",
    "write_count",
    "write_error",
    "write_model",
    "write_models",
    "write_reply",
    "write_request",
    "writer",
]
