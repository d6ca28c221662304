"""A request whose model may call tools of MCP servers: generate → call → generate …, as one stream of events.

    Started · (the model's blocks · results)* · the model's last blocks · Finished

Each round is prepared and generated as a request of its own; between two rounds no slot is held.
The calls of one turn run at the same time. The round is the last one if the model calls no server's tool, if it also
calls a tool of the client, or if a call needs the client's approval. Whatever goes wrong with a call is its result.

The reply to a request that names servers has their calls. A client that does not know about them, because its route
lists the servers, gets the texts of all rounds as one answer. If the model calls tools of both in one turn, it would
never send the server's call back: that call is not run, and the model can repeat it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    CacheReuse,
    Event,
    Failed,
    Finished,
    ReplyBuilder,
    Started,
    Timings,
    Usage,
)
from modelyard.core.pool import RequestSnapshot
from modelyard.core.request import (
    Audio,
    Image,
    Message,
    Request,
    ResultPart,
    Text,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from modelyard.gateway.prepare import Preparer
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.server_tools import ServerTool, ServerTools
from modelyard.gateway.stream import Stream, StreamServices, WrappingStream
from modelyard.gateway.tool_search import ToolSearch
from modelyard.mcp.connection import McpResult, failed_call
from modelyard.prompt.images import check_data
from modelyard.telemetry.history import RequestRecord, ToolRun
from modelyard.telemetry.log import log_event

log = logging.getLogger("modelyard.gateway")

_decode = msgspec.json.Decoder().decode
_PARAGRAPH = "\n\n"  # between the texts of two rounds, for a client that sees one answer


class ToolRounds(WrappingStream):
    """A `Stream` of one generation after the other, with the results of tools between them."""

    def __init__(
        self,
        prepared: PreparedRequest,
        tools: ServerTools,
        preparer: Preparer,
        generate: Callable[[PreparedRequest], Stream],
        services: StreamServices,
        on_close: Callable[[ToolRounds], None],
    ) -> None:
        super().__init__(prepared)
        self.tools = tools
        self._preparer, self._generate, self._services, self._on_close = preparer, generate, services, on_close
        self._request = prepared.request
        self._calls: set[asyncio.Task[McpResult]] = set()
        self._source = None if tools.approved else generate(prepared)
        self._output = _Output(tools)
        self._usage, self._timings = Usage(), Timings()
        self._recorded = False
        self._made = 0  # calls so far
        self._first: Stream | None = None  # of all rounds, the one that the reply's headers tell of
        self.running_tools: tuple[str, ...] = ()

    @property
    def reuse(self) -> CacheReuse | None:
        return None if self._first is None else self._first.reuse

    @property
    def ignored(self) -> tuple[str, ...]:
        return () if self._first is None else self._first.ignored

    @property
    def usage(self) -> Usage:
        return self._usage

    @property
    def has_called(self) -> bool:
        """Whether a tool was called, which may have done something: the request must not be repeated."""
        return self._made > 0

    def snapshot(self) -> RequestSnapshot:
        prepared, caller = self.prepared, self.prepared.caller
        return RequestSnapshot(
            trace=caller.trace,
            model=prepared.model.name,
            cache=prepared.target.cache,
            state="running",
            key=caller.key,
            session=prepared.session_key(),
            priority=prepared.priority,
            tokens=self._usage.prompt,
            since=prepared.created,
        )

    def cancel(self, reason: ModelyardError | None = None) -> None:
        """Idempotent. The reader gets Failed next: also while a tool runs, whose server is told."""
        super().cancel(reason)
        for call in self._calls:
            call.cancel()

    def close(self) -> None:
        super().close()
        for call in self._calls:
            call.cancel()
        self._on_close(self)
        if not self._recorded:
            self._end(Failed(self._cancelled or Cancelled("the client disconnected")))

    # --- the rounds -------------------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[list[Event]]:
        if self.tools.approved:
            yield self._output.start(self.prepared)
            async for events in self._run_approved():
                yield events
        for number in range(self.tools.servers.settings.max_rounds + 1):
            if self._source is None and (ended := await self._next_round(number)) is not None:
                yield [ended]
                return
            turn = _Turn(self.tools)
            async for events in self._read_round(turn):
                if events:
                    yield events
            if turn.finished is None:
                return
            calls = turn.server_calls() if turn.finished.reason in ("tool_calls", "end") else []
            if not calls:
                yield [self._last(turn.finished)]
                return
            if turn.has_other_calls and not self.tools.is_shown:
                self.tools.runs += [_not_run(tool, "left_to_client") for _, tool in calls if not tool.is_search]
                calls = [(call, tool) for call, tool in calls if tool.is_search]
            if not calls:
                yield [self._last(replace(turn.finished, reason="tool_calls"))]
                return
            asked = [tool for _, tool in calls if tool.asks]
            self.tools.runs += [_not_run(tool, "asked") for tool in asked]
            results: list[ToolResult] = []
            async for _, result in self._run_calls([(call, tool) for call, tool in calls if not tool.asks]):
                results.append(result)
                if events := self._output.result(result):
                    yield events
            self._check_cancelled()
            if turn.has_other_calls or asked:
                yield [self._last(replace(turn.finished, reason="tool_calls" if turn.has_other_calls else "end"))]
                return
            answer = Message("assistant", tuple(block.part for block in turn.blocks))
            self._request = _continued(self._request, (answer, Message("tool", tuple(results))))

    async def _next_round(self, number: int) -> Finished | None:
        """Start the next generation. Its end, if there is no room for it."""
        self._check_cancelled()
        request, limit = self._request, self.prepared.request.max_tokens
        if limit is not None:
            if (left := limit - self._usage.output) < 1:
                return self._last(Finished("max_tokens", Usage()))
            request = replace(request, max_tokens=left)
        if number == self.tools.servers.settings.max_rounds:
            request = replace(request, tool_choice=ToolChoice("none"))  # the model must answer now
        caller = self.prepared.caller
        if number:
            caller = replace(caller, is_retry=True)  # the request was counted against its key's limits before
        try:
            prepared = await self._preparer.prepare(request, caller, self.prepared.target, server_tools=self.tools)
        except ContextOverflow:
            if not number:
                raise
            return self._last(Finished("window", Usage()))
        self._check_cancelled()
        self._source = self._generate(prepared)
        return None

    async def _read_round(self, turn: _Turn) -> AsyncIterator[list[Event]]:
        """The events of one generation for the client, without its end."""
        source = self._source
        if source is None:
            raise ValueError("no round was started")
        try:
            async for _, events in source:
                if self.reuse is None:
                    self._first = source
                if isinstance(last := events[-1], Failed):
                    raise last.error
                turn.feed(events)
                yield self._output.events(events)
        finally:
            source.close()
            self._source = None
        if turn.finished is not None:
            self._usage = _sum(self._usage, turn.finished.usage)
            self._timings = _add(self._timings, turn.finished.timings)
            self._output.end_round()

    def _last(self, finished: Finished) -> Finished:
        return replace(finished, usage=self._usage, timings=self._timings)

    # --- calls ------------------------------------------------------------------------------------------------------

    async def _run_approved(self) -> AsyncIterator[list[Event]]:
        """The calls that the client has approved, before the model goes on."""
        wanted = [(call, self.tools.by_name[call.name]) for call in self.tools.approved]
        results: dict[str, ToolResult] = {}
        async for call, result in self._run_calls(wanted):
            results[result.call_id] = result
            yield self._output.approved(call, self.tools.by_name[call.name], result)
        self._check_cancelled()
        messages = tuple(_with_results(message, results) for message in self._request.messages)
        self._request = replace(self._request, messages=messages)

    async def _run_calls(
        self, calls: Sequence[tuple[ToolCall, ServerTool]]
    ) -> AsyncIterator[tuple[ToolCall, ToolResult]]:
        """All at the same time; their results in the order of the calls. Ends early if the request is cancelled."""
        numbered = enumerate(calls, self._made)
        tasks = [asyncio.ensure_future(self._call(call, tool, number)) for number, (call, tool) in numbered]
        self._made += len(tasks)
        self._calls.update(tasks)
        self.running_tools = tuple(f"{tool.label}.{tool.name}" for _, tool in calls)
        try:
            for (call, _), task in zip(calls, tasks, strict=True):
                await asyncio.wait({task})
                if self._cancelled is not None:
                    return
                yield call, await self._result(call, task.result())
        finally:
            for task in tasks:
                task.cancel()
            self._calls.difference_update(tasks)
            self.running_tools = ()

    async def _call(self, call: ToolCall, tool: ServerTool, number: int) -> McpResult:
        """`number` counts the calls of the request from 0 on."""
        began, made = time.perf_counter(), failed_call("the call was cancelled", "cancelled")
        try:
            made = await self._run_tool(call, tool, number)
            return made
        finally:
            seconds = time.perf_counter() - began
            chars = sum(len(part.text) for part in made.content if isinstance(part, Text))
            run = ToolRun(tool.label, tool.name, made.status, seconds, chars, time.time())
            self.tools.runs.append(run)
            self._services.metrics.tool_called(_metric_name(self.tools, tool), made.status, seconds)
            level = logging.INFO if made.status == "ok" else logging.WARNING
            fields: dict[str, Any] = {"server": run.server, "tool": run.tool, "status": run.status, "chars": chars}
            log_event(log, level, "tool call", ms=round(seconds * 1000), **fields)

    async def _run_tool(self, call: ToolCall, tool: ServerTool, number: int) -> McpResult:
        limit = self.tools.servers.settings.max_calls
        if (wanted := self._request.max_tool_calls) is not None:
            limit = min(limit, wanted)
        if number >= limit:
            return failed_call(f"not run: this request may call tools {limit} times; answer without them", "limit")
        try:
            arguments: Any = _decode(call.arguments.strip() or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return failed_call(f"not run: the arguments are not JSON: {error}")
        if not isinstance(arguments, dict):
            return failed_call("not run: the arguments are not a JSON object")
        return await tool.connection.call(tool.name, arguments)

    async def _result(self, call: ToolCall, made: McpResult) -> ToolResult:
        limit = self.tools.servers.settings.max_output_chars
        content = [await self._checked(part) for part in made.content]
        return ToolResult(call.id, tuple(_shortened(content, limit)), made.status != "ok")

    async def _checked(self, part: ResultPart) -> ResultPart:
        """A result must not fail the request: media that the gateway would refuse is replaced by a text."""
        if isinstance(part, Audio):
            return Text("[audio, which is not passed on]")
        if isinstance(part, Image):
            try:
                await asyncio.to_thread(check_data, part.url, self._preparer.images.max_bytes)
            except ModelyardError as error:
                return Text(f"[image: {error.message}]")
        return part

    # --- the record -------------------------------------------------------------------------------------------------

    def _end(self, last: Finished | Failed) -> Finished | Failed:
        """One record for all rounds."""
        self._recorded = True
        prepared, tools, caller = self.prepared, self.tools, self.prepared.caller
        if isinstance(last, Failed) and self._cancelled is not None:
            last = Failed(self._cancelled)
        failed = isinstance(last, Failed) and not isinstance(last.error, Cancelled)
        status = last.reason if isinstance(last, Finished) else last.error.code or last.error.kind
        base = tools.records[-1] if tools.records else None
        if base is None:
            base = RequestRecord(
                trace=caller.trace,
                model=prepared.model.name,
                cache=prepared.target.cache,
                endpoint=caller.endpoint,
                key=caller.key,
                session=prepared.request.session,
                at=0.0,
                status=status,
            )
        usage = Usage()
        for record in tools.records:
            usage = _sum(usage, record.usage)
        made = replace(
            base,
            at=time.time(),
            status=status,
            failed=failed,
            usage=usage,
            timings=self._timings if isinstance(last, Finished) else base.timings,
            reuse=tools.records[0].reuse if tools.records else None,
            calls=tuple(tools.runs),
            cost=sum(record.cost for record in tools.records),
            skipped=prepared.skipped,
        )
        self._services.history.add(made)
        return last


class _Turn:
    """What the model generated in one round."""

    def __init__(self, tools: ServerTools) -> None:
        self._tools, self._reply = tools, ReplyBuilder()
        self.finished: Finished | None = None

    def feed(self, events: Iterable[Event]) -> None:
        self._reply.feed(events)
        for event in events:
            if isinstance(event, Finished):
                self.finished = event

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._reply.blocks

    def server_calls(self) -> list[tuple[ToolCall, ServerTool]]:
        """The complete calls of servers' tools."""
        calls = [block.part for block in self.blocks if isinstance(block.part, ToolCall) and block.complete]
        return [(call, tool) for call in calls if (tool := self._tools.by_name.get(call.name)) is not None]

    @property
    def has_other_calls(self) -> bool:
        return any(
            isinstance(block.part, ToolCall) and block.complete and block.part.name not in self._tools.by_name
            for block in self.blocks
        )


