"""The client role: requests to an upstream that speaks Ollama's API, and its lines back to core values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from modelyard.core.errors import Incomplete, ModelyardError
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
    Timings,
    TokenLogprob,
    Usage,
)
from modelyard.core.request import Constraint, Image, Message, Request, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard.protocols.common.call_arguments import read_arguments, write_arguments
from modelyard.protocols.common.extensions import present, write_extensions
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.media_parts import refuse_audio
from modelyard.protocols.common.openai_fields import MIN_LOGPROB
from modelyard.protocols.ollama.errors import read_line_error
from modelyard.protocols.ollama.fields import write_image, write_keep_alive, write_think
from modelyard.protocols.ollama.request import OllamaToolCall

# --- the outgoing request -------------------------------------------------------------------------------------------

_TOP_LEVEL = ("lora_adapter", "chat_template_kwargs", "documents", "priority", "grammar", "regex", "lark")


def write_request(request: Request) -> bytes:
    tools = [_write_tool(tool) for tool in request.tools if tool.kind == "function" and not tool.deferred]
    return encode(
        write_common(request) | {"messages": _write_messages(request.messages)} | present(tools=tools or None)
    )


def write_common(request: Request) -> dict[str, Any]:
    """The fields of both endpoints. Every field of sampling is an option."""
    options = write_extensions(request)
    body: dict[str, Any] = {"model": request.model, "stream": request.stream}
    body |= {name: options.pop(name) for name in _TOP_LEVEL if name in options}
    if (penalty := options.pop("repetition_penalty", None)) is not None:
        options["repeat_penalty"] = penalty
    options |= present(num_predict=request.max_tokens, stop=request.stop or None)
    return body | present(
        options=options or None,
        format=_write_format(request.constraint),
        think=write_think(request.reasoning),
        keep_alive=write_keep_alive(request.keep_alive),
        logprobs=None if request.logprobs is None else True,
        top_logprobs=request.logprobs or None,
    )


def _write_format(constraint: Constraint | None) -> Any:
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return None
    return "json" if constraint.kind == "json_object" else Raw(constraint.text.encode())


def _write_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def _write_messages(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """A result names its tool, because servers without ids of calls match it by the name."""
    names = {part.id: part.name for message in messages for part in message.parts if isinstance(part, ToolCall)}
    out: list[dict[str, Any]] = []
    for message in messages:
        if message.role != "tool":
            out.append(_write_message(message))
        for part in message.parts:
            if isinstance(part, ToolResult):
                text = "".join(each.text for each in part.content if isinstance(each, Text))
                images = [write_image(each) for each in part.content if isinstance(each, Image)]
                result = {"role": "tool", "content": text, "tool_call_id": part.call_id}
                out.append(result | present(tool_name=names.get(part.call_id), images=images or None))
    return out


def _write_message(message: Message) -> dict[str, Any]:
    parts = message.parts
    refuse_audio(parts, "Ollama")
    calls = [_write_call(part) for part in parts if isinstance(part, ToolCall)]
    thinking = "".join(part.text for part in parts if isinstance(part, Thinking) and not part.redacted)
    images = [write_image(part) for part in parts if isinstance(part, Image)]
    role = "system" if message.role == "developer" else message.role
    body = {"role": role, "content": "".join(part.text for part in parts if isinstance(part, Text))}
    return body | present(thinking=thinking or None, images=images or None, tool_calls=calls or None)


def _write_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": write_arguments(call.arguments)}}


# --- the reply --------------------------------------------------------------------------------------------------------


class UpstreamLineLogprob(Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[UpstreamLineLogprob] | None = None

    def read(self) -> TokenLogprob:
        return TokenLogprob(
            self.token,
            MIN_LOGPROB if self.logprob is None else self.logprob,
            bytes_of(self.bytes, self.token),
            tuple(other.read() for other in self.top_logprobs or ()),
        )


def bytes_of(values: list[int] | None, token: str) -> bytes:
    return token.encode() if values is None else bytes(value & 255 for value in values)


class UpstreamLineMessage(Struct):
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class UpstreamLine(Struct):
    """A line of the stream, or the whole reply, of either endpoint."""

    model: str = ""
    created_at: str = ""
    message: UpstreamLineMessage | None = None
    response: str | None = None
    thinking: str | None = None
    logprobs: list[UpstreamLineLogprob] | None = None
    done: bool = False
    done_reason: str | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    error: Any = None

    def started(self) -> Started:
        return Started("", self.model, _read_time(self.created_at))

    def tokens(self) -> tuple[TokenLogprob, ...]:
        return tuple(token.read() for token in self.logprobs or ())


_line_decoder = msgspec.json.Decoder(UpstreamLine)


def decode_line(data: bytes) -> UpstreamLine:
    """An `error` field raises."""
    try:
        line = _line_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incomplete(f"the upstream's reply cannot be read: {error}") from None
    if line.error:
        raise read_line_error(line.error)
    return line


def _read_time(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text[:19] + "+00:00").timestamp())
    except ValueError:
        return 0


def read_finished(line: UpstreamLine, *, has_calls: bool) -> Finished:
    reason: StopReason = "max_tokens" if line.done_reason == "length" else "tool_calls" if has_calls else "end"
    timings = Timings(
        prefill=_seconds(line.prompt_eval_duration),
        decode=_seconds(line.eval_duration),
        total=_seconds(line.total_duration),
    )
    return Finished(reason, Usage(line.prompt_eval_count, 0, line.eval_count), timings=timings)


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _call(body: OllamaToolCall, number: int) -> ToolCall:
    return ToolCall(body.id or f"call_{number}", body.function.name, read_arguments(body.function.arguments))


def read_reply(body: bytes) -> Reply:
    line = decode_line(body)
    message = line.message or UpstreamLineMessage()
    blocks = [Block(Thinking(message.thinking))] if message.thinking else []
    if message.content:
        blocks.append(Block(Text(message.content), line.tokens()))
    blocks += [Block(_call(call, at)) for at, call in enumerate(message.tool_calls or (), 1)]
    return Reply(line.started(), tuple(blocks), read_finished(line, has_calls=bool(message.tool_calls)))


# --- the stream -----------------------------------------------------------------------------------------------------


class LineReader:
    """Bytes of a stream, split anywhere, to events. `add_line` adds the contents of a line, which differ by endpoint.
    Ends with exactly one Finished or Failed and ignores what follows."""

    def __init__(self, add_line: Callable[[LineReader, UpstreamLine], None]) -> None:
        self._add_line = add_line
        self._rest = b""
        self._kind: BlockKind | None = None
        self._blocks = self.calls = 0
        self._started = self._done = False
        self._out: list[Event] = []

    def feed(self, data: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read(line)
        return self._take()

    def finish(self) -> list[Event]:
        self._read(self._rest)
        if not self._done:
            self._fail(Incomplete("the upstream's stream ended before its answer did"))
        return self._take()

    def add(self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        if self._kind != kind:
            self._close()
            self._kind = kind
            self._out.append(BlockStart(self._blocks, kind))
        self._out.append(BlockDelta(self._blocks, text, logprobs))

    def add_call(self, body: OllamaToolCall) -> None:
        self._close()
        self.calls += 1
        call = _call(body, self.calls)
        self._out.append(BlockStart(self._blocks, "tool_call", call.id, call.name))
        if call.arguments:
            self._out.append(BlockDelta(self._blocks, call.arguments))
        self._kind = "tool_call"
        self._close()

    def _close(self) -> None:
        if self._kind is not None:
            self._out.append(BlockEnd(self._blocks))
            self._blocks += 1
            self._kind = None

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _read(self, data: bytes) -> None:
        if self._done or not data.strip():
            return
        try:
            line = decode_line(data)
        except ModelyardError as error:
            self._fail(error)
            return
        if not self._started:
            self._started = True
            self._out.append(line.started())
        self._add_line(self, line)
        if line.done:
            self._close()
            self._done = True
            self._out.append(read_finished(line, has_calls=self.calls > 0))

    def _fail(self, error: ModelyardError) -> None:
        self._done = True
        self._out.append(Failed(error))


def _add_chat_line(reader: LineReader, line: UpstreamLine) -> None:
    message = line.message or UpstreamLineMessage()
    reader.add("thinking", message.thinking or "", ())
    reader.add("text", message.content or "", line.tokens())
    for call in message.tool_calls or ():
        reader.add_call(call)


class ChatLineReader(LineReader):
    def __init__(self) -> None:
        super().__init__(_add_chat_line)
