"""Writes events as the stream of a Responses reply.

    response.created · response.in_progress · (output_item.added … output_item.done)* · completed | incomplete | failed

The response's id comes from the trace, so that a keep-alive before `Started` already has the final id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Raw

from modelyard.core.errors import Cancelled
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
)
from modelyard.core.request import Request, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.sse import delta_start, frame
from modelyard.protocols.openai_responses import mcp
from modelyard.protocols.openai_responses.errors import write_failure
from modelyard.protocols.openai_responses.reply import (
    ResponseObject,
    call_item,
    cut_reason,
    item_id,
    message_item,
    text_part,
    wants_summary,
    write_item,
    write_logprobs,
)

NamedEvent = tuple[str, JsonObject]  # an event's type and its fields


class ResponsesStreamWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._key = request, trace
        self._response = ResponseObject(request, trace)
        self._started = Started(trace, request.model, 0)
        self._is_created = False
        self._item: _ItemWriter | mcp.McpCallWriter | None = None
        self._ended: BlockEnd | None = None  # of the text or reasoning, until it is known whether a limit cut it off
        self._calls: dict[str, mcp.McpCallWriter] = {}  # of MCP servers' tools; their results come later
        self._place = 0  # of a call among those of one turn
        self._output: list[JsonObject] = []
        self._sequence_number = 0

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if isinstance(event, BlockDelta):
            return self._write_delta(event)
        if self._request.warm_up and isinstance(event, BlockStart | BlockEnd):
            return b""
        if isinstance(event, BlockStart):
            return self._end_held(False) + self._start_item(event)
        if isinstance(event, BlockEnd):
            return self._end_item(event)
        if isinstance(event, Started):
            self._started = event
            return self.keepalive() + self._write_lists()
        if isinstance(event, Finished):
            return self._finish(event)
        return self._fail(event) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        """A repeated `response.in_progress`: the idle timers of clients ignore comments."""
        return self._created() + self._frame("response.in_progress", {"response": self._in_progress()})

    def end(self) -> bytes:
        """OpenAI's streams have no `[DONE]`, and its clients expect none."""
        return b""

    def queued(self, created: int) -> bytes:
        """The first events of a background response, which waits without its client."""
        self._started = Started(self._key, self._request.model, created)
        self._is_created = True
        response = {"response": self._response.at("queued", self._started)}
        return self._frame("response.created", response) + self._frame("response.queued", response)

    def _frame(self, name: str, fields: JsonObject) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return frame(encode({"type": name, "sequence_number": number} | fields), name)

    def _in_progress(self) -> Raw:
        return self._response.at("in_progress", self._started)

    def _created(self) -> bytes:
        if self._is_created:
            return b""
        self._is_created = True
        return self._frame("response.created", {"response": self._in_progress()})

    def _finish(self, finished: Finished) -> bytes:
        """A reply without items gets one empty message."""
        empty = b""
        if not (self._output or self._ended or self._request.warm_up):
            empty = self._start_item(BlockStart(0, "text")) + self._end_item(BlockEnd(0))
        last = self._end_held(cut_reason(finished, self._request) is not None)
        status, response = self._response.finished(self._started, finished, self._output)
        return empty + last + self._frame(f"response.{status}", {"response": response})

    def _fail(self, failed: Failed) -> bytes:
        begun = self._end_held(False) + self._created()
        if self._request.background and isinstance(failed.error, Cancelled):
            response = self._response.at("cancelled", self._started, output=self._output)
            return begun + self._frame("response.incomplete", {"response": response})
        error = write_failure(failed.error, self._request)
        response = self._response.at("failed", self._started, output=self._output, error=error)
        return begun + self._frame("response.failed", {"response": response})

    # --- output items

    def _start_item(self, start: BlockStart) -> bytes:
        index, place = len(self._output), self._place
        self._place = place + 1 if start.kind == "tool_call" else 0
        if start.kind == "tool_result":
            return b""
        if start.server is None:
            self._item = _ItemWriter(start, self._key, index, self._request)
        else:
            self._item = self._calls[start.call_id] = mcp.McpCallWriter(start, index, place)
        return self._frames(self._item.start_events())

    def _frames(self, events: Iterable[NamedEvent]) -> bytes:
        return b"".join([self._frame(name, fields) for name, fields in events])

    def _write_lists(self) -> bytes:
        written = b""
        for listed in self._started.tool_lists:
            item = mcp.list_item(listed, self._key, len(self._output))
            written += self._frames(mcp.list_events(item, len(self._output)))
            self._output.append(item)
        return written

    def _write_delta(self, delta: BlockDelta) -> bytes:
        """The hot path: everything but the number and the text was encoded when the item began."""
        item = self._item
        if item is None or not (delta.text or delta.logprobs):
            return b""
        text, end = encode(delta.text), item.add(delta)
        frames = []
        for start in item.delta_starts:
            frames.append(b'%b%d,"delta":%b%b}\n\n' % (start, self._sequence_number, text, end))
            self._sequence_number += 1
        return b"".join(frames)

    def _end_item(self, end: BlockEnd) -> bytes:
        if end.result is not None:
            return self._end_call(end.result)
        writer, self._item = self._item, None
        if writer is None:
            return b""
        if isinstance(writer, mcp.McpCallWriter):
            written = self._frames(writer.end(end))
            self._output.append(writer.item)
            return written
        if not writer.is_call:
            self._item, self._ended = writer, end
            return b""
        return self._close(writer, end)

    def _end_held(self, is_cut: bool) -> bytes:
        """End the text or reasoning that waits for the event after it."""
        writer, end = self._item, self._ended
        if end is None or not isinstance(writer, _ItemWriter):
            return b""
        self._item = self._ended = None
        return self._close(writer, end, is_cut)

    def _close(self, writer: _ItemWriter, end: BlockEnd, is_cut: bool = False) -> bytes:
        item, events = writer.end(end, is_cut)
        self._output.append(item)
        return self._frames(events)

    def _end_call(self, result: ToolResult) -> bytes:
        call = self._calls.pop(result.call_id, None)
        return b"" if call is None else self._frames(call.finish(result))


