"""The event stream that all protocols share, and `collect_reply`, which builds a whole reply from it.

    Started · (BlockStart · BlockDelta* · BlockEnd)* · (Finished | Failed)

One block index counts 0, 1, 2 …; at most one block is open at a time; exactly one Finished or Failed ends the stream.
PromptRead and Measured come in between only if the request asks for them. Calls that the gateway runs itself have a
`server`; their results are blocks of the same stream, and the model's next turn follows.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.request import Compaction, Text, Thinking, ToolCall, ToolResult

BlockKind = Literal["text", "thinking", "tool_call", "tool_result", "compaction"]
StopReason = Literal[
    "end", "tool_calls", "stop_string", "max_tokens", "window", "repetition", "content_filter", "compaction"
]


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token's log probability in the raw model distribution. `bytes`, because half a character has no text."""

    token: str
    logprob: float
    bytes: builtins.bytes = b""  # the full name, because `bytes` is a field of this class
    top: tuple[TokenLogprob, ...] = ()
    id: int | None = None  # in the model's vocabulary; None if another server did not tell
    rank: int | None = None  # among all tokens, 1 first; known for a prompt's tokens


class Usage(Struct, frozen=True, gc=False):
    """`prompt` includes the cached tokens; `output` includes the reasoning tokens, shown or hidden."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


MissCause = Literal[
    "none",
    "new_session",
    "not_kept",
    "other_session",
    "evicted",
    "not_copied",
    "billing_block",
    "system_changed",
    "tools_changed",
    "reasoning_dropped",
    "arguments_reserialised",
    "message_changed",
    "template",
]


class CacheReuse(Struct, frozen=True, gc=False):
    """What a cache held of one prompt. `token` is the first uncached one, `message` the changed message."""

    reused: int
    evaluated: int
    cause: MissCause
    token: int | None = None
    message: int | None = None
    role: str | None = None

    @property
    def header(self) -> str:
        return f"reused={self.reused}; evaluated={self.evaluated}; cause={self.cause}"

    def __str__(self) -> str:
        where = f", in message {self.message} ({self.role})" if self.message is not None else ""
        return f"{self.cause}: token {self.token} of {self.reused + self.evaluated} is the first not cached{where}"


class Timings(Struct, frozen=True, gc=False):
    """Seconds; None if unknown.

    An engine reports `prefill`, `first_token`, `decode` and `total`. The gateway adds `backend` (the whole time in the
    engine), `engine` (that plus rendering and queue) and `total` (since the request arrived).
    """

    queue: float | None = None
    tokenize: float | None = None
    prefill: float | None = None
    first_token: float | None = None
    decode: float | None = None
    backend: float | None = None
    engine: float | None = None
    total: float | None = None


class ListedTool(Struct, frozen=True):
    """A tool as its MCP server lists it."""

    name: str
    description: str
    schema: dict[str, Any]
    annotations: dict[str, Any] | None = None


class ToolList(Struct, frozen=True):
    """The tools of an MCP server that the model is offered."""

    server: str
    tools: tuple[ListedTool, ...]


class Started(Struct, frozen=True, tag=True, gc=False):
    id: str  # without a protocol's prefix
    model: str  # the name that the client used
    created: int
    usage: Usage = Usage()
    prompt: str = ""  # what the reply repeats of the prompt, and its log probabilities; the first has none (NaN)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_lists: tuple[ToolList, ...] = ()


class PromptRead(Struct, frozen=True, tag=True, gc=False):
    """How many tokens of the prompt are read, `cached` of them at once, and how long it took."""

    total: int
    cached: int
    done: int
    seconds: float = 0.0


class Measured(Struct, frozen=True, tag=True, gc=False):
    """Tokens and times up to the text that follows."""

    usage: Usage
    timings: Timings


class BlockStart(Struct, frozen=True, tag=True, gc=False):
    """`asks`: the call of a server's tool is not run before the client approves it. `approved`: it was."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    custom: bool = False
    server: str | None = None
    asks: bool = False
    approved: bool = False


class BlockDelta(Struct, frozen=True, tag=True, gc=False):
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class BlockEnd(Struct, frozen=True, tag=True, gc=False):
    """`complete` is False for a truncated tool call, which must not be executed. `result` is that of a block of kind
    tool_result, which has no deltas."""

    index: int
    signature: str = ""
    complete: bool = True
    result: ToolResult | None = None


class Finished(Struct, frozen=True, tag=True, gc=False):
    reason: StopReason
    usage: Usage
    stop_string: str | None = None
    timings: Timings = Timings()
    storing_failed: bool = False  # the reply cannot be continued by its id
    compaction: Usage | None = None  # of the summary that the reply begins with


