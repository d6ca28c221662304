"""Events to the Messages stream, in the order that clients insist on."""

from __future__ import annotations

from typing import Any

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Finished, Started, Usage
from modelyard.core.request import Request
from modelyard.protocols.anthropic_messages.errors import error_body
from modelyard.protocols.anthropic_messages.outgoing import is_object
from modelyard.protocols.anthropic_messages.reply import STOP_REASONS, hides_thinking, message_id, write_usage
from modelyard.protocols.common.json import dumps, encode
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.sse import frame

_PING = frame(b'{"type":"ping"}', "ping")
_STOP = frame(b'{"type":"message_stop"}', "message_stop")
_TAIL = b"}}\n\n"
# block kind → (type of its deltas, the field that holds their text)
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _frame(body: dict[str, Any]) -> bytes:
    return frame(encode(body), body["type"])


def _delta_head(index: int, kind: str, field: str) -> bytes:
    """Everything of a delta that comes before its text: encoded once a block, not once a token."""
    head = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"{kind}","{field}":'
    return b"event: content_block_delta\ndata: " + head.encode()


class Writer:
    """One request's stream. It keeps the text of a block only where the block's end needs it."""

    def __init__(self, request: Request, trace: str) -> None:
        self._trace = trace
        self._hides_thinking = hides_thinking(request)
        self._head = b""
        self._blocks = 0
        self._block = BlockStart(0, "text")
        self._kept: list[str] | None = None
        self._silent = False

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002  # this wire has one answer only
        if isinstance(event, BlockDelta):
            return self._delta(event.text)
        if isinstance(event, BlockStart):
            return self._start(event)
        if isinstance(event, BlockEnd):
            return self._end(event)
        if isinstance(event, Started):
            return self._begin(event)
        if isinstance(event, Finished):
            return self._finish(event)
        return frame(error_body(event.error, self._trace), "error")

    def keepalive(self) -> bytes:
        return _PING

    def end(self) -> bytes:
        return b""  # message_stop or error has closed the stream

    def _begin(self, event: Started) -> bytes:
        message: dict[str, Any] = {
            "id": message_id(event),
            "type": "message",
            "role": "assistant",
            "model": event.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": write_usage(Usage(event.usage.prompt, event.usage.cached)),
        }
        return _frame({"type": "message_start", "message": message}) + _PING

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _start(self, event: BlockStart) -> bytes:
        self._block = event
        self._blocks += 1
        self._head = _delta_head(event.index, *_DELTAS[event.kind])
        self._kept = None if event.kind == "text" else []
        self._silent = event.kind == "thinking" and self._hides_thinking
        opening = _frame({"type": "content_block_start", "index": event.index, "content_block": _opened(event)})
        return opening + self._json('{"input":"') if event.custom else opening

    def _delta(self, text: str) -> bytes:
        if not text:
            return b""
        if self._kept is not None:
            self._kept.append(text)
            if self._silent:
                return b""
            if self._block.custom:
                text = dumps(text)[1:-1]
        return self._head + encode(text) + _TAIL

    def _json(self, text: str) -> bytes:
        return self._head + encode(text) + _TAIL

    def _end(self, event: BlockEnd) -> bytes:
        closing = _frame({"type": "content_block_stop", "index": event.index})
        if self._block.kind == "thinking":
            return self._signature(event) + closing
        if self._block.kind == "tool_call":
            return self._end_of_call(event.complete) + closing
        return closing

    def _signature(self, event: BlockEnd) -> bytes:
        sealed = event.signature or pack_reasoning("".join(self._kept or ()))
        return _delta_head(event.index, "signature_delta", "signature") + encode(sealed) + _TAIL

    def _end_of_call(self, complete: bool) -> bytes:
        """A call that was cut off must not parse: nothing at all, or a whole object by chance, would be run."""
        if complete:
            return self._json('"}') if self._block.custom else b""
        text = "".join(self._kept or ()).strip()
        looks_whole = not self._block.custom and (not text or is_object(text))
        return self._json("{") if looks_whole else b""

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, event: Finished) -> bytes:
        delta = {"stop_reason": STOP_REASONS[event.reason], "stop_sequence": event.stop_string}
        closing = _frame({"type": "message_delta", "delta": delta, "usage": write_usage(event.usage)}) + _STOP
        return closing if self._blocks else self._empty_text() + closing

    def _empty_text(self) -> bytes:
        return self._start(BlockStart(0, "text")) + self._end(BlockEnd(0))


def _opened(event: BlockStart) -> dict[str, Any]:
    if event.kind == "text":
        return {"type": "text", "text": ""}
    if event.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
