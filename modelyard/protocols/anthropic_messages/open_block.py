"""The block of a stream that is being read, and the bodies of the events that build it."""

from __future__ import annotations

from msgspec import Struct

from modelyard.core.events import BlockDelta, BlockEnd, BlockKind, BlockStart, Event
from modelyard.protocols.anthropic_messages.body import ContentBlock, ReplyBody, UsageBody
from modelyard.protocols.anthropic_messages.content import read_input
from modelyard.protocols.anthropic_messages.outgoing import is_object
from modelyard.protocols.common.reasoning_signature import unpack_reasoning


class Typed(Struct):
    type: str = ""


class MessageStartBody(Struct):
    message: ReplyBody = ReplyBody()


class BlockStartBody(Struct):
    content_block: ContentBlock
    index: int = 0


class DeltaBody(Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""


class BlockDeltaBody(Struct):
    delta: DeltaBody
    index: int = 0


class BlockStopBody(Struct):
    index: int = 0


class StopBody(Struct, frozen=True):
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageDeltaBody(Struct):
    delta: StopBody = StopBody()
    usage: UsageBody = UsageBody()


BlockEventBody = BlockStartBody | BlockDeltaBody | BlockStopBody
KINDS: dict[str, BlockKind] = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "thinking",
    "tool_use": "tool_call",
}


class OpenBlock:
    """The block that is being read. `index` is None for a kind that has no place in our events: it is passed over."""

    def __init__(self, wire_index: int, index: int | None, first: ContentBlock) -> None:
        self.wire_index, self.index = wire_index, index
        self.first = first
        self.texts: list[str] = []
        self.signature = ""

    def begin(self) -> list[Event]:
        if self.index is None:
            return []
        first = self.first
        kind = KINDS[first.type]
        call = (str(first.id or ""), str(first.name or "")) if kind == "tool_call" else ("", "")
        return [BlockStart(self.index, kind, *call), *self._said(first.text or first.thinking)]

    def delta(self, delta: DeltaBody) -> list[Event]:
        self.signature += delta.signature
        return self._said(delta.text or delta.thinking or delta.partial_json)

    def _said(self, text: object) -> list[Event]:
        if self.index is None or not isinstance(text, str) or not text:
            return []
        self.texts.append(text)
        return [BlockDelta(self.index, text)]

    def end(self, cut: bool) -> list[Event]:
        if self.index is None:
            return []
        if self.first.type == "tool_use":
            late = [] if self.texts or cut else self._said(read_input(self.first.input))
            return [*late, BlockEnd(self.index, "", is_object("".join(self.texts).strip()))]
        if self.first.type == "text":
            return [BlockEnd(self.index)]
        sealed = self.signature or str(self.first.signature or self.first.data or "")
        late = [] if self.texts else self._said(unpack_reasoning(sealed))
        return [*late, BlockEnd(self.index, sealed)]
