"""The client role: requests to an upstream that speaks Messages, and its replies and streams back to core values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import Decoder

from modelyard.core.errors import Incomplete, InvalidRequest, ModelyardError, Unsupported
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    Usage,
)
from modelyard.core.request import (
    FILE_ID,
    Audio,
    Constraint,
    Document,
    Image,
    ItemReference,
    Message,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolApproval,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.anthropic_messages import mcp
from modelyard.protocols.anthropic_messages.client_tools import is_client_tool
from modelyard.protocols.anthropic_messages.errors import read_stream_error
from modelyard.protocols.anthropic_messages.reply import ID_PREFIX, STOP_REASONS, write_block
from modelyard.protocols.anthropic_messages.request import (
    MAX_TEMPERATURE,
    ContentBlock,
    has_content,
    read_content,
    read_input,
)
from modelyard.protocols.common.extensions import check_temperature, present, write_extensions
from modelyard.protocols.common.json import decode, encode, is_json_object
from modelyard.protocols.common.reasoning_signature import unpack_reasoning
from modelyard.protocols.common.sse import SseEvent, SseParser

# --- the outgoing request -------------------------------------------------------------------------------------------

_DISPLAYS = frozenset({"omitted", "summarized", "updates"})
_EFFORTS = {"minimal": "low", "none": None}  # values of other protocols
_FREE_TEXT_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def write_request(request: Request) -> bytes:
    check_temperature(request, MAX_TEMPERATURE, "Anthropic")
    system, messages = _split_system(request.messages)
    body: dict[str, Any] = {"model": request.model, "messages": [_write_message(message) for message in messages]}
    body |= present(
        max_tokens=request.max_tokens,
        system=_write_content(system.parts) if system else None,
        tools=_write_tools(request.tools) or None,
        mcp_servers=mcp.write_servers(request.tools) or None,
        tool_choice=_write_tool_choice(request),
        thinking=_write_thinking(request.reasoning),
        output_config=_write_output_config(request) or None,
        stop_sequences=request.stop or None,
        metadata=_write_metadata(request),
        stream=request.stream or None,
    )
    return encode(body | write_extensions(request))


def _split_system(messages: tuple[Message, ...]) -> tuple[Message | None, tuple[Message, ...]]:
    """The leading system message goes into `system`; empty ones are dropped."""
    for index, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return None, messages[index:]
        if has_content(message.parts):
            return message, messages[index + 1 :]
    return None, ()


def _write_message(message: Message) -> dict[str, Any]:
    role = {"tool": "user", "developer": "system"}.get(message.role, message.role)
    return {"role": role, "content": _write_content(message.parts)}


def _write_content(parts: Iterable[Part]) -> str | list[dict[str, Any]]:
    blocks = [_write_part(part) for part in parts]
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        text: str = blocks[0]["text"]
        return text
    return blocks


def _write_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Audio):
        raise Unsupported("Anthropic's API takes no audio", code="modality_unsupported", param="messages")
    if isinstance(part, Document):
        return {"type": "document", "source": _write_source(part.url)} | ({"title": part.name} if part.name else {})
    if isinstance(part, Image):
        return {"type": "image", "source": _write_source(part.url)}
    if isinstance(part, ToolReference):
        return {"type": "tool_reference", "tool_name": part.name}
    if isinstance(part, ToolResult):
        block: dict[str, Any] = {"type": "tool_result", "tool_use_id": part.call_id}
        if part.content:
            block["content"] = _write_content(part.content)
        return block | {"is_error": True} if part.is_error else block
    if isinstance(part, ToolApproval):
        raise Unsupported("Anthropic's API has no approvals of calls", param="messages")
    if isinstance(part, ItemReference):
        raise ValueError("the gateway replaces references by their items")
    return write_block(part)


def _write_source(url: str) -> dict[str, str]:
    if url.startswith("data:") and ";base64," in url:
        media_type, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "base64", "media_type": media_type, "data": data}
    if url.startswith(FILE_ID):
        return {"type": "file", "file_id": url.removeprefix(FILE_ID)}
    return {"type": "url", "url": url}


def _write_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """The members of a toolset share its entry."""
    written, sets = list[dict[str, Any]](), set[str | None]()
    for tool in tools:
        if tool.vendor is None or not is_client_tool(tool.type or ""):
            written.append(_write_tool(tool))
        elif tool.namespace is None or tool.type not in sets:
            sets.add(tool.type)
            written.append(tool.vendor)
    return written


def _write_tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "server":
        body: dict[str, Any] = {"type": tool.type, "name": tool.name} | tool.parameters
    else:
        schema = _FREE_TEXT_SCHEMA if tool.kind == "custom" else tool.parameters or {"type": "object"}
        body = {"name": tool.name} | present(description=tool.description or None, strict=tool.strict)
        body["input_schema"] = schema
    return body | {"defer_loading": True} if tool.deferred else body


def _write_tool_choice(request: Request) -> dict[str, Any] | None:
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    if choice.mode == "none":
        return {"type": "none"}
    if choice.mode == "auto" and parallel is None:
        return None
    body: dict[str, Any] = {"type": {"required": "any", "named": "tool"}.get(choice.mode, choice.mode)}
    if choice.mode == "named":
        body["name"] = choice.name
    return body if parallel is None else body | {"disable_parallel_tool_use": not parallel}


def _write_thinking(reasoning: Reasoning) -> dict[str, Any] | None:
    if reasoning.enabled is None:
        return None
    if not reasoning.enabled:
        return {"type": "disabled"}
    display = reasoning.summary if reasoning.summary in _DISPLAYS else None
    kind = "adaptive" if reasoning.budget is None else "enabled"
    return {"type": kind} | present(budget_tokens=reasoning.budget, display=display)


def _write_output_config(request: Request) -> dict[str, Any]:
    effort = request.reasoning.effort
    return present(
        effort=_EFFORTS.get(effort, effort) if effort else None, format=_write_output_format(request.constraint)
    )


def _write_output_format(constraint: Constraint | None) -> dict[str, Any] | None:
    if constraint is None or constraint.kind not in ("json_schema", "json_object"):
        return None
    schema = (constraint.text if constraint.kind == "json_schema" else "") or '{"type":"object"}'
    return {"type": "json_schema", "schema": Raw(schema.encode())}


def _write_metadata(request: Request) -> dict[str, Any] | None:
    if request.user is None:
        return request.metadata
    return {**(request.metadata or {}), "user_id": request.user}


# --- the whole reply ------------------------------------------------------------------------------------------------

_STOP_REASONS: Mapping[str, StopReason] = {name: reason for reason, name in STOP_REASONS.items()}


class AnthropicUsage(Struct, frozen=True):
    """Missing counts stay None: a later event may have only some of them."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: dict[str, Any] | None = None


