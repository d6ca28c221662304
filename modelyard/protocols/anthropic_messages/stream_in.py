"""The Messages stream to events: cut anywhere, tolerant of what is missing or new, never two blocks open at once."""

from __future__ import annotations

from typing import TypeVar

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from modelyard.core.errors import Incomplete, InvalidRequest
from modelyard.core.events import BlockDelta, BlockEnd, BlockKind, BlockStart, Event, Failed, Finished, Usage
from modelyard.protocols.anthropic_messages.body import ContentBlock, ReplyBody, UsageBody
from modelyard.protocols.anthropic_messages.content import read_input
from modelyard.protocols.anthropic_messages.errors import read_stream_error
from modelyard.protocols.anthropic_messages.outgoing import is_object
from modelyard.protocols.anthropic_messages.reply import read_started, read_stop, read_usage
from modelyard.protocols.json import decode
from modelyard.protocols.sealing import unseal
from modelyard.protocols.sse import SseEvent, SseParser

T = TypeVar("T")


class _Typed(Struct):
    type: str = ""


class _MessageStart(Struct):
    message: ReplyBody = ReplyBody()


class _BlockStart(Struct):
    content_block: ContentBlock
    index: int = 0


class _Delta(Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""


class _BlockDelta(Struct):
    delta: _Delta
    index: int = 0


class _BlockStop(Struct):
    index: int = 0


class _Stop(Struct):
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _MessageDelta(Struct):
    delta: _Stop = _Stop()
    usage: UsageBody = UsageBody()


_BlockEvent = _BlockStart | _BlockDelta | _BlockStop
_typed = Decoder(_Typed)
_message_start = Decoder(_MessageStart)
_message_delta = Decoder(_MessageDelta)
_block_events: dict[str, Decoder[_BlockStart] | Decoder[_BlockDelta] | Decoder[_BlockStop]] = {
    "content_block_start": Decoder(_BlockStart),
    "content_block_delta": Decoder(_BlockDelta),
    "content_block_stop": Decoder(_BlockStop),
}
_KINDS: dict[str, BlockKind] = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "thinking",
    "tool_use": "tool_call",
}


class _Open:
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
        kind = _KINDS[first.type]
        call = (str(first.id or ""), str(first.name or "")) if kind == "tool_call" else ("", "")
        return [BlockStart(self.index, kind, *call), *self._said(first.text or first.thinking)]

    def delta(self, delta: _Delta) -> list[Event]:
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
        late = [] if self.texts else self._said(unseal(sealed))
        return [*late, BlockEnd(self.index, sealed)]


class Reader:
    """Ends in exactly one Finished or Failed; what comes after it is not read."""

    def __init__(self) -> None:
        self._sse = SseParser()
        self._begun = self._done = False
        self._usage = Usage()
        self._stop: _Stop | None = None
        self._blocks = 0
        self._open: _Open | None = None
        self._waiting: dict[int, list[_BlockEvent]] = {}  # blocks that began before the open one ended

    def feed(self, data: bytes) -> list[Event]:
        return self._read_all(self._sse.feed(data))

    def finish(self) -> list[Event]:
        """A stream that said why it stopped is whole, even without its last event."""
        out = self._read_all(self._sse.finish())
        if self._done:
            return out
        if self._stop and self._stop.stop_reason:
            return [*out, *self._finished()]
        return [*out, *self._failed(Incomplete("the upstream's stream broke off before it was finished"))]

    def _read_all(self, frames: list[SseEvent]) -> list[Event]:
        out: list[Event] = []
        for frame in frames:
            if self._done:
                break
            try:
                out += self._read(frame)
            except (InvalidRequest, DecodeError) as error:
                out += self._failed(Incomplete(f"the upstream's stream cannot be read: {error}"))
        return out

    def _read(self, frame: SseEvent) -> list[Event]:
        name = frame.event or _typed.decode(frame.data).type
        if decoder := _block_events.get(name):
            return [*self._begin(ReplyBody()), *self._block(_decode(decoder, frame.data))]
        if name == "message_start":
            return self._begin(_decode(_message_start, frame.data).message)
        if name == "message_delta":
            return self._message_delta(_decode(_message_delta, frame.data))
        if name == "message_stop":
            return self._finished()
        if name == "error":
            return self._failed(read_stream_error(frame.data))
        return []

    # --- the message ------------------------------------------------------------------------------------------------

    def _begin(self, message: ReplyBody) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        self._usage = read_usage(message.usage, Usage())
        return [read_started(message, self._usage)]

    def _message_delta(self, told: _MessageDelta) -> list[Event]:
        out = [*self._begin(ReplyBody()), *self._settle()]
        self._usage = read_usage(told.usage, self._usage)
        if told.delta.stop_reason is not None or self._stop is None:
            self._stop = told.delta
        return out

    def _finished(self) -> list[Event]:
        out = [*self._begin(ReplyBody()), *self._settle()]
        self._done = True
        stop = self._stop or _Stop()
        return [*out, Finished(read_stop(stop.stop_reason), self._usage, stop.stop_sequence)]

    def _failed(self, error: Exception) -> list[Event]:
        self._done = True
        return [Failed(error)]  # type: ignore[arg-type]

    # --- its blocks -------------------------------------------------------------------------------------------------

    def _block(self, event: _BlockEvent) -> list[Event]:
        if self._open is not None and event.index != self._open.wire_index:
            self._waiting.setdefault(event.index, []).append(event)
            return []
        if isinstance(event, _BlockStart):
            return [*self._close(cut=False), *self._start(event)]
        if self._open is None:
            return []
        if isinstance(event, _BlockDelta):
            return self._open.delta(event.delta)
        return [*self._close(cut=False), *self._next()]

    def _start(self, event: _BlockStart) -> list[Event]:
        known = event.content_block.type in _KINDS
        self._open = _Open(event.index, self._blocks if known else None, event.content_block)
        self._blocks += known
        return self._open.begin()

    def _close(self, *, cut: bool) -> list[Event]:
        block, self._open = self._open, None
        return block.end(cut) if block else []

    def _next(self) -> list[Event]:
        """The block that has waited longest, as far as it has come."""
        out: list[Event] = []
        while self._waiting and self._open is None:
            for event in self._waiting.pop(next(iter(self._waiting))):
                out += self._block(event)
        return out

    def _settle(self) -> list[Event]:
        """The message is over: a block that was never closed is closed as it stands, then those that waited."""
        out: list[Event] = []
        while self._open is not None or self._waiting:
            out += [*self._close(cut=True), *self._next()]
        return out


def _decode(decoder: Decoder[T], data: bytes) -> T:
    return decode(decoder, data)
