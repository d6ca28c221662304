"""The client role: requests to an upstream that speaks Responses, and its replies and streams back to core values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    TokenLogprob,
    Usage,
    collect_reply,
)
from modelyard.core.request import (
    FILE_ID,
    Audio,
    Document,
    Image,
    Message,
    Part,
    Request,
    Text,
    Thinking,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.common.extensions import present, write_extensions
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.media_parts import write_audio
from modelyard.protocols.common.response_metrics import read_metrics
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.openai_responses import client_tools, mcp
from modelyard.protocols.openai_responses.errors import read_failure
from modelyard.protocols.openai_responses.reply import (
    split_instructions,
    write_text_format,
    write_tool_choice,
    write_tools,
)
from modelyard.protocols.openai_responses.request import (
    INCLUDE_ENCRYPTED,
    INCLUDE_LOGPROBS,
    join_turns,
    read_thinking,
)

# --- the outgoing request -------------------------------------------------------------------------------------------


def write_request(request: Request) -> bytes:
    instructions, messages = split_instructions(request)
    reasoning, text_format = request.reasoning, write_text_format(request.constraint)
    effort = reasoning.effort or ("none" if reasoning.enabled is False else None)
    include = [INCLUDE_ENCRYPTED] * request.encrypted_reasoning + [INCLUDE_LOGPROBS] * (request.logprobs is not None)
    choice = write_tool_choice(request.tool_choice, request.tools)
    body = {"model": request.model} | present(
        instructions=instructions,
        input=list(write_items(messages)),
        tools=write_tools(request.tools) or None,
        tool_choice=choice if choice != "auto" else None,
        parallel_tool_calls=request.parallel_tool_calls,
        max_output_tokens=request.max_tokens,
        stop=request.stop or None,
        text={"format": text_format} if text_format["type"] != "text" else None,
        reasoning=present(effort=effort, summary=reasoning.summary) or None,
        include=include or None,
        top_logprobs=request.logprobs,
        stream=request.stream or None,
        store=request.store,
        previous_response_id=request.previous,
        prompt_cache_key=request.session,
        metadata=request.metadata,
        user=request.user,
    )
    return encode(body | write_extensions(request))


def write_items(messages: tuple[Message, ...]) -> Iterator[JsonObject]:
    """Messages as input items: content of one message stays together, calls, results and reasoning are items."""
    calls = mcp.ServerCalls(messages)
    made = [part for message in messages for part in message.parts if isinstance(part, ToolCall)]
    types = {call.id: call.vendor_type for call in made if call.vendor_type is not None}
    for message in join_turns((message.role, message.parts) for message in messages):
        if not message.parts:
            yield _write_message(message.role, ())
        for is_content, parts in groupby(
            message.parts, key=lambda p: isinstance(p, Text | Image | Audio | Document | ToolReference)
        ):
            if is_content:
                yield _write_message(message.role, tuple(parts))
            else:
                yield from calls.write(parts, partial(_write_part, types=types))


def _write_message(role: str, parts: tuple[Part, ...]) -> JsonObject:
    text_type = "output_text" if role == "assistant" else "input_text"
    role = "user" if role == "tool" else role  # only results have an item of their own
    return {"type": "message", "role": role, "content": [_write_content(part, text_type) for part in parts]}


def _write_content(part: Part, text_type: str) -> JsonObject:
    if isinstance(part, Audio):
        return write_audio(part)
    if isinstance(part, Image):
        where, url = ("file_id", part.url.removeprefix(FILE_ID)) if _is_file(part) else ("image_url", part.url)
        return {"type": "input_image", where: url} | present(detail=part.detail)
    if isinstance(part, Document):
        where, url = "file_data" if part.url.startswith("data:") else "file_url", part.url
        if _is_file(part):
            where, url = "file_id", url.removeprefix(FILE_ID)
        return {"type": "input_file", where: url} | present(filename=part.name or None)
    if isinstance(part, ToolReference):
        return {"type": text_type, "text": part.name}
    return {"type": text_type, "text": part.text if isinstance(part, Text) else ""}


def _is_file(part: Image | Document) -> bool:
    return part.url.startswith(FILE_ID)


def _write_part(part: Part, types: Mapping[str, str]) -> JsonObject:
    """`types` of the calls that have an item of their own."""
    if isinstance(part, ToolCall) and part.vendor_type is not None:
        return client_tools.write_call(part.vendor_type, "completed", part)
    if isinstance(part, ToolResult) and (kind := types.get(part.call_id)) is not None:
        return client_tools.write_output(kind, part)
    if isinstance(part, ToolCall):
        kind, field = ("custom_tool_call", "input") if part.custom else ("function_call", "arguments")
        named = {"type": kind, "call_id": part.id, "name": part.name} | present(namespace=part.namespace)
        return named | {field: part.arguments}
    if isinstance(part, ToolResult):
        content = [_write_content(inner, "input_text") for inner in part.content]
        is_text = len(content) == 1 and content[0]["type"] == "input_text"
        kind = "custom_tool_call_output" if part.custom else "function_call_output"
        return {"type": kind, "call_id": part.call_id, "output": content[0]["text"] if is_text else content}
    if not isinstance(part, Thinking):
        return _write_message("user", (part,))
    item: JsonObject = {"type": "reasoning", "summary": []}
    if text := read_thinking(part.signature, part.text).text:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    return item | present(encrypted_content=part.signature or None)


# --- the response of an upstream ------------------------------------------------------------------------------------

_CALL_TYPES = frozenset({"function_call", "custom_tool_call"}) | client_tools.CALL_ITEMS
_ITEM_TYPES = _CALL_TYPES | {"message", "reasoning"}
_SERVER_CALL = "mcp_call"  # that the upstream has run: read by those who show it

Byte = Annotated[int, Meta(ge=0, le=255)]
Logprobs = tuple[TokenLogprob, ...]


class OutputLogprob(Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[Byte] | None = None
    top_logprobs: list[OutputLogprob] | None = None


class OutputPart(Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    logprobs: list[OutputLogprob] | None = None


class OutputItem(Struct):
    """An output item of any type, with every field optional: servers omit what they like."""

    type: str = ""
    status: str | None = None
    content: list[OutputPart] | None = None
    summary: list[OutputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    actions: Any = None
    operation: Any = None
    server_label: str | None = None
    output: Any = None
    error: Any = None

    @property
    def _client_call(self) -> ToolCall:
        """Of an item of a tool that the client runs."""
        values = {"action": self.action, "actions": self.actions, "operation": self.operation}
        fields = {name: value for name, value in values.items() if value is not None}
        return client_tools.read_call(self.type, self.call_id or self.id or "", fields)

    @property
    def is_call(self) -> bool:
        return self.type in _CALL_TYPES

    def start(self, index: int) -> BlockStart:
        if self.type == _SERVER_CALL:
            call, server = mcp.call_id(self.id or ""), self.server_label or ""
            return BlockStart(index, "tool_call", call, self.name or "", server=server)
        if not self.is_call:
            return BlockStart(index, "text" if self.type == "message" else "thinking")
        call_id, custom = self.call_id or self.id or "", self.type == "custom_tool_call"
        if self.type in client_tools.CALL_ITEMS:
            return BlockStart(index, "tool_call", call_id, self._client_call.name)
        return BlockStart(index, "tool_call", call_id, self.name or "", self.namespace or None, custom)

    @property
    def text(self) -> str:
        if self.type == "message":
            return "".join(part.text or part.refusal or "" for part in self.content or ())
        if self.type == "reasoning":
            text = "".join(part.text or "" for part in self.content or ())
            return text or "\n\n".join(part.text or "" for part in self.summary or ())
        if self.type in client_tools.CALL_ITEMS:
            return self._client_call.arguments
        arguments = self.input if self.type == "custom_tool_call" else self.arguments
        return arguments if isinstance(arguments, str) else ""

    @property
    def result(self) -> ToolResult | None:
        return mcp.read_result(self.id or "", self.output, self.error) if self.type == _SERVER_CALL else None

    @property
    def logprobs(self) -> Logprobs:
        return tuple(token for part in self.content or () for token in _read_logprobs(part.logprobs))


class InputTokensDetails(Struct):
    cached_tokens: int | None = None


class OutputTokensDetails(Struct):
    reasoning_tokens: int | None = None


class ResponsesUsage(Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: InputTokensDetails | None = None
    output_tokens_details: OutputTokensDetails | None = None


class IncompleteDetails(Struct):
    reason: str | None = None


class UpstreamResponse(Struct):
    id: str | None = None
    model: str | None = None
    created_at: float | None = None
    status: str | None = None
    error: Any = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] | None = None
    usage: ResponsesUsage | None = None
    metrics: Any = None  # our extension; other servers may use the name for something else


class ResponsesStreamEvent(Struct):
    """Any event of the stream; `Any` where events that are not read use the name for something else."""

    type: str = ""
    response: UpstreamResponse | None = None
    item: OutputItem | None = None
    output_index: int | None = None
    summary_index: int | None = None
    delta: Any = None
    logprobs: list[OutputLogprob] | None = None
    error: Any = None
    code: Any = None
    message: Any = None


_response_decoder = msgspec.json.Decoder(UpstreamResponse)
_event_decoder = msgspec.json.Decoder(ResponsesStreamEvent)


def read_reply(body: bytes) -> Reply:
    """A whole reply; one that failed raises its error."""
    try:
        parsed = _response_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incomplete(f"the upstream's reply cannot be read: {error}") from None
    return collect_reply(ResponsesStreamReader().read_response(parsed))


def _read_logprobs(tokens: list[OutputLogprob] | None) -> Logprobs:
    return tuple(
        TokenLogprob(
            token.token,
            token.logprob,
            token.token.encode() if token.bytes is None else bytes(token.bytes),
            _read_logprobs(token.top_logprobs),
        )
        for token in tokens or ()
    )


def _read_usage(usage: ResponsesUsage | None) -> Usage:
    if usage is None:
        return Usage()
    details, output_details = usage.input_tokens_details, usage.output_tokens_details
    return Usage(
        usage.input_tokens or 0,
        (details and details.cached_tokens) or 0,
        usage.output_tokens or 0,
        (output_details and output_details.reasoning_tokens) or 0,
    )


def _read_stop_reason(response: UpstreamResponse, has_calls: bool) -> StopReason:
    if response.status == "incomplete":
        reason = response.incomplete_details.reason if response.incomplete_details else None
        return "content_filter" if reason == "content_filter" else "max_tokens"
    return "tool_calls" if has_calls else "end"


# --- the stream -----------------------------------------------------------------------------------------------------

_DELTA_EVENTS = frozenset(
    {
        "response.output_text.delta",
        "response.refusal.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
        "response.mcp_call_arguments.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
    }
)
_END_EVENTS = frozenset({"response.completed", "response.incomplete"})
_FAILURE_EVENTS = frozenset({"response.failed", "response.cancelled", "error"})


class ResponsesStreamReader:
    """Bytes of a stream to events. Ends with exactly one Finished or Failed and ignores what follows. `server_calls`:
    those that the upstream has run are among them, with their results."""

    def __init__(self, *, server_calls: bool = False) -> None:
        self._sse = SseParser()
        self._items = _OutputItems(_ITEM_TYPES | {_SERVER_CALL} if server_calls else _ITEM_TYPES)
        self._is_started = self._is_done = False

    def feed(self, data: bytes) -> list[Event]:
        return [event for frame in self._sse.feed(data) for event in self._read_frame(frame.data)]

    def finish(self) -> list[Event]:
        out = [event for frame in self._sse.finish() for event in self._read_frame(frame.data)]
        if not self._is_done:
            out += self._fail(Incomplete("the upstream's stream ended before its response was complete"))
        return out

    def read_response(self, response: UpstreamResponse) -> list[Event]:
        """A whole reply: the same as a stream that has only its last event."""
        if response.error or response.status in ("failed", "cancelled"):
            return list(self._fail(read_failure(response.error)))
        return list(self._end(response))

    def _read_frame(self, data: bytes) -> Iterator[Event]:
        if self._is_done or data == b"[DONE]":
            return
        try:
            event = _event_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            yield from self._fail(Incomplete(f"the upstream sent an event that cannot be read: {error}"))
            return
        if event.type in _END_EVENTS and event.response:
            event.response.status = event.type.removeprefix("response.")
            yield from self._end(event.response)
        elif event.type in _FAILURE_EVENTS or (not event.type and event.error):
            error_field = event.error or {"code": event.code, "message": event.message}
            yield from self._fail(read_failure(event.response.error if event.response else error_field))
        elif event.response is not None:
            yield from self._start(event.response)
        elif self._read_item_event(event):
            yield from self._start(UpstreamResponse())
            yield from self._items.take()

    def _read_item_event(self, event: ResponsesStreamEvent) -> bool:
        """Whether this is an event of an output item."""
        items = self._items
        if event.type in _DELTA_EVENTS:
            if (item := items.find(event.output_index)) and isinstance(event.delta, str):
                item.add(event.delta, _read_logprobs(event.logprobs), event.type)
        elif event.type == "response.output_item.added" and event.item:
            items.open(event.item, event.output_index)
        elif event.type == "response.output_item.done" and event.item:
            items.complete(event.item, event.output_index)
        elif event.type == "response.reasoning_summary_part.added":
            if (item := items.find(event.output_index)) and event.summary_index:
                item.start_summary_part()
        else:
            return False
        return True

    def _start(self, response: UpstreamResponse) -> Iterator[Event]:
        if not self._is_started:
            self._is_started = True
            id = (response.id or "").removeprefix("resp_")
            yield Started(id, response.model or "", int(response.created_at or 0))

    def _end(self, response: UpstreamResponse) -> Iterator[Event]:
        yield from self._start(response)
        self._items.close_all(response.output or [])
        yield from self._items.take()
        self._is_done = True
        reason = _read_stop_reason(response, self._items.has_calls)
        yield Finished(reason, _read_usage(response.usage), timings=read_metrics(response.metrics))

    def _fail(self, error: ModelyardError) -> Iterator[Event]:
        self._is_done = True
        yield Failed(error)


class _OpenItem:
    """One output item: its latest object, and the text that has not been emitted yet."""

    def __init__(self, item: OutputItem) -> None:
        self.item = item
        self.is_started = self.is_done = False
        self.is_complete = True
        self._length = 0
        self._source = ""
        self._pending: list[tuple[str, Logprobs]] = []

    def add(self, text: str, logprobs: Logprobs, source: str) -> None:
        """Reasoning may come twice, as text and as summary: only the first source counts."""
        self._source = self._source or source
        if source == self._source and (text or logprobs):
            self._length += len(text)
            self._pending.append((text, logprobs))

    def start_summary_part(self) -> None:
        if "summary" in self._source:
            self.add("\n\n", (), self._source)

    def complete(self, item: OutputItem) -> None:
        """The final object of the item: add the text that no delta had."""
        if not self.is_done:
            self.add(item.text[self._length :], () if self._length else item.logprobs, self._source)
            self.item, self.is_done = item, True
            self.is_complete = not item.is_call or item.status in (None, "completed")

    def cut(self) -> None:
        """The response ended first: a call is incomplete."""
        if not self.is_done:
            self.is_done, self.is_complete = True, not self.item.is_call

    def take(self, index: int) -> Iterator[Event]:
        if not self.is_started:
            self.is_started = True
            yield self.item.start(index)
        for text, logprobs in self._pending:
            yield BlockDelta(index, text, logprobs)
        self._pending.clear()
        if self.is_done:
            yield BlockEnd(index, self.item.encrypted_content or "", self.is_complete)
            if (result := self.item.result) is not None:
                yield BlockStart(index + 1, "tool_result", result.call_id)
                yield BlockEnd(index + 1, result=result)


class _OutputItems:
    """The output items of one response, emitted one at a time and in order.

    Text may come in deltas, in the finished item, or only in the last event's `response.output`; none is emitted twice.
    Items may overlap: a later one waits until the earlier one has ended. An item of unknown type keeps its index and
    emits nothing.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._items: dict[int, _OpenItem | None] = {}
        self._queue: list[_OpenItem] = []
        self._block = 0
        self._latest = -1  # index of the latest item, for servers that omit it
        self.has_calls = False

    def open(self, item: OutputItem, index: int | None) -> None:
        self._latest = index = len(self._items) if index is None else index
        if index not in self._items:
            opened = _OpenItem(item) if item.type in self._types else None
            self._items[index] = opened
            self._queue += [opened] if opened else []

    def find(self, index: int | None) -> _OpenItem | None:
        return self._items.get(self._latest if index is None else index)

    def complete(self, item: OutputItem, index: int | None) -> None:
        latest = self._items.get(self._latest)
        if index is None and latest and not latest.is_done and latest.item.type == item.type:
            index = self._latest
        self.open(item, index)
        if opened := self.find(index):
            opened.complete(item)

    def close_all(self, output: list[OutputItem]) -> None:
        """Complete the open items from the final `output`; use all of it if no item was announced before."""
        is_empty = not self._items
        for index, item in enumerate(output):
            opened = self._items.get(index)
            if is_empty or (opened and opened.item.type == item.type):
                self.complete(item, index)
        for opened in self._queue:
            opened.cut()

    def take(self) -> Iterator[Event]:
        while self._queue:
            head = self._queue[0]
            yield from head.take(self._block)
            if not head.is_done:
                return
            self.has_calls |= head.item.is_call and head.is_complete
            self._queue.pop(0)
            self._block += 1 if head.item.result is None else 2