class AnthropicReply(Struct, frozen=True):
    id: str = ""
    model: str = ""
    content: list[ContentBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage = AnthropicUsage()


_reply_decoder = Decoder(AnthropicReply)


def read_reply(body: bytes) -> Reply:
    try:
        parsed = decode(_reply_decoder, body)
        parts = read_content(parsed.content, {})
    except InvalidRequest as error:
        raise Incomplete(f"the upstream's reply cannot be read: {error.message}") from None
    blocks = tuple(Block(part) for part in parts if isinstance(part, Text | Thinking | ToolCall | ToolResult))
    usage = _read_usage(parsed.usage, Usage())
    finished = Finished(_read_stop_reason(parsed.stop_reason), usage, parsed.stop_sequence)
    return Reply(_read_started(parsed, Usage(usage.prompt, usage.cached)), blocks, finished)


def _read_started(body: AnthropicReply, usage: Usage) -> Started:
    """This protocol has no creation time."""
    return Started(body.id.removeprefix(ID_PREFIX), body.model, 0, usage)


def _read_stop_reason(name: str | None) -> StopReason:
    return _STOP_REASONS.get(name or "", "end")


def _read_usage(body: AnthropicUsage, before: Usage) -> Usage:
    """Counts that this event omits keep their value from the event before."""
    prompt, cached = before.prompt, before.cached
    if body.input_tokens is not None:
        cached = body.cache_read_input_tokens or 0
        prompt = body.input_tokens + cached + (body.cache_creation_input_tokens or 0)
    output = before.output if body.output_tokens is None else body.output_tokens
    thinking = (body.output_tokens_details or {}).get("thinking_tokens")
    return Usage(prompt, cached, output, thinking if isinstance(thinking, int) else before.reasoning)


# --- the stream -----------------------------------------------------------------------------------------------------


class AnthropicDelta(Struct, frozen=True):
    """The `delta` of a content block, or of the message."""

    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class AnthropicStreamEvent(Struct):
    type: str = ""
    message: AnthropicReply = AnthropicReply()
    index: int = 0
    content_block: ContentBlock | None = None
    delta: AnthropicDelta = AnthropicDelta()
    usage: AnthropicUsage = AnthropicUsage()


class TypeField(Struct):
    type: str = ""


_type_decoder = Decoder(TypeField)
_event_decoder = Decoder(AnthropicStreamEvent)
_BLOCK_EVENTS = frozenset({"content_block_start", "content_block_delta", "content_block_stop"})
_BLOCK_KINDS: dict[str, BlockKind] = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "thinking",
    "tool_use": "tool_call",
}


