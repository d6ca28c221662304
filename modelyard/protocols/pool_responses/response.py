"""The pool dialect's envelope: one text, and what it took to make it."""

from __future__ import annotations

from typing import Any

from modelyard.core.events import Finished, Reply
from modelyard.core.request import Request
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.response_metrics import write_metrics

Wire = dict[str, Any]


def head(key: str, model: str) -> Wire:
    return {"id": f"resp_{key}", "object": "response", "model": model}


def envelope(key: str, model: str, text: str, finished: Finished) -> Wire:
    output = [{"type": "output_text", "text": text}]
    return head(key, model) | {"output": output, "output_text": text, "metrics": write_metrics(finished)}


def write_reply(replies: list[Reply], request: Request) -> bytes:  # noqa: ARG001 - other wires echo the request
    """This wire has one choice: the first reply."""
    reply = replies[0]
    return encode(envelope(reply.started.id, reply.started.model, reply.text, reply.finished))
