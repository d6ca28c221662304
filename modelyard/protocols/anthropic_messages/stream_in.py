"""The Messages stream to events: cut anywhere, tolerant of what is missing or new, never two blocks open at once."""

from __future__ import annotations

from typing import Any

from msgspec.json import Decoder

from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError
from modelyard.core.events import Event, Failed, Finished, Usage
from modelyard.protocols.anthropic_messages.body import ReplyBody
from modelyard.protocols.anthropic_messages.errors import read_stream_error
from modelyard.protocols.anthropic_messages.open_block import (
    KINDS,
    BlockDeltaBody,
    BlockEventBody,
    BlockStartBody,
    BlockStopBody,
    MessageDeltaBody,
    MessageStartBody,
    OpenBlock,
    StopBody,
    Typed,
)
from modelyard.protocols.anthropic_messages.reply import read_started, read_stop, read_usage
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.sse import SseEvent, SseParser

_typed = Decoder(Typed)
_message_start = Decoder(MessageStartBody)
_message_delta = Decoder(MessageDeltaBody)
_block_events: dict[str, Decoder[Any]] = {
    "content_block_start": Decoder(BlockStartBody),
    "content_block_delta": Decoder(BlockDeltaBody),
    "content_block_stop": Decoder(BlockStopBody),
}


class Reader:
    """Ends in exactly one Finished or Failed; what comes after it is not read."""

    def __init__(self) -> None:
        self._sse = SseParser()
        self._begun = self._done = False
        self._usage = Usage()
        self._stop: StopBody | None = None
        self._blocks = 0
        self._open: OpenBlock | None = None
        self._waiting: dict[int, list[BlockEventBody]] = {}  # blocks that began before the open one ended

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
            except InvalidRequest as error:
                out += self._failed(Incomplete(f"the upstream's stream cannot be read: {error.message}"))
        return out

    def _read(self, frame: SseEvent) -> list[Event]:
        name = frame.event or decode(_typed, frame.data).type
        if name in _block_events:
            return [*self._begin(ReplyBody()), *self._block(decode(_block_events[name], frame.data))]
        if name == "message_start":
            return self._begin(decode(_message_start, frame.data).message)
        if name == "message_delta":
            return self._message_delta(decode(_message_delta, frame.data))
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

    def _message_delta(self, told: MessageDeltaBody) -> list[Event]:
        out = [*self._begin(ReplyBody()), *self._settle()]
        self._usage = read_usage(told.usage, self._usage)
        if told.delta.stop_reason is not None or self._stop is None:
            self._stop = told.delta
        return out

    def _finished(self) -> list[Event]:
        out = [*self._begin(ReplyBody()), *self._settle()]
        self._done = True
        stop = self._stop or StopBody()
        return [*out, Finished(read_stop(stop.stop_reason), self._usage, stop.stop_sequence)]

    def _failed(self, error: ModelyardError) -> list[Event]:
        self._done = True
        return [Failed(error)]

    # --- its blocks -------------------------------------------------------------------------------------------------

    def _block(self, event: BlockEventBody) -> list[Event]:
        if self._open is not None and event.index != self._open.wire_index:
            self._waiting.setdefault(event.index, []).append(event)
            return []
        if isinstance(event, BlockStartBody):
            return [*self._close(cut=False), *self._start(event)]
        if self._open is None:
            return []
        if isinstance(event, BlockDeltaBody):
            return self._open.delta(event.delta)
        return [*self._close(cut=False), *self._next()]

    def _start(self, event: BlockStartBody) -> list[Event]:
        known = event.content_block.type in KINDS
        self._open = OpenBlock(event.index, self._blocks if known else None, event.content_block)
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
