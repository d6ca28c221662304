"""Writes replies of `/api/chat`, whole and as lines of JSON. A delta is constant bytes around one JSON string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Reply, Started
from modelyard.core.request import Request, Text, ToolCall
from modelyard.protocols.common.call_arguments import write_arguments
from modelyard.protocols.common.json import encode
from modelyard.protocols.ollama.errors import error_body
from modelyard.protocols.ollama.fields import DONE_REASONS, NDJSON, write_counts, write_logprobs, write_time


def write_reply(replies: list[Reply], request: Request) -> bytes:
    """This protocol has one choice. Incomplete calls are left out, because the client would run them."""
    reply = replies[0]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.thinking:
        message["thinking"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [write_call(call, at) for at, call in enumerate(reply.calls)]
    body = write_start(reply) | {"message": message} | write_end(reply.finished, request)
    if request.logprobs is not None:
        tokens = [token for block in reply.blocks if isinstance(block.part, Text) for token in block.logprobs]
        body["logprobs"] = write_logprobs(tokens)
    return encode(body)


def write_start(reply: Reply) -> dict[str, Any]:
    """The time is that of the end, as with Ollama."""
    ended = reply.started.created + (reply.finished.timings.total or 0)
    return {"model": reply.started.model, "created_at": write_time(ended)}


def write_end(finished: Finished, request: Request) -> dict[str, Any]:
    if request.load_only:
        return {"done": True, "done_reason": "unload" if request.keep_alive == 0 else "load"}
    return {"done": True, "done_reason": DONE_REASONS[finished.reason]} | write_counts(finished)


def write_call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": write_arguments(call.arguments)}
    return {"id": call.id, "function": function}


# --- the stream -------------------------------------------------------------------------------------------------------


class LineWriter:
    """A subclass says where a line has its text. A call is written when it is complete, and an incomplete one never.

    Clients read a line of empty text as such a line, which keeps the connection alive while they wait.
    """

    content_type = NDJSON
    text_start: bytes
    thinking_start: bytes
    delta_end: bytes

    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._trace = request, trace
        self.clock: Callable[[], float] | None = None  # the edge sets it; without one, the time of the start counts
        self._stamp = TimeStamp()
        self._head = b'{"model":' + encode(request.model)
        self._started: Started | None = None
        self._block = BlockStart(0, "text")
        self._delta_start = b""
        self._arguments: list[str] = []
        self._calls = 0
        self._over = False

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if self._over:
            return b""
        if type(event) is BlockDelta:
            return self._write_delta(event)
        if isinstance(event, BlockStart):
            self._block, self._arguments = event, []
            self._delta_start = self.thinking_start if event.kind == "thinking" else self.text_start
            return b""
        if isinstance(event, BlockEnd):
            return self._end_call() if self._block.kind == "tool_call" and event.complete else b""
        if isinstance(event, Started):
            self._started = event
            self._head = b'{"model":' + encode(event.model)
            return b""
        if isinstance(event, Finished):
            self._over = True
            return self._line(self.empty() | write_end(event, self._request) | self.last_fields(event))
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return self._line_start() + self.text_start + b'""' + self.delta_end

    def end(self) -> bytes:
        """A stream without its last line must not look complete."""
        return b"" if self._over else self._fail(Incomplete("the answer ended before it was complete", id=self._trace))

    def empty(self) -> dict[str, Any]:
        """The text of the last line."""
        raise NotImplementedError

    def last_fields(self, event: Finished) -> dict[str, Any]:  # noqa: ARG002 - for a subclass
        return {}

    def note_text(self, text: str) -> None:
        """For a subclass whose last line repeats the text."""

    def _write_delta(self, event: BlockDelta) -> bytes:
        kind = self._block.kind
        if kind == "tool_call":
            self._arguments.append(event.text)
            return b""
        if kind == "text":
            self.note_text(event.text)
            if event.logprobs:
                end = self.delta_end[:-2] + b',"logprobs":' + encode(write_logprobs(event.logprobs)) + b"}\n"
                return self._line_start() + self._delta_start + encode(event.text) + end
        return self._line_start() + self._delta_start + encode(event.text) + self.delta_end if event.text else b""

    def _end_call(self) -> bytes:
        block = self._block
        call = write_call(ToolCall(block.call_id, block.name, "".join(self._arguments)), self._calls)
        self._calls += 1
        return self._line({"message": {"role": "assistant", "content": "", "tool_calls": [call]}, "done": False})

    def _line(self, fields: dict[str, Any]) -> bytes:
        return self._line_start() + b"," + encode(fields)[1:] + b"\n"

    def _line_start(self) -> bytes:
        """The model and the time of this line."""
        if self.clock is not None:
            return self._head + self._stamp.write(self.clock())
        return self._head if self._started is None else self._head + self._stamp.write(self._started.created)

    def _fail(self, error: ModelyardError) -> bytes:
        self._over = True
        return error_body(error) + b"\n"


class TimeStamp:
    """Writes the time of a line. The text of a second is made once: a stream has many lines in one."""

    def __init__(self) -> None:
        self._second, self._text = -1, b""

    def write(self, unix: float) -> bytes:
        second = int(unix)
        if second != self._second:
            self._second, self._text = second, b',"created_at":"' + write_time(second)[: -len("000000Z")].encode()
        return b'%s%06dZ"' % (self._text, int((unix - second) * 1e6))


class ChatLineWriter(LineWriter):
    text_start = b',"message":{"role":"assistant","content":'
    thinking_start = b',"message":{"role":"assistant","content":"","thinking":'
    delta_end = b'},"done":false}\n'

    def empty(self) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": ""}}