class Failed(Struct, frozen=True, tag=True):
    error: ModelyardError


Event = Started | PromptRead | Measured | BlockStart | BlockDelta | BlockEnd | Finished | Failed


class Block(Struct, frozen=True, gc=False):
    """One finished block of a reply. `asks` and `approved` as in BlockStart."""

    part: Text | Thinking | ToolCall | ToolResult
    logprobs: tuple[TokenLogprob, ...] = ()
    complete: bool = True
    asks: bool = False
    approved: bool = False

    @property
    def text(self) -> str:
        """All that the model wrote: text, reasoning, or the arguments of a call."""
        if isinstance(self.part, ToolResult):
            return ""
        return self.part.arguments if isinstance(self.part, ToolCall) else self.part.text


class Reply(Struct, frozen=True, gc=False):
    started: Started
    blocks: tuple[Block, ...]
    finished: Finished

    @property
    def text(self) -> str:
        return self.contents()[0]

    @property
    def thinking(self) -> str:
        return self.contents()[1]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.contents()[2]

    def contents(self) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Text, reasoning and calls: those that the client may run, and those of a server's tools."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for block in self.blocks:
            part = block.part
            if type(part) is Text:
                texts.append(part.text)
            elif type(part) is Thinking:
                thoughts.append(part.text)
            elif type(part) is ToolCall and block.complete:
                calls.append(part)
        return "".join(texts), "".join(thoughts), tuple(calls)


class ReplyBuilder:
    """Collects events; `reply()` returns the whole reply after the last one."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._blocks: list[Block] = []
        self._open: BlockStart | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if type(event) is BlockDelta:  # no event class has a subclass; an exact type check is fast
                self._text.append(event.text)
                if event.logprobs:
                    self._logprobs.extend(event.logprobs)
            elif type(event) is BlockStart:
                self._open, self._text, self._logprobs = event, [], []
            elif type(event) is BlockEnd:
                self._blocks.append(self._close(event))
            elif type(event) is Started:
                self._started = event
            elif type(event) is Finished:
                self._finished = event
            elif type(event) is Failed:
                raise event.error

    @property
    def finished(self) -> bool:
        return self._finished is not None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those that have ended."""
        return tuple(self._blocks)

    def _close(self, end: BlockEnd) -> Block:
        start, text = self._open, "".join(self._text)
        self._open = None
        if start is None:
            raise Incomplete("a block ended that was not open")
        logprobs = tuple(self._logprobs)
        if start.kind == "text":
            return Block(Text(text), logprobs)
        if start.kind == "thinking":
            return Block(Thinking(text, end.signature), logprobs)
        if start.kind == "compaction":
            return Block(Compaction(text))
        if end.result is not None:
            return Block(end.result)
        call = ToolCall(start.call_id, start.name, text, start.namespace, start.custom, server=start.server)
        return Block(call, logprobs, end.complete, start.asks, start.approved)

    def reply(self) -> Reply:
        if self._started is None or self._finished is None:
            raise Incomplete("the engine's stream ended before it was finished")
        return Reply(self._started, tuple(self._blocks), self._finished)


def collect_reply(events: Iterable[Event]) -> Reply:
    """The whole reply; raises the error of a `Failed`."""
    builder = ReplyBuilder()
    builder.feed(events)
    return builder.reply()


def reply_events(reply: Reply) -> Iterator[Event]:
    """The shortest event stream of this reply."""
    yield reply.started
    for index, block in enumerate(reply.blocks):
        yield from _block_events(index, block)
    yield reply.finished


def _block_events(index: int, block: Block) -> Iterator[Event]:
    part, signature = block.part, ""
    if isinstance(part, ToolResult):
        yield BlockStart(index, "tool_result", part.call_id)
        yield BlockEnd(index, result=part)
        return
    if isinstance(part, ToolCall):
        yield BlockStart(
            index,
            "tool_call",
            part.id,
            part.name,
            part.namespace,
            part.custom,
            part.server,
            block.asks,
            block.approved,
        )
        text = part.arguments
    elif isinstance(part, Thinking):
        yield BlockStart(index, "thinking")
        text, signature = part.text, part.signature
    else:
        yield BlockStart(index, "compaction" if isinstance(part, Compaction) else "text")
        text = part.text
    if text or block.logprobs:
        yield BlockDelta(index, text, block.logprobs)
    yield BlockEnd(index, signature, block.complete)
