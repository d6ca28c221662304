"""Long conversations: what the model is not shown of them, as the request (`Request.context`) or its route says.

    clear reasoning → clear results of tools → summarise, if the prompt is longer than a threshold, or nearly as long as
    the window and the route has `auto_compact`

The model itself writes the summary. A client that asked for one gets it as the first block of the reply, or as its only
one; it stands for everything before it, and the client sends it back. For others the newest turns stay as they are, and
the summary of the oldest ones is kept here: the same conversation, one turn longer, is not summarised again.

A conversation that does not fit the window is summarised piece by piece, each with the summary of those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, InvalidRequest
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Finished,
    ReplyBuilder,
    Started,
    Usage,
)
from modelyard.core.request import (
    Caller,
    ClearToolUses,
    ContextManagement,
    Message,
    Part,
    Request,
    ResultPart,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolResult,
    summary_message,
)
from modelyard.gateway.prepare import Preparer
from modelyard.gateway.prepared_request import CHARS_PER_TOKEN, PreparedRequest, estimated_tokens
from modelyard.gateway.request_work import RequestWork
from modelyard.gateway.stream import Stream, WrappingStream
from modelyard.router.router import Target

_ASK = (
    "Summarize this conversation for an assistant that continues it and sees nothing else of it: the task, what the "
    "user asked for and decided, what was done and found, the exact names, paths, values and errors that matter, and "
    "what is left to do. Write only the summary."
)
_GO_ON = "Continue from there."
_CLEARED = "[this result was removed to save room: call the tool again if it is needed]"
_MAX_TOKENS = 4096  # of a summary; some models do not stop
_MAX_PIECES = 16  # of a conversation; each is a generation
_LEAST_CHARS = 200  # of a text in a piece that is cut because it does not fit
_MAX_KEPT, _MAX_KEPT_CHARS = 512, 8 << 20  # summaries


# --- what is cleared, without a model ---------------------------------------------------------------------------------


def clear_thinking(request: Request, keep: int) -> tuple[Request, dict[str, Any] | None]:
    """Without the reasoning of all but the newest `keep` turns of the assistant, and the edit as the reply has it."""
    turns = [at for at, message in enumerate(request.messages) if message.role == "assistant"]
    old, chars, cleared = set(turns[: len(turns) - keep] if keep else turns), 0, 0
    messages = list(request.messages)
    for at in old:
        parts = tuple(part for part in messages[at].parts if not isinstance(part, Thinking))
        if len(parts) < len(messages[at].parts):
            chars += sum(len(part.text) for part in messages[at].parts if isinstance(part, Thinking))
            cleared += 1
            messages[at] = replace(messages[at], parts=parts)
    if not cleared:
        return request, None
    edit = {"type": "clear_thinking_20251015", "cleared_thinking_turns": cleared}
    return replace(request, messages=tuple(messages)), edit | {"cleared_input_tokens": chars // CHARS_PER_TOKEN}


def clear_tool_uses(request: Request, edit: ClearToolUses, tokens: int) -> tuple[Request, dict[str, Any] | None]:
    """Without the results of all but the newest calls, and the edit as the reply has it."""
    calls = [part for message in request.messages for part in message.parts if isinstance(part, ToolCall)]
    if tokens <= edit.above_tokens or len(calls) <= edit.above_uses:
        return request, None
    old = calls[: max(0, len(calls) - edit.keep)]
    cleared = {call.id: call for call in old if call.name not in edit.exclude}
    chars, done = 0, set[str]()
    messages: list[Message] = []
    for message in request.messages:
        parts: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult) and part.call_id in cleared and part.content != (Text(_CLEARED),):
                chars += _chars(part) - len(_CLEARED)
                done.add(part.call_id)
                parts.append(replace(part, content=(Text(_CLEARED),)))
            elif isinstance(part, ToolCall) and part.id in cleared and _clears_input(edit, part.name):
                chars += len(part.arguments)
                parts.append(replace(part, arguments="{}", verbatim=False))
            else:
                parts.append(part)
        messages.append(replace(message, parts=tuple(parts)))
    if not done or chars // CHARS_PER_TOKEN < edit.at_least:
        return request, None
    made = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": len(done)}
    return replace(request, messages=tuple(messages)), made | {"cleared_input_tokens": max(0, chars) // CHARS_PER_TOKEN}


def _clears_input(edit: ClearToolUses, tool: str) -> bool:
    return edit.inputs if isinstance(edit.inputs, bool) else tool in edit.inputs


def _chars(part: Part) -> int:
    if isinstance(part, ToolResult):
        return sum(map(_chars, part.content))
    return len(part.arguments) if isinstance(part, ToolCall) else len(getattr(part, "text", ""))


# --- what is summarised -----------------------------------------------------------------------------------------------


class CompactionPlan(Struct, frozen=True):
    """`pending` is to be summarised, its first `taken` messages by the prepared request; before it comes what `summary`
    has. Then the `request` is answered with the summary and the messages that are `kept`, unless the reply `ends` with
    it. `shown`: the reply has it."""

    request: Request
    head: tuple[Message, ...]
    pending: tuple[Message, ...]
    kept: tuple[Message, ...]
    digest: bytes
    ask: str = _ASK
    summary: str = ""
    taken: int = 0
    shown: bool = False
    ends: bool = False
    tokens: int = 0  # of the whole prompt

    def compacted(self) -> Request:
        messages = (*self.head, summary_message(self.summary), *self.kept)
        return replace(self.request, messages=messages, context=None)


def split_head(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are instructions."""
    roles = enumerate(message.role for message in messages)
    return next((at for at, role in roles if role not in ("system", "developer")), len(messages))


