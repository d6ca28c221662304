"""Anthropic Messages, both roles: requests, replies, streams, errors, token counts and model lists.

POST /v1/messages  →  message_start · ping · (content_block_start · content_block_delta* · content_block_stop)*
                      · message_delta · message_stop      each an `event:` line and a `data:` line
"""

from __future__ import annotations

from modelyard.core.request import Request
from modelyard.protocols.anthropic_messages.client import MessagesStreamReader, read_reply, write_request
from modelyard.protocols.anthropic_messages.errors import read_error, write_error
from modelyard.protocols.anthropic_messages.reply import (
    MessagesStreamWriter,
    write_count,
    write_model,
    write_models,
    write_reply,
)
from modelyard.protocols.anthropic_messages.request import read_request

NAME = "anthropic_messages"
PATHS: tuple[str, ...] = ("/v1/messages",)

__all__ = [
    "NAME",
    "PATHS",
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


def writer(request: Request, trace: str) -> MessagesStreamWriter:
    return MessagesStreamWriter(request, trace)


def reader() -> MessagesStreamReader:
    return MessagesStreamReader()