class _Output:
    """The events of all rounds as one stream for the client: one Started, blocks that are counted on, and the calls of
    servers' tools under their own names, or not at all."""

    def __init__(self, tools: ServerTools) -> None:
        self._shows_calls, self._tools = tools.is_shown, tools
        self._index = -1  # of the newest block
        self._is_started = self._is_hidden = False
        self._hidden_calls: set[str] = set()
        self._has_text = self._needs_paragraph = False

    def start(self, prepared: PreparedRequest) -> list[Event]:
        """Before the first round, for calls that come first."""
        self._is_started = True
        lists = self._tools.lists if self._shows_calls else ()
        return [Started(prepared.caller.trace, prepared.request.model, prepared.created, tool_lists=lists)]

    def events(self, events: Sequence[Event]) -> list[Event]:
        made: list[Event] = []
        for event in events:
            if isinstance(event, BlockDelta):
                if not self._is_hidden:
                    made.append(replace(event, index=self._index))
            elif isinstance(event, BlockStart):
                self._start_block(event, made)
            elif isinstance(event, BlockEnd):
                if not self._is_hidden:
                    made.append(replace(event, index=self._index))
            elif isinstance(event, Started):
                if not self._is_started:
                    self._is_started = True
                    made.append(replace(event, tool_lists=self._tools.lists if self._shows_calls else ()))
            elif not isinstance(event, Finished):
                made.append(event)
        return made

    def _start_block(self, event: BlockStart, made: list[Event]) -> None:
        tool = self._tools.by_name.get(event.name) if event.kind == "tool_call" else None
        self._is_hidden = tool is not None and not self._shows_calls and not tool.is_search
        if self._is_hidden:
            self._hidden_calls.add(event.call_id)
            return
        self._index += 1
        event = replace(event, index=self._index)
        if tool is not None:
            event = replace(event, name=tool.name, server=tool.label, asks=tool.asks)
        made.append(event)
        if event.kind == "text":
            if self._needs_paragraph:
                made.append(BlockDelta(self._index, _PARAGRAPH))
            self._has_text, self._needs_paragraph = True, False

    def end_round(self) -> None:
        self._needs_paragraph = self._has_text and not self._shows_calls

    def result(self, result: ToolResult) -> list[Event]:
        if result.call_id in self._hidden_calls:
            return []
        self._index += 1
        start = BlockStart(self._index, "tool_result", result.call_id)
        return [start, BlockEnd(self._index, result=result)]

    def approved(self, call: ToolCall, tool: ServerTool, result: ToolResult) -> list[Event]:
        self._index += 1
        start = BlockStart(self._index, "tool_call", call.id, tool.name, server=tool.label, approved=True)
        end = BlockEnd(self._index)
        return [start, BlockDelta(self._index, call.arguments), end, *self.result(result)]