def split_tail(messages: Sequence[Message], chars: int) -> int:
    """Where the newest messages begin that have about so many characters: never between a call and its result."""
    at, size = len(messages), 0
    for index in range(len(messages) - 1, -1, -1):
        size += sum(map(_chars, messages[index].parts))
        if size > chars and at < len(messages):
            break
        if messages[index].role != "tool":
            at = index
    return at


def shortened(message: Message, limit: int) -> Message:
    """With the beginning and the end of each of its texts that is longer."""

    def cut(text: str) -> str:
        half = limit // 2
        return text if len(text) <= limit else f"{text[:half]}\n[{len(text) - limit} characters]\n{text[-half:]}"

    def part(given: Any) -> Any:
        if isinstance(given, ToolResult):
            content: tuple[ResultPart, ...] = tuple(map(part, given.content))
            return replace(given, content=content)
        return replace(given, text=cut(given.text)) if isinstance(given, Text | Thinking) else given

    return replace(message, parts=tuple(map(part, message.parts)))


def _prefixes(scope: tuple[str, ...], messages: Sequence[Message]) -> Iterator[bytes]:
    """A digest of each beginning of a conversation: of none of its messages, of the first, of the first two …"""
    digest, encoder = blake2b(repr(scope).encode("utf-8", "surrogatepass"), digest_size=16), msgspec.msgpack.Encoder()
    yield digest.digest()
    for message in messages:
        digest.update(encoder.encode(message))
        yield digest.digest()


