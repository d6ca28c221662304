"""Events to the stream of a Responses reply.

    response.created · response.in_progress · (output_item.added … output_item.done)* · completed | incomplete | failed

The response's id comes from the trace, so that a keep-alive before `Started` already speaks of the same response.
"""

from __future__ import annotations

from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started
from modelyard.core.request import Request
from modelyard.protocols.openai_responses.blocks import Numbering, OpenBlock, Wire
from modelyard.protocols.openai_responses.failure import write_failure
from modelyard.protocols.openai_responses.response import ResponseObject


class ResponsesWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._key = request, trace
        self._response = ResponseObject(request, trace)
        self._numbering = Numbering()
        self._started = Started(trace, request.model, 0)
        self._is_created = False
        self._open: OpenBlock | None = None
        self._output: list[Wire] = []

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this wire has one choice
        if isinstance(event, BlockDelta):
            return self._grow(event)
        if isinstance(event, BlockStart):
            return self._begin(event)
        if isinstance(event, BlockEnd):
            return self._close(event)
        if isinstance(event, Started):
            self._started = event
            return self._created() + self._progress()
        return self._finish(event) if isinstance(event, Finished) else self._fail(event)

    def keepalive(self) -> bytes:
        """A repeated `response.in_progress`: clients' idle timers do not count comments."""
        return self._created() + self._progress()

    def end(self) -> bytes:
        return b""

    # --- the response

    def _created(self) -> bytes:
        if self._is_created:
            return b""
        self._is_created = True
        return self._lifecycle("response.created", self._now())

    def _progress(self) -> bytes:
        return self._lifecycle("response.in_progress", self._now())

    def _now(self) -> Wire:
        return self._response.at("in_progress", self._started.created, model=self._started.model)

    def _lifecycle(self, name: str, response: Wire) -> bytes:
        return self._numbering.frame(name, {"response": response})

    def _finish(self, finished: Finished) -> bytes:
        filler = b"" if self._output else self._begin(BlockStart(0, "text")) + self._close(BlockEnd(0))
        started = self._started
        response = self._response.finished(finished, started.created, started.model, self._output)
        return filler + self._lifecycle(f"response.{response['status']}", response)

    def _fail(self, failed: Failed) -> bytes:
        return self._created() + self._lifecycle("response.failed", self._failed(failed.error))

    def _failed(self, error: ModelyardError) -> Wire:
        started = self._started
        told = write_failure(error, self._request)
        return self._response.at("failed", started.created, model=started.model, output=self._output, error=told)

    # --- its items

    def _begin(self, start: BlockStart) -> bytes:
        self._open = OpenBlock(start, self._key, len(self._output), self._request)
        return b"".join([self._numbering.frame(name, fields) for name, fields in self._open.opening()])

    def _grow(self, delta: BlockDelta) -> bytes:
        if self._open is None or not (delta.text or delta.logprobs):
            return b""
        return self._open.grow(delta, self._numbering)

    def _close(self, end: BlockEnd) -> bytes:
        if self._open is None:
            return b""
        item, events = self._open.closing(end)
        self._open = None
        self._output.append(item)
        return b"".join([self._numbering.frame(name, fields) for name, fields in events])
