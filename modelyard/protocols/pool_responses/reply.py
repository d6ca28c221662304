"""Writes the pool dialect's reply: one text and its metrics."""

from __future__ import annotations

from typing import Any

from modelyard.core.events import Finished, Reply
from modelyard.core.request import Request
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.response_metrics import write_metrics


def write_reply(replies: list[Reply], request: Request) -> bytes:  # noqa: ARG001 - other protocols echo the request
    """This protocol has one choice: the first reply."""
    reply = replies[0]
    return encode(write_response(reply.started.id, reply.started.model, reply.text, reply.finished))


def write_header(key: str, model: str) -> dict[str, Any]:
    """The fields that are known from the start."""
    return {"id": f"resp_{key}", "object": "response", "model": model}


def write_response(key: str, model: str, text: str, finished: Finished) -> dict[str, Any]:
    output = [{"type": "output_text", "text": text}]
    return write_header(key, model) | {"output": output, "output_text": text, "metrics": write_metrics(finished)}
