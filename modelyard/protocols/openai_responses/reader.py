"""The client role: a Responses upstream's stream, or its whole reply, back to events."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import Event, Failed, Finished, Reply, Started, Usage, collect_reply
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.response_metrics import read_metrics
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.openai_responses.arrived import (
    RESPONSE,
    STREAM_EVENT,
    Response,
    StreamEvent,
    read_logprobs,
)
from modelyard.protocols.openai_responses.arriving import Arrivals
from modelyard.protocols.openai_responses.failure import read_failure

_TEXTS = frozenset(
    {
        "response.output_text.delta",
        "response.refusal.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
    }
)
_ENDS = frozenset({"response.completed", "response.incomplete"})
_FAILURES = frozenset({"response.failed", "response.cancelled", "error"})


class ResponsesReader:
    def __init__(self) -> None:
        self._sse = SseParser()
        self._arrivals = Arrivals()
        self._is_started = self._is_over = False

    def feed(self, data: bytes) -> list[Event]:
        return [event for framed in self._sse.feed(data) for event in self._frame(framed.data)]

    def finish(self) -> list[Event]:
        last = [event for framed in self._sse.finish() for event in self._frame(framed.data)]
        if not self._is_over:
            last += self._fail(Incomplete("the upstream's stream ended before its response was complete"))
        return last

    def whole(self, response: Response) -> list[Event]:
        """A reply that came in one piece is a stream that has only its last event."""
        if response.error or response.status in ("failed", "cancelled"):
            return list(self._fail(read_failure(response.error)))
        return list(self._end(response))

    def _frame(self, data: bytes) -> Iterator[Event]:
        if self._is_over or data == b"[DONE]":
            return
        try:
            event = STREAM_EVENT.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            yield from self._fail(Incomplete(f"the upstream sent an event that cannot be read: {error}"))
            return
        yield from self._read(event)

    def _read(self, event: StreamEvent) -> Iterator[Event]:
        if event.type in _ENDS and event.response:
            event.response.status = event.type.removeprefix("response.")
            yield from self._end(event.response)
        elif event.type in _FAILURES or (not event.type and event.error):
            yield from self._fail(_failure(event))
        elif event.response is not None:
            yield from self._start(event.response)
        elif self._take(event):
            yield from self._start(Response())
            yield from self._arrivals.tell()

    def _take(self, event: StreamEvent) -> bool:
        """Whether this event had to do with an item."""
        arrivals = self._arrivals
        if event.type in _TEXTS:
            if (arriving := arrivals.find(event.output_index)) and isinstance(event.delta, str):
                arriving.add(event.delta, read_logprobs(event.logprobs), event.type)
        elif event.type == "response.output_item.added" and event.item:
            arrivals.open(event.item, event.output_index)
        elif event.type == "response.output_item.done" and event.item:
            arrivals.done(event.item, event.output_index)
        elif event.type == "response.reasoning_summary_part.added":
            if (arriving := arrivals.find(event.output_index)) and event.summary_index:
                arriving.next_summary()
        else:
            return False
        return True

    def _start(self, response: Response) -> Iterator[Event]:
        if not self._is_started:
            self._is_started = True
            key = (response.id or "").removeprefix("resp_")
            yield Started(key, response.model or "", int(response.created_at or 0))

    def _end(self, response: Response) -> Iterator[Event]:
        yield from self._start(response)
        self._arrivals.settle(response.output or [])
        yield from self._arrivals.tell()
        self._is_over = True
        usage = response.usage.read() if response.usage else Usage()
        yield Finished(response.stop_reason(self._arrivals.has_calls), usage, timings=read_metrics(response.metrics))

    def _fail(self, error: ModelyardError) -> Iterator[Event]:
        self._is_over = True
        yield Failed(error)


def _failure(event: StreamEvent) -> ModelyardError:
    if event.response is not None:
        return read_failure(event.response.error)
    return read_failure(event.error or {"code": event.code, "message": event.message})


def reader() -> ResponsesReader:
    return ResponsesReader()


def read_reply(body: bytes) -> Reply:
    """The whole reply; one that failed raises its error."""
    return collect_reply(ResponsesReader().whole(decode(RESPONSE, body)))