def _shortened(content: Sequence[ResultPart], limit: int) -> list[ResultPart]:
    """At most `limit` characters of text; the model reads that there was more."""
    made: list[ResultPart] = []
    left = limit
    cut = 0
    for part in content:
        if not isinstance(part, Text):
            made.append(part)
        elif len(part.text) <= left:
            made.append(part)
            left -= len(part.text)
        else:
            if left:
                made.append(Text(part.text[:left]))
            cut += len(part.text) - left
            left = 0
    if cut:
        made.append(Text(f"[{cut} more characters were left out]"))
    return made or [Text("")]


def _metric_name(tools: ServerTools, tool: ServerTool) -> str:
    place = tool.connection
    return "tool_search" if isinstance(place, ToolSearch) else tools.servers.metric_name(place)


def _not_run(tool: ServerTool, status: str) -> ToolRun:
    return ToolRun(tool.label, tool.name, status)


def _with_results(message: Message, results: dict[str, ToolResult]) -> Message:
    if message.role != "tool":
        return message
    parts = tuple(results.get(part.call_id, part) if isinstance(part, ToolResult) else part for part in message.parts)
    return replace(message, parts=parts)


def _continued(request: Request, messages: tuple[Message, ...]) -> Request:
    """The next round's request. A choice that forces a call was meant for the first one."""
    return replace(request, messages=(*request.messages, *messages), tool_choice=ToolChoice())


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.prompt + other.prompt,
        one.cached + other.cached,
        one.output + other.output,
        one.reasoning + other.reasoning,
    )


def _add(before: Timings, newest: Timings) -> Timings:
    """The first token is that of the first round; the total is the newest, because it counts from the arrival."""

    def total(one: float | None, other: float | None) -> float | None:
        return other if one is None else one if other is None else one + other

    return Timings(
        queue=total(before.queue, newest.queue),
        tokenize=total(before.tokenize, newest.tokenize),
        prefill=total(before.prefill, newest.prefill),
        first_token=newest.first_token if before.first_token is None else before.first_token,
        decode=total(before.decode, newest.decode),
        backend=total(before.backend, newest.backend),
        engine=total(before.engine, newest.engine),
        total=newest.total,
    )
