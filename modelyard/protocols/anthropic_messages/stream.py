"""Writes events as a Messages stream, in the order that clients require."""

from __future__ import annotations

from typing import Any

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started
from modelyard.core.request import Request
from modelyard.protocols.anthropic_messages import mcp
from modelyard.protocols.anthropic_messages.errors import error_body
from modelyard.protocols.anthropic_messages.reply import STOP_REASONS, hides_thinking, write_message, write_usage
from modelyard.protocols.common.json import dumps, encode, is_json_object
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.sse import frame

_PING = frame(b'{"type":"ping"}', "ping")
_MESSAGE_STOP = frame(b'{"type":"message_stop"}', "message_stop")
_DELTA_END = b"}}\n\n"
# block kind → (type of its deltas, the field that holds their text)
_DELTA_TYPES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


class MessagesStreamWriter:
    """The stream of one request. It keeps the text of a block only where the end of the block needs it."""

    def __init__(self, request: Request, trace: str) -> None:
        self._trace = trace
        self._hides_thinking = hides_thinking(request)
        self._blocks = 0
        self._block = BlockStart(0, "text")
        self._delta_start = b""
        self._text: list[str] | None = None
        self._hidden = False

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if isinstance(event, BlockDelta):
            return self._write_delta(event.text)
        if isinstance(event, BlockStart):
            return self._start_block(event)
        if isinstance(event, BlockEnd):
            return self._end_block(event)
        if isinstance(event, Started):
            return _frame({"type": "message_start", "message": write_message(event, [])}) + _PING
        if isinstance(event, Finished):
            return self._finish(event)
        return frame(error_body(event.error, self._trace), "error") if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return _PING

    def end(self) -> bytes:
        return b""  # message_stop or error has ended the stream

    def _start_block(self, event: BlockStart) -> bytes:
        if event.kind == "tool_result":
            return b""  # it is sent whole at its end
        self._block = event
        self._blocks += 1
        self._delta_start = _delta_start(event.index, *_DELTA_TYPES[event.kind])
        self._text = None if event.kind == "text" else []
        self._hidden = event.kind == "thinking" and self._hides_thinking
        block: dict[str, Any] = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
        if event.kind == "text":
            block = {"type": "text", "text": ""}
        elif event.kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif event.server is not None:
            block = mcp.use_block(event.call_id, event.name, event.server, {})
        start = _frame({"type": "content_block_start", "index": event.index, "content_block": block})
        return start + self._json_delta('{"input":"') if event.custom else start

    def _write_delta(self, text: str) -> bytes:
        if not text:
            return b""
        if self._text is not None:
            self._text.append(text)
            if self._hidden:
                return b""
            if self._block.custom:
                text = dumps(text)[1:-1]
        return self._delta_start + encode(text) + _DELTA_END

    def _json_delta(self, text: str) -> bytes:
        return self._delta_start + encode(text) + _DELTA_END

    def _end_block(self, event: BlockEnd) -> bytes:
        last = b""
        if event.result is not None:
            block = mcp.result_block(event.result)
            last = _frame({"type": "content_block_start", "index": event.index, "content_block": block})
        elif self._block.kind == "thinking":
            signature = event.signature or pack_reasoning("".join(self._text or ()))
            last = _delta_start(event.index, "signature_delta", "signature") + encode(signature) + _DELTA_END
        elif self._block.kind == "tool_call":
            last = self._end_call(event.complete)
        return last + _frame({"type": "content_block_stop", "index": event.index})

    def _end_call(self, complete: bool) -> bytes:
        """The arguments of an incomplete call must not parse: a client would run them."""
        if complete:
            return self._json_delta('"}') if self._block.custom else b""
        text = "".join(self._text or ()).strip()
        parses = not self._block.custom and (not text or is_json_object(text))
        return self._json_delta("{") if parses else b""

    def _finish(self, event: Finished) -> bytes:
        """A reply without blocks gets one empty text block."""
        empty = b"" if self._blocks else self._start_block(BlockStart(0, "text")) + self._end_block(BlockEnd(0))
        delta = {"stop_reason": STOP_REASONS[event.reason], "stop_sequence": event.stop_string}
        end = _frame({"type": "message_delta", "delta": delta, "usage": write_usage(event.usage)})
        return empty + end + _MESSAGE_STOP


def _frame(body: dict[str, Any]) -> bytes:
    return frame(encode(body), body["type"])


def _delta_start(index: int, kind: str, field: str) -> bytes:
    """Everything before the text of a delta, encoded once per block instead of once per token."""
    start = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"{kind}","{field}":'
    return b"event: content_block_delta\ndata: " + start.encode()