class Summaries:
    """The newest summaries by the digest of what they summarise, which includes the API key and the model."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    def get(self, digest: bytes) -> str | None:
        if (found := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return found

    def add(self, digest: bytes, summary: str) -> None:
        self._chars += len(summary) - len(self._kept.pop(digest, ""))
        self._kept[digest] = summary
        while len(self._kept) > _MAX_KEPT or self._chars > _MAX_KEPT_CHARS:
            self._chars -= len(self._kept.popitem(last=False)[1])


class _Asked(Struct, frozen=True):
    """What is prepared, and for whom."""

    request: Request
    caller: Caller
    target: Target
    work: RequestWork


class Compactor:
    """Prepares requests as `Preparer` does, with what they or their routes say about long conversations."""

    def __init__(self, preparer: Preparer) -> None:
        self.metrics, self._preparer, self._summaries = preparer.metrics, preparer, Summaries()

    async def prepare(
        self, request: Request, caller: Caller, target: Target, work: RequestWork | None = None
    ) -> PreparedRequest:
        while (prepared := await self.attempt(request, caller, target, work)) is None:
            pass
        return prepared

    async def attempt(
        self, request: Request, caller: Caller, target: Target, work: RequestWork | None = None
    ) -> PreparedRequest | None:
        """None: a reload has replaced the model meanwhile."""
        context = request.context
        if (context is None and not target.auto_compact) or not request.messages or request.n > 1:
            return await self._preparer.attempt(request, caller, target, work)
        asked = _Asked(request, caller, target, work or RequestWork(0, caller.deadline))
        return await self._manage(asked, context or ContextManagement())

    async def _manage(self, asked: _Asked, context: ContextManagement) -> PreparedRequest:
        if context.compact_now:
            return await self._whole(asked, context, estimated_tokens(asked.request))
        edits: list[dict[str, Any] | None] = []
        if context.keep_thinking is not None:
            request, edit = clear_thinking(asked.request, context.keep_thinking)
            asked, edits = replace(asked, request=request), [edit]
        found, tokens = await self._measure(asked)
        if context.clear_tool_uses is not None:
            request, edit = clear_tool_uses(asked.request, context.clear_tool_uses, tokens)
            if edit is not None:
                asked, edits = replace(asked, request=request), [*edits, edit]
                found, tokens = await self._measure(asked)
        messages, target = asked.request.messages, asked.target
        is_long = context.compact_above is not None and tokens > context.compact_above
        if is_long and len(messages) - split_head(messages) > 1:
            found = await self._whole(asked, context, tokens)
        elif target.auto_compact and (isinstance(found, ContextOverflow) or _is_tight(found, target)):
            found = await self._oldest(asked, found, tokens)
        if isinstance(found, ContextOverflow):
            raise found
        return replace(found, edits=tuple(edit for edit in edits if edit is not None))

    async def _measure(self, asked: _Asked) -> tuple[PreparedRequest | ContextOverflow, int]:
        try:
            prepared = await self._preparer.prepare(asked.request, asked.caller, asked.target, asked.work)
        except ContextOverflow as error:
            return error, error.prompt_tokens
        return prepared, _tokens(prepared)

    async def _whole(self, asked: _Asked, context: ContextManagement, tokens: int) -> PreparedRequest:
        """A summary of all that was said, which the client gets. The user's newest message is shown as well."""
        request, caller, target, work = asked.request, asked.caller, asked.target, asked.work
        at = split_head(request.messages)
        head, body, ends = request.messages[:at], request.messages[at:], context.compact_now or context.pause
        if not body:
            code = "compaction_nothing_to_summarize"
            raise InvalidRequest("messages: there is nothing to summarize", param="messages", code=code)
        kept = (body[-1] if body[-1].role == "user" else Message("user", (Text(_GO_ON),)),)
        ask = context.instructions if context.compact_now else f"{_ASK} {context.instructions}".rstrip()
        scope = (caller.key, target.model, ask or _ASK)
        *_, digest = await work.run(lambda: tuple(_prefixes(scope, request.messages)))
        plan = CompactionPlan(request, head, body, kept, digest, ask or _ASK, shown=True, ends=ends, tokens=tokens)
        if (known := self._summaries.get(digest)) is None:
            return await self.next_piece(plan, caller, target, work)
        plan = replace(plan, summary=known, pending=())
        prepared = await self._preparer.prepare(plan.compacted(), caller, target, work)
        return replace(prepared, compaction=plan)

    async def _oldest(
        self, asked: _Asked, found: PreparedRequest | ContextOverflow, tokens: int
    ) -> PreparedRequest | ContextOverflow:
        """A summary of the oldest turns, known already or made now. What was found, if there are none."""
        request, caller, target = asked.request, asked.caller, asked.target
        at = split_head(request.messages)
        head, body = request.messages[:at], request.messages[at:]
        digests = await asked.work.run(lambda: tuple(_prefixes((caller.key, target.model, ""), body)))
        known = next((n for n in range(len(body) - 1, 0, -1) if self._summaries.get(digests[n]) is not None), 0)
        summary = self._summaries.get(digests[known]) or ""
        plan = CompactionPlan(request, head, (), body[known:], digests[known], summary=summary, tokens=tokens)
        if known:
            shorter, _ = await self._measure(replace(asked, request=plan.compacted()))
            if isinstance(shorter, PreparedRequest) and not _is_tight(shorter, target):
                return replace(shorter, compacted=f"messages={known}; tokens={tokens}")
        chars = sum(_chars(part) for message in body for part in message.parts)
        end = split_tail(body, chars * target.window // (3 * max(1, tokens)))  # about a third of the window
        if end <= known:
            return found
        plan = replace(plan, pending=body[known:end], kept=body[end:], digest=digests[end])
        prepared = await self.next_piece(plan, caller, target, asked.work)
        return replace(prepared, compacted=f"messages={end}; tokens={tokens}")

    async def next_piece(
        self, plan: CompactionPlan, caller: Caller, target: Target, work: RequestWork | None = None, tools: bool = True
    ) -> PreparedRequest:
        """The request for a summary of as much of what is pending as fits. With the conversation's own tools: without
        them its beginning would not be the one that the cache has."""
        request, taken, limit = plan.request, len(plan.pending), 4 * target.window
        target = replace(target, mcp=(), strict=False)
        offered = tuple(tool for tool in request.tools if tool.kind != "server") if tools else ()
        before = (summary_message(plan.summary),) if plan.summary else ()
        while True:
            piece = plan.pending[:taken] if taken > 1 else (shortened(plan.pending[0], limit),)
            asked = replace(
                request,
                messages=(*plan.head, *before, *piece, Message("user", (Text(plan.ask),))),
                tools=offered,
                tool_choice=ToolChoice(),
                constraint=None,
                stop=(),
                logprobs=None,
                max_tokens=(plan.ends and request.max_tokens) or max(1, min(_MAX_TOKENS, target.window // 4)),
                reasoning=replace(request.reasoning, enabled=False),
                context=None,
                warnings=(),
            )
            try:
                prepared = await self._preparer.prepare(asked, caller, target, work)
            except ContextOverflow:
                if taken == 1 and limit < _LEAST_CHARS:
                    raise
                taken, limit = _cut(plan.pending, taken // 2), limit if taken > 1 else limit // 2
                continue
            return replace(prepared, compaction=replace(plan, taken=taken))

    def remember(self, plan: CompactionPlan) -> None:
        self._summaries.add(plan.digest, plan.summary)

    async def last(self, plan: CompactionPlan, caller: Caller, target: Target) -> PreparedRequest:
        """The request that is answered after the summary."""
        return await self._preparer.prepare(plan.compacted(), caller, target)


def _cut(messages: Sequence[Message], most: int) -> int:
    """How many of the first messages are a piece of at most so many: one that does not end before a result, if any."""
    return next((n for n in range(most, 0, -1) if messages[n].role != "tool"), max(1, most))


def _tokens(prepared: PreparedRequest) -> int:
    return len(prepared.prompts[0].ids) if prepared.prompts else estimated_tokens(prepared.request)


def _is_tight(prepared: PreparedRequest, target: Target) -> bool:
    """Whether less room is left for the answer than it wants, and than an eighth of the window."""
    wanted = prepared.request.max_tokens or target.window
    return _tokens(prepared) + min(wanted, target.window // 8) > target.window


class CompactingStream(WrappingStream):
    """The `Stream` of a request whose conversation is summarised first; `prepared` is what runs now."""

    def __init__(
        self,
        prepared: PreparedRequest,
        plan: CompactionPlan,
        compactor: Compactor,
        start: Callable[[PreparedRequest], Stream],
    ) -> None:
        super().__init__(prepared)
        self._plan, self._compactor, self._start = plan, compactor, start
        self._first, self._usage = prepared, Usage()
        if plan.pending or not plan.ends:  # raises at once where waiting would be in vain
            self._source = start(replace(prepared, compaction=None))

    async def _events(self) -> AsyncIterator[list[Event]]:
        plan, first = self._plan, self._first
        if plan.shown:
            usage = Usage(prompt=plan.tokens)
            yield [Started(first.caller.trace, plan.request.model, first.created, usage)]
        caller = replace(first.caller, is_retry=True)  # the first piece was counted against its key's limits
        if plan.pending:
            plan = await self._summarise(plan, caller)
            self._compactor.remember(plan)
        if plan.shown:
            yield [BlockStart(0, "compaction"), BlockDelta(0, plan.summary), BlockEnd(0)]
        if plan.ends:
            yield [Finished("compaction", self._usage)]
            return
        if self._source is None:
            prepared = await self._compactor.last(plan, caller, first.target)
            self.prepared = replace(prepared, edits=first.edits, compacted=first.compacted, skipped=first.skipped)
            self._source = self._start_next(self.prepared)
        async for _, events in self._source:
            yield _after_summary(events, self._usage) if plan.shown else events

    async def _summarise(self, plan: CompactionPlan, caller: Caller) -> CompactionPlan:
        """The plan with the summary of all that was pending."""
        tools = bool(plan.request.tools)
        for _ in range(_MAX_PIECES):
            if summary := (await self._read()).strip():
                plan = replace(plan, summary=summary, pending=plan.pending[plan.taken :])
            elif tools:
                tools = False  # it called one
            else:
                problem = "the model wrote no summary: use another model, or send less of the conversation"
                raise InvalidRequest(problem, code="no_summary")
            if not plan.pending:
                return plan
            prepared = await self._compactor.next_piece(plan, caller, self._first.target, tools=tools)
            plan = prepared.compaction or plan
            self._source = self._start_next(replace(prepared, compaction=None))
        raise InvalidRequest(f"the conversation has more than {_MAX_PIECES} times the window", code="no_summary")

    def _start_next(self, prepared: PreparedRequest) -> Stream:
        self._check_cancelled()
        return self._start(prepared)

    async def _read(self) -> str:
        """The text that the running generation writes."""
        source, reply = self._source, ReplyBuilder()
        if source is None:
            raise ValueError("nothing was started")
        try:
            async for _, events in source:
                reply.feed(events)  # raises if it failed
        finally:
            source.close()
            self._source = None
        made = reply.reply()
        used, usage = self._usage, made.finished.usage
        self._usage = Usage(used.prompt + usage.prompt, used.cached + usage.cached, used.output + usage.output)
        return made.text


def _after_summary(events: list[Event], usage: Usage) -> list[Event]:
    """The events of the answer, behind the block of the summary."""
    made: list[Event] = []
    for event in events:
        if isinstance(event, BlockStart | BlockDelta | BlockEnd):
            made.append(replace(event, index=event.index + 1))
        elif isinstance(event, Finished):
            made.append(replace(event, compaction=usage))
        elif not isinstance(event, Started):
            made.append(event)
    return made
