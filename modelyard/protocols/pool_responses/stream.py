"""Writes events as the stream of the pool dialect.

response.created · response.output_text.delta* · response.metrics · response.completed | response.failed
"""

from __future__ import annotations

from typing import Any

from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, Started
from modelyard.core.request import Request
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.response_metrics import write_metrics
from modelyard.protocols.common.sse import comment, frame
from modelyard.protocols.pool_responses.errors import coded_body
from modelyard.protocols.pool_responses.reply import write_header, write_response

_DELTA_START = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":'


class PoolStreamWriter:
    """Writes only the text of an answer. Reasoning is counted in the metrics and not shown."""

    def __init__(self, request: Request, trace: str) -> None:
        self._key, self._model = trace, request.model
        self._is_created = self._is_text = False
        self._text: list[str] = []

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if isinstance(event, BlockDelta):
            return self._write_delta(event.text)
        if isinstance(event, BlockStart):
            self._is_text = event.kind == "text"
        elif isinstance(event, Started):
            self._model = event.model
            return self._created()
        elif isinstance(event, Finished):
            response = write_response(self._key, self._model, "".join(self._text), event)
            metrics = _frame("response.metrics", metrics=write_metrics(event))
            return metrics + _frame("response.completed", response=response)
        elif isinstance(event, Failed):
            response = write_header(self._key, self._model) | {"error": coded_body(event.error)}
            return self._created() + _frame("response.failed", response=response)
        return b""

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        return b""

    def _created(self) -> bytes:
        if self._is_created:
            return b""
        self._is_created = True
        return _frame("response.created", response=write_header(self._key, self._model))

    def _write_delta(self, text: str) -> bytes:
        if not (text and self._is_text):
            return b""
        self._text.append(text)
        return _DELTA_START + encode(text) + b"}\n\n"


def _frame(name: str, **fields: Any) -> bytes:
    return frame(encode({"type": name, **fields}), name)


def writer(request: Request, trace: str) -> PoolStreamWriter:
    return PoolStreamWriter(request, trace)
