"""Chat chunks back to events: parallel calls may interleave on the wire, in the event stream only one block is open.

The block at the head of the queue is live. A later one waits until the head is settled: text and reasoning are as soon
as something else begins, a call is once its arguments are a whole JSON object. What is still waiting when the answer
ends is settled then.
"""

from __future__ import annotations

from collections import deque

import msgspec

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Event,
    Failed,
    Finished,
    StopReason,
    TokenLogprob,
    Usage,
)
from modelyard.protocols.common.openai_errors import read_error_field
from modelyard.protocols.common.openai_fields import read_usage
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.openai_chat.chunk import CallDelta, CalledDelta, ChunkBody, ChunkChoice, Delta
from modelyard.protocols.openai_chat.logprobs import read_logprobs
from modelyard.protocols.openai_chat.reply import read_reason, read_start

_decoder = msgspec.json.Decoder(ChunkBody)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIMITS: tuple[StopReason, ...] = ("max_tokens", "content_filter")


class _Block:
    """A block on its way out; `index` is None while it waits, and then `pieces` hold what it has to say."""

    __slots__ = ("call_id", "custom", "index", "kind", "logprobs", "name", "pieces")

    def __init__(self, kind: BlockKind, call_id: str = "", custom: bool = False) -> None:
        self.kind, self.call_id, self.custom = kind, call_id, custom
        self.name = ""
        self.pieces: list[str] = []
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.index: int | None = None

    @property
    def is_call(self) -> bool:
        return self.kind == "tool_call"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        if self.custom or not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return False  # asked at every delta while others wait: most answers must be cheap
        try:
            _object.decode(self.text)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return False
        return True


class ChatReader:
    def __init__(self) -> None:
        self._sse = SseParser()
        self._queue: deque[_Block] = deque()
        self._calls: dict[int, _Block] = {}
        self._id: str | None = None  # None until the first chunk
        self._begun = 0  # blocks that have been started
        self._called = 0
        self._end: tuple[StopReason, str | None] | None = None
        self._usage: Usage | None = None
        self._over = False
        self._out: list[Event] = []

    def feed(self, data: bytes) -> list[Event]:
        for event in self._sse.feed(data):
            self._read(event.data)
        return self._take()

    def finish(self) -> list[Event]:
        for event in self._sse.finish():
            self._read(event.data)
        if self._end is not None:
            self._finish()
        else:
            self._fail(Incomplete("the upstream's stream ended before its answer did"))
        return self._take()

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _read(self, data: bytes) -> None:
        if self._over:
            return
        try:
            self._done() if data == b"[DONE]" else self._read_chunk(_decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(Incomplete(f"the upstream sent a chunk that cannot be read: {error}"))
        except ModelyardError as error:
            self._fail(error)

    def _read_chunk(self, chunk: ChunkBody) -> None:
        if chunk.error:
            raise read_error_field(chunk.error)
        if self._id is None:
            started = read_start(chunk.id, chunk.model, chunk.created)
            self._id = started.id
            self._out.append(started)
        for choice in chunk.choices or ():
            if choice.index == 0:
                self._read_choice(choice)
        if chunk.usage is not None:
            self._usage = read_usage(chunk.usage)
        if self._end is not None and self._usage is not None:
            self._finish()

    def _read_choice(self, choice: ChunkChoice) -> None:
        if choice.delta is not None and self._end is None:
            self._read_delta(choice.delta, read_logprobs(choice.logprobs))
        if choice.finish_reason is not None and self._end is None:
            self._settle(choice.finish_reason, choice.stop_reason)

    def _read_delta(self, delta: Delta, logprobs: tuple[TokenLogprob, ...]) -> None:
        reasoning = delta.reasoning_content or delta.reasoning
        text = delta.content or delta.refusal or ""
        if isinstance(reasoning, str) and reasoning:
            self._say("thinking", reasoning, ())
        elif logprobs and not delta.tool_calls and not text:  # a token that is half a character
            self._say("text", "", logprobs)
        if text:
            self._say("text", text, logprobs)
        for place, call in enumerate(delta.tool_calls or ()):
            self._read_call(call, place)
        if delta.function_call is not None:
            self._read_call(CallDelta(0, function=delta.function_call), 0)

    def _read_call(self, delta: CallDelta, place: int) -> None:
        called = delta.function or delta.custom or CalledDelta()
        index = place if delta.index is None else delta.index
        block = self._calls.get(index)
        if block is None or (delta.id and called.name and delta.id != block.call_id):  # some number every call 0
            block = _Block("tool_call", delta.id or f"call_{self._id}_{self._called}", delta.custom is not None)
            self._called += 1
            self._calls[index] = block
            block.name = called.name or ""
            self._queue.append(block)
            self._advance()
        elif called.name and not block.name:
            block.name = called.name
            self._advance()
        self._extend(block, called.text, ())

    def _say(self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not self._queue or self._queue[-1].kind != kind:
            self._queue.append(_Block(kind))
            self._advance()
        self._extend(self._queue[-1], text, logprobs)

    def _extend(self, block: _Block, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        if block.index is None:
            block.pieces.append(text)
            block.logprobs += logprobs
        elif not self._queue or self._queue[0] is not block:
            self._late(text)
        else:
            self._out.append(BlockDelta(block.index, text, logprobs))
            if block.is_call:
                block.pieces.append(text)
                self._advance()

    def _late(self, text: str) -> None:
        """Blanks after a whole JSON object change nothing; anything else would have belonged to a closed block."""
        if text.strip():
            raise Incomplete("the upstream went on with a tool call whose arguments were already complete")

    def _advance(self) -> None:
        while self._queue:
            head = self._queue[0]
            if head.index is None and not (head.is_call and not head.name):
                self._begin(head)
            if len(self._queue) == 1 or head.index is None or (head.is_call and not head.is_whole):
                return
            self._close(head, True)

    def _begin(self, block: _Block) -> None:
        block.index = self._begun
        self._begun += 1
        self._out.append(BlockStart(block.index, block.kind, block.call_id, block.name, custom=block.custom))
        if block.pieces or block.logprobs:
            self._out.append(BlockDelta(block.index, block.text, block.logprobs))

    def _close(self, block: _Block, complete: bool) -> None:
        self._queue.popleft()
        assert block.index is not None  # noqa: S101 - only begun blocks are closed
        self._out.append(BlockEnd(block.index, complete=complete))

    def _settle(self, finish: str, stop: object) -> None:
        """The answer's end. A limit may have cut a call off: it counts only with whole arguments."""
        if finish == "error":
            raise Incomplete("the upstream ended its answer with an error")
        self._end = read_reason(finish, stop, self._called > 0)
        limited = self._end[0] in _LIMITS
        while self._queue:
            block = self._queue[0]
            if block.index is None:
                self._begin(block)
            cut = limited and block.is_call and not block.is_whole and not (block.custom and len(self._queue) > 1)
            self._close(block, not cut)

    def _done(self) -> None:
        """[DONE] is a clean end even where the server gave no finish_reason; without any chunk it is none."""
        if self._id is not None and self._end is None:
            self._settle("stop", None)
        if self._end is None:
            raise Incomplete("the upstream's stream held no answer")
        self._finish()

    def _finish(self) -> None:
        if not self._over and self._end is not None:
            self._over = True
            self._out.append(Finished(self._end[0], self._usage or Usage(), self._end[1]))

    def _fail(self, error: ModelyardError) -> None:
        if not self._over:
            self._over = True
            self._out.append(Failed(error))