class _ItemWriter:
    """One block as the output item at `index`: the events that start and end it, and the start of its deltas."""

    def __init__(self, start: BlockStart, key: str, index: int, request: Request) -> None:
        self._start = start
        self._key, self._index, self._request = key, index, request
        self._id = item_id(key, index, start.kind, start.custom)
        self.is_call = start.kind == "tool_call"
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._has_summary = start.kind == "thinking" and wants_summary(request)
        self._arguments = "custom_tool_call_input" if start.custom else "function_call_arguments"
        self.delta_starts = tuple(delta_start(name, fields) for name, fields in self._delta_events())

    def _position(self, *counters: str) -> JsonObject:
        return {"item_id": self._id, "output_index": self._index} | dict.fromkeys(counters, 0)

    def _call(self, text: str) -> ToolCall:
        start = self._start
        return ToolCall(start.call_id, start.name, text, start.namespace, start.custom)

    def start_events(self) -> Iterator[NamedEvent]:
        if self._start.kind == "text":
            item, part = message_item(self._id, "in_progress", []), text_part("")
        elif self._start.kind == "thinking":
            item = {"id": self._id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item, part = call_item(self._id, "in_progress", self._call("")), {}
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        if part:
            yield "response.content_part.added", self._position("content_index") | {"part": part}
        if self._has_summary:
            part = {"type": "summary_text", "text": ""}
            yield "response.reasoning_summary_part.added", self._position("summary_index") | {"part": part}

    def _delta_events(self) -> Iterator[NamedEvent]:
        if self._start.kind == "text":
            yield "response.output_text.delta", self._position("content_index")
        elif self._start.kind == "thinking":
            yield "response.reasoning_text.delta", self._position("content_index")
        else:
            yield f"response.{self._arguments}.delta", self._position()
        if self._has_summary:
            yield "response.reasoning_summary_text.delta", self._position("summary_index")

    def add(self, delta: BlockDelta) -> bytes:
        """Record the delta. Returns the JSON fields after its text."""
        self._text.append(delta.text)
        if self._start.kind != "text":
            return b""
        if not delta.logprobs:
            return b',"logprobs":[]'
        self._logprobs.extend(delta.logprobs)
        return b',"logprobs":' + encode(write_logprobs(delta.logprobs))

    def end(self, end: BlockEnd, is_cut: bool) -> tuple[JsonObject, Iterator[NamedEvent]]:
        """The finished item, and the events that end it."""
        text = "".join(self._text)
        if self._start.kind == "text":
            block = Block(Text(text), tuple(self._logprobs))
        elif self._start.kind == "thinking":
            block = Block(Thinking(text, end.signature))
        else:
            block = Block(self._call(text), complete=end.complete)
        item = write_item(block, self._key, self._index, self._request, is_cut)
        return item, self._end_events(text, end.complete, item)

    def _end_events(self, text: str, complete: bool, item: JsonObject) -> Iterator[NamedEvent]:
        position = self._position("content_index")
        if self._start.kind == "text":
            logprobs = item["content"][0]["logprobs"]
            yield "response.output_text.done", position | {"text": text, "logprobs": logprobs}
        elif self._start.kind == "thinking":
            yield "response.reasoning_text.done", position | {"text": text}
        elif complete:
            field = "input" if self._start.custom else "arguments"
            yield f"response.{self._arguments}.done", self._position() | {field: text}
        elif self._start.custom:
            return  # clients run a custom call that is «done» whatever its status, and cut free text looks complete
        if self._start.kind != "tool_call":
            yield "response.content_part.done", position | {"part": item["content"][0]}
        if self._has_summary:
            position = self._position("summary_index")
            yield "response.reasoning_summary_text.done", position | {"text": text}
            yield "response.reasoning_summary_part.done", position | {"part": item["summary"][0]}
        yield "response.output_item.done", {"output_index": self._index, "item": item}
