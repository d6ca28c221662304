"""The events of one output item while it is written: how it opens, grows and closes, for each kind of block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from modelyard.core.events import Block, BlockDelta, BlockEnd, BlockStart, TokenLogprob
from modelyard.core.request import Request, Text, Thinking, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.sse import frame
from modelyard.protocols.openai_responses.response import (
    call_item,
    item_id,
    message_item,
    text_part,
    wants_summary,
    write_item,
    write_logprob,
)

Wire = dict[str, Any]
Named = tuple[str, Wire]  # an event's type and its fields


class Numbering:
    """Frames events and numbers them: one counter for the whole stream."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, name: str, fields: Wire) -> bytes:
        number, self._next = self._next, self._next + 1
        return frame(encode({"type": name, "sequence_number": number} | fields), name)

    def frame_delta(self, head: bytes, text: bytes, tail: bytes) -> bytes:
        """The hot path: everything but the number and the text was encoded when the block began."""
        number, self._next = self._next, self._next + 1
        return b'%b%d,"delta":%b%b}\n\n' % (head, number, text, tail)


class OpenBlock:
    """A block on its way out as the item at `output_index`."""

    def __init__(self, start: BlockStart, key: str, output_index: int, request: Request) -> None:
        self.start = start
        self._key, self._index, self._request = key, output_index, request
        self._id = item_id(key, output_index, start.kind, start.custom)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._summary = start.kind == "thinking" and wants_summary(request)
        self._heads = tuple(self._head(name, place) for name, place in self._deltas())

    # --- opening

    def opening(self) -> Iterator[Named]:
        yield "response.output_item.added", {"output_index": self._index, "item": self._empty_item()}
        if self.start.kind != "tool_call":
            yield "response.content_part.added", self._place("content_index") | {"part": self._part("")}
        if self._summary:
            part = {"type": "summary_text", "text": ""}
            yield "response.reasoning_summary_part.added", self._place("summary_index") | {"part": part}

    def _empty_item(self) -> Wire:
        if self.start.kind == "text":
            return message_item(self._id, "in_progress", [])
        if self.start.kind == "thinking":
            return {"id": self._id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        return call_item(self._id, "in_progress", self._call(""))

    # --- growing

    def grow(self, delta: BlockDelta, numbering: Numbering) -> bytes:
        self._text.append(delta.text)
        self._logprobs.extend(delta.logprobs)
        text, tail = encode(delta.text), self._tail(delta.logprobs)
        return b"".join([numbering.frame_delta(head, text, tail) for head in self._heads])

    def _tail(self, logprobs: Iterable[TokenLogprob]) -> bytes:
        if self.start.kind != "text":
            return b""
        return b',"logprobs":' + encode([write_logprob(entry) for entry in logprobs])

    def _deltas(self) -> Iterator[tuple[str, Wire]]:
        if self.start.kind == "text":
            yield "response.output_text.delta", self._place("content_index")
        elif self.start.kind == "thinking":
            yield "response.reasoning_text.delta", self._place("content_index")
        else:
            yield f"response.{self._field()}.delta", self._place()
        if self._summary:
            yield "response.reasoning_summary_text.delta", self._place("summary_index")

    def _head(self, name: str, place: Wire) -> bytes:
        opened = encode({"type": name} | place).removesuffix(b"}")
        return b"event: " + name.encode() + b"\ndata: " + opened + b',"sequence_number":'

    # --- closing

    def closing(self, end: BlockEnd) -> tuple[Wire, Iterator[Named]]:
        """The finished item, and the events that say so."""
        text = "".join(self._text)
        item = write_item(self._block(text, end), self._key, self._index, self._request)
        return item, self._closing_events(text, end.complete, item)

    def _closing_events(self, text: str, complete: bool, item: Wire) -> Iterator[Named]:
        if self.start.kind == "text":
            yield (
                "response.output_text.done",
                self._place("content_index")
                | {
                    "text": text,
                    "logprobs": item["content"][0]["logprobs"],
                },
            )
        elif self.start.kind == "thinking":
            yield "response.reasoning_text.done", self._place("content_index") | {"text": text}
        elif complete:
            yield f"response.{self._field()}.done", self._place() | {_WHOLE[self.start.custom]: text}
        elif self.start.custom:
            return  # free text that was cut still looks whole, and clients run what is «done» whatever its status
        yield from self._closing_parts(text, item)
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    def _closing_parts(self, text: str, item: Wire) -> Iterator[Named]:
        if self.start.kind != "tool_call":
            yield "response.content_part.done", self._place("content_index") | {"part": item["content"][0]}
        if self._summary:
            place, part = self._place("summary_index"), item["summary"][0]
            yield "response.reasoning_summary_text.done", place | {"text": text}
            yield "response.reasoning_summary_part.done", place | {"part": part}

    def _block(self, text: str, end: BlockEnd) -> Block:
        if self.start.kind == "text":
            return Block(Text(text), tuple(self._logprobs))
        if self.start.kind == "thinking":
            return Block(Thinking(text, end.signature))
        return Block(self._call(text), complete=end.complete)

    # --- shared

    def _place(self, *counters: str) -> Wire:
        return {"item_id": self._id, "output_index": self._index} | dict.fromkeys(counters, 0)

    def _part(self, text: str) -> Wire:
        return text_part(text) if self.start.kind == "text" else {"type": "reasoning_text", "text": text}

    def _call(self, text: str) -> ToolCall:
        start = self.start
        return ToolCall(start.call_id, start.name, text, start.namespace, start.custom)

    def _field(self) -> str:
        return "custom_tool_call_input" if self.start.custom else "function_call_arguments"


_WHOLE = {False: "arguments", True: "input"}
