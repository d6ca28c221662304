"""Events to the stream of the pool dialect.

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
from modelyard.protocols.pool_responses.response import envelope, head

_DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":'


class PoolWriter:
    """Only the text of an answer goes out; what the model thought is counted in the metrics and not shown."""

    def __init__(self, request: Request, trace: str) -> None:
        self._key, self._model = trace, request.model
        self._is_created = self._is_text = False
        self._text: list[str] = []

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this wire has one choice
        if isinstance(event, BlockDelta):
            return self._grow(event.text)
        if isinstance(event, BlockStart):
            self._is_text = event.kind == "text"
        elif isinstance(event, Started):
            self._model = event.model
            return self._created()
        elif isinstance(event, Finished):
            return self._finish(event)
        elif isinstance(event, Failed):
            return self._created() + self._fail(event)
        return b""

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        return b""

    def _created(self) -> bytes:
        if self._is_created:
            return b""
        self._is_created = True
        return _event("response.created", response=head(self._key, self._model))

    def _grow(self, text: str) -> bytes:
        if not (text and self._is_text):
            return b""
        self._text.append(text)
        return _DELTA + encode(text) + b"}\n\n"

    def _finish(self, finished: Finished) -> bytes:
        whole = envelope(self._key, self._model, "".join(self._text), finished)
        metrics = _event("response.metrics", metrics=write_metrics(finished))
        return metrics + _event("response.completed", response=whole)

    def _fail(self, failed: Failed) -> bytes:
        error = coded_body(failed.error)
        return _event("response.failed", response=head(self._key, self._model) | {"error": error})


def _event(name: str, **fields: Any) -> bytes:
    return frame(encode({"type": name, **fields}), name)


def writer(request: Request, trace: str) -> PoolWriter:
    return PoolWriter(request, trace)