class MessagesStreamReader:
    """Bytes of a stream to events. Ends with exactly one Finished or Failed and ignores what follows.

    Events have at most one open block. Upstreams may interleave blocks; events of a later block are held back until the
    open one ends. Unknown events and block types are skipped.
    """

    def __init__(self) -> None:
        self._sse = SseParser()
        self._started = self._done = False
        self._usage = Usage()
        self._last_delta: AnthropicDelta | None = None
        self._blocks = 0
        self._open: _OpenBlock | None = None
        self._held: dict[int, list[AnthropicStreamEvent]] = {}  # blocks that started before the open one ended

    def feed(self, data: bytes) -> list[Event]:
        return self._read_all(self._sse.feed(data))

    def finish(self) -> list[Event]:
        """A stream with a stop reason is complete, even without its last event."""
        out = self._read_all(self._sse.finish())
        if self._done:
            return out
        if self._last_delta and self._last_delta.stop_reason:
            return [*out, *self._finish()]
        return [*out, *self._fail(Incomplete("the upstream's stream ended before its message did"))]

    def _read_all(self, frames: list[SseEvent]) -> list[Event]:
        out: list[Event] = []
        for frame in frames:
            if self._done:
                break
            try:
                out += self._read(frame)
            except InvalidRequest as error:
                out += self._fail(Incomplete(f"the upstream's stream cannot be read: {error.message}"))
        return out

    def _read(self, frame: SseEvent) -> list[Event]:
        name = frame.event or decode(_type_decoder, frame.data).type
        if name == "error":
            return self._fail(read_stream_error(frame.data))
        if name == "message_stop":
            return self._finish()
        if name not in _BLOCK_EVENTS and name not in ("message_start", "message_delta"):
            return []
        event = decode(_event_decoder, frame.data)
        event.type = name
        started = self._start(event.message)
        if name == "message_start":
            return started
        return [*started, *(self._read_message_delta(event) if name == "message_delta" else self._read_block(event))]

    def _start(self, message: AnthropicReply) -> list[Event]:
        if self._started:
            return []
        self._started = True
        self._usage = _read_usage(message.usage, Usage())
        return [_read_started(message, self._usage)]

    def _read_message_delta(self, event: AnthropicStreamEvent) -> list[Event]:
        out = self._close_all()
        self._usage = _read_usage(event.usage, self._usage)
        if event.delta.stop_reason is not None or self._last_delta is None:
            self._last_delta = event.delta
        return out

    def _finish(self) -> list[Event]:
        out = [*self._start(AnthropicReply()), *self._close_all()]
        self._done = True
        last = self._last_delta or AnthropicDelta()
        return [*out, Finished(_read_stop_reason(last.stop_reason), self._usage, last.stop_sequence)]

    def _fail(self, error: ModelyardError) -> list[Event]:
        self._done = True
        return [Failed(error)]

    def _read_block(self, event: AnthropicStreamEvent) -> list[Event]:
        if self._open is not None and event.index != self._open.wire_index:
            self._held.setdefault(event.index, []).append(event)
            return []
        if event.type == "content_block_start":
            closed, block = self._close(), event.content_block or ContentBlock("")
            known = block.type in _BLOCK_KINDS
            self._open = _OpenBlock(event.index, self._blocks if known else None, block)
            self._blocks += known
            return [*closed, *self._open.start()]
        if self._open is None:
            return []
        if event.type == "content_block_delta":
            return self._open.delta(event.delta)
        return [*self._close(), *self._release_held()]

    def _close(self, *, cut: bool = False) -> list[Event]:
        block, self._open = self._open, None
        return block.end(cut) if block else []

    def _release_held(self) -> list[Event]:
        """Replay the events of the block that has waited longest."""
        out: list[Event] = []
        while self._held and self._open is None:
            for event in self._held.pop(next(iter(self._held))):
                out += self._read_block(event)
        return out

    def _close_all(self) -> list[Event]:
        """End the open block, which the upstream never closed, and then the held ones."""
        out: list[Event] = []
        while self._open is not None or self._held:
            out += [*self._close(cut=True), *self._release_held()]
        return out


class _OpenBlock:
    """The block that is being read. `index` is None for an unknown type, whose events are skipped."""

    def __init__(self, wire_index: int, index: int | None, first: ContentBlock) -> None:
        self.wire_index, self.index = wire_index, index
        self._first = first
        self._texts: list[str] = []
        self._signature = ""

    def start(self) -> list[Event]:
        if self.index is None:
            return []
        first, kind = self._first, _BLOCK_KINDS[self._first.type]
        start = BlockStart(self.index, kind)
        if kind == "tool_call":
            toolset = None if first.toolset_name is None else str(first.toolset_name)
            start = BlockStart(self.index, kind, str(first.id or ""), str(first.name or ""), toolset)
        return [start, *self._delta(first.text or first.thinking)]

    def delta(self, delta: AnthropicDelta) -> list[Event]:
        self._signature += delta.signature
        return self._delta(delta.text or delta.thinking or delta.partial_json)

    def _delta(self, text: object) -> list[Event]:
        if self.index is None or not isinstance(text, str) or not text:
            return []
        self._texts.append(text)
        return [BlockDelta(self.index, text)]

    def end(self, cut: bool) -> list[Event]:
        if self.index is None:
            return []
        first = self._first
        if first.type == "text":
            return [BlockEnd(self.index)]
        if first.type == "tool_use":
            late = [] if self._texts or cut else self._delta(read_input(first.input))
            return [*late, BlockEnd(self.index, "", is_json_object("".join(self._texts)))]
        signature = self._signature or str(first.signature or first.data or "")
        late = [] if self._texts else self._delta(unpack_reasoning(signature))
        return [*late, BlockEnd(self.index, signature)]
