"""The event stream as chat chunks. A delta is the hottest path of the program: bytes around one encoded string."""

from __future__ import annotations

from typing import Any

import msgspec

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, Started, Usage
from modelyard.core.request import Request
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_errors import error_body
from modelyard.protocols.common.openai_fields import DONE, FINGERPRINT, FINISH_REASONS, write_usage
from modelyard.protocols.common.sse import comment, frame
from modelyard.protocols.openai_chat.logprobs import write_logprobs

_encode = msgspec.json.Encoder().encode
_KEEPALIVE = comment()
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'

# kind → what stands around the text inside `delta`
_TEXT_DELTA = {
    "text": (b'{"content":', b"}"),
    "thinking": (b'{"reasoning_content":', b"}"),
}


class _Lane:
    """One choice: the bytes around its open block's text, the calls it has made, and its usage once it has ended."""

    __slots__ = ("after", "before", "calls", "is_text", "opening", "usage")

    def __init__(self, opening: bytes) -> None:
        self.opening = opening
        self.before = self.after = b""
        self.calls = 0
        self.is_text = False
        self.usage: Usage | None = None


class ChatWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._trace = trace
        self._include_usage = request.include_usage
        self._fields: dict[str, Any] = {}
        self._lanes: dict[int, _Lane] = {}
        self._close = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._failed = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        if self._failed:
            return b""
        if type(event) is BlockDelta:
            lane = self._lanes[choice]
            if event.logprobs and lane.is_text:
                return self._delta_with_logprobs(lane, event)
            return lane.before + _encode(event.text) + lane.after if event.text else b""
        return self._write_turn(event, choice)

    def keepalive(self) -> bytes:
        return _KEEPALIVE

    def end(self) -> bytes:
        """Usage and [DONE]. A stream whose answers have not all ended must not look as if they had."""
        if self._failed:
            return b""
        if not self._lanes or any(lane.usage is None for lane in self._lanes.values()):
            return self._fail(Incomplete("the answer broke off before its end", id=self._trace))
        return self._usage_chunk() + DONE if self._include_usage else DONE

    def _write_turn(self, event: Event, choice: int) -> bytes:
        if isinstance(event, BlockStart):
            return self._start_block(event, self._lanes[choice])
        if isinstance(event, Started):
            return self._start(event, choice)
        if isinstance(event, Finished):
            return self._finish(event, self._lanes[choice])
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def _start(self, event: Started, choice: int) -> bytes:
        """The first answer to begin gives the id, time and model of every chunk."""
        if not self._fields:
            self._fields = {
                "id": f"chatcmpl-{event.id}",
                "object": "chat.completion.chunk",
                "created": event.created,
                "model": event.model,
                "system_fingerprint": FINGERPRINT,
            }
        opening = b"data: " + encode(self._fields)[:-1] + b',"choices":[{"index":%d,"delta":' % choice
        self._lanes[choice] = _Lane(opening)
        return self._chunk(opening, b'{"role":"assistant","content":""}')

    def _chunk(self, opening: bytes, delta: bytes) -> bytes:
        return opening + delta + _NO_LOGPROBS + self._close

    def _start_block(self, event: BlockStart, lane: _Lane) -> bytes:
        lane.is_text = event.kind == "text"
        if event.kind != "tool_call":
            before, after = _TEXT_DELTA[event.kind]
            self._surround(lane, before, after)
            return b""
        index, kind, field = lane.calls, *(("custom", "input") if event.custom else ("function", "arguments"))
        lane.calls += 1
        self._surround(
            lane, b'{"tool_calls":[{"index":%d,"%s":{"%s":' % (index, kind.encode(), field.encode()), b"}}]}"
        )
        call = {"index": index, "id": event.call_id, "type": kind, kind: {"name": event.name, field: ""}}
        return self._chunk(lane.opening, encode({"tool_calls": [call]}))

    def _surround(self, lane: _Lane, before: bytes, after: bytes) -> None:
        lane.before = lane.opening + before
        lane.after = after + _NO_LOGPROBS + self._close

    def _delta_with_logprobs(self, lane: _Lane, event: BlockDelta) -> bytes:
        logprobs = encode(write_logprobs(event.logprobs))
        tail = b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._close
        return lane.before + _encode(event.text) + tail

    def _finish(self, event: Finished, lane: _Lane) -> bytes:
        """`stop_reason` is an extra that names the stop string; other servers write it so too."""
        lane.usage = event.usage
        tail = b'{},"logprobs":null,"finish_reason":"%s"' % FINISH_REASONS[event.reason].encode()
        if event.stop_string is not None:
            tail += b',"stop_reason":' + _encode(event.stop_string)
        return lane.opening + tail + b"}" + self._close

    def _fail(self, error: ModelyardError) -> bytes:
        self._failed = True
        return frame(encode({"error": error_body(error)}))

    def _usage_chunk(self) -> bytes:
        lanes = [self._lanes[choice] for choice in sorted(self._lanes)]
        usages = [lane.usage for lane in lanes if lane.usage is not None]
        return frame(encode(self._fields | {"choices": [], "usage": write_usage(usages[:1], usages)}))
