"""The client role: requests to an upstream that speaks Chat Completions, and its replies and streams to core values."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from msgspec import Raw, Struct

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Event,
    Finished,
    Reply,
    Started,
    StopReason,
    TokenLogprob,
    Usage,
)
from modelyard.core.request import (
    Audio,
    Constraint,
    Document,
    Image,
    Message,
    Part,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.common.extensions import present, write_extensions
from modelyard.protocols.common.json import encode, is_json_object
from modelyard.protocols.common.llama_reply import UpstreamProgress, UpstreamTimings
from modelyard.protocols.common.media_parts import write_audio
from modelyard.protocols.common.openai_errors import read_error_field
from modelyard.protocols.common.openai_fields import (
    MIN_LOGPROB,
    OpenAIUsage,
    PromptLogprobs,
    read_upstream_prompt,
    read_usage,
)
from modelyard.protocols.common.sse import SseReader
from modelyard.protocols.openai_chat.reply import ID_PREFIX, REPETITION, write_call
from modelyard.protocols.openai_chat.request import (
    THINKING_KWARG,
    read_arguments,
)

# --- the outgoing request -------------------------------------------------------------------------------------------


def write_request(request: Request, *, signed_calls: bool = False) -> bytes:
    """Only fields that are set: servers may reject fields that they do not know.

    `max_tokens` is the older name: every local server knows it, and some do not know `max_completion_tokens`. With
    `signed_calls` the signature of reasoning returns on the call behind it, where Google's endpoint sends it.
    """
    body: dict[str, Any] = {"model": request.model, "messages": _write_messages(request.messages, signed_calls)}
    body |= _write_tools(request)
    body |= write_extensions(request)
    body |= _write_reasoning(request)
    body |= present(
        add_generation_prompt=request.add_generation_prompt if not request.continue_final_message else False,
        continue_final_message=request.continue_final_message,
        response_format=_write_response_format(request.constraint),
        max_tokens=request.max_tokens,
        stop=request.stop or None,
        n=request.n if request.n != 1 else None,
        logprobs=None if request.logprobs is None else True,
        top_logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        stream=request.stream or None,
        stream_options={"include_usage": True} if request.include_usage else None,
        prompt_cache_key=request.session,
        user=request.user,
        metadata=request.metadata,
        store=request.store,
    )
    return encode(body)


def _write_messages(messages: tuple[Message, ...], signed_calls: bool) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "assistant":
            out.append(_write_assistant(message, signed_calls))
        elif message.role != "tool":
            content = _write_content(message.parts)
            out.append({"role": message.role, "content": content} | present(name=message.name))
        out.extend(
            {"role": "tool", "tool_call_id": part.call_id, "content": _write_content(part.content)}
            for part in message.parts
            if isinstance(part, ToolResult)
        )
    return out


def _write_assistant(message: Message, signed_calls: bool) -> dict[str, Any]:
    """Chat has one order only: reasoning, content, calls. Redacted reasoning has no text to send."""
    calls, signature = list[dict[str, Any]](), ""
    for part in message.parts:
        if isinstance(part, Thinking):
            signature = part.signature
        elif isinstance(part, ToolCall):
            signed = {"extra_content": {"google": {"thought_signature": signature}}}
            calls.append(write_call(part) | (signed if signed_calls and signature else {}))
            signature = ""
    content = _write_content(message.parts)
    thinking = "".join(p.text for p in message.parts if isinstance(p, Thinking) and not p.redacted)
    out: dict[str, Any] = {"role": "assistant", "content": None if calls and content == "" else content}
    return out | present(reasoning_content=thinking or None, tool_calls=calls or None, name=message.name)


def _write_content(parts: tuple[Part, ...]) -> str | list[dict[str, Any]]:
    """A string where one text is all there is: many servers accept nothing else."""
    shown: list[Text | Image | Audio | Document] = []
    for part in parts:
        if isinstance(part, Text | Image | Audio | Document):
            shown.append(part)
        elif isinstance(part, ToolReference):
            # Chat cannot add a tool in mid-conversation: its definition goes into `tools`, and this takes its place.
            shown.append(Text(f"The tool {part.name} is now available."))
    if not shown:
        return ""
    if len(shown) == 1 and isinstance(shown[0], Text) and shown[0].text:
        return shown[0].text
    return [_write_part(part) for part in shown]


def _write_part(part: Text | Image | Audio | Document) -> dict[str, Any]:
    if isinstance(part, Audio):
        return write_audio(part)
    if isinstance(part, Document):
        return {"type": "file", "file": {"filename": part.name or "document.pdf", "file_data": part.url}}
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.url} | present(detail=part.detail)}


def _write_tools(request: Request) -> dict[str, Any]:
    """`tools` and the fields that are only valid beside it. A deferred tool is sent once a message refers to it."""
    found = _referenced_tools(request) if any(t.deferred for t in request.tools) else frozenset()
    tools = [t for t in request.tools if t.kind != "server" and (not t.deferred or t.name in found)]
    if not tools:
        return {}
    return {"tools": [_write_tool(tool) for tool in tools]} | present(
        tool_choice=_write_tool_choice(request.tool_choice, tools), parallel_tool_calls=request.parallel_tool_calls
    )


def _referenced_tools(request: Request) -> frozenset[str]:
    parts = [part for message in request.messages for part in message.parts]
    inner = [part for result in parts if isinstance(result, ToolResult) for part in result.content]
    return frozenset(part.name for part in (*parts, *inner) if isinstance(part, ToolReference))


def _write_tool(tool: Tool) -> dict[str, Any]:
    body: dict[str, Any] = {"name": tool.name} | present(description=tool.description or None)
    if tool.kind != "custom":
        body |= present(parameters=tool.parameters or None, strict=tool.strict)
        return {"type": "function", "function": body}
    if (grammar := tool.grammar) is not None:
        if grammar.get("type") == "grammar":
            nested = {key: value for key, value in grammar.items() if key != "type"}
            grammar = {"type": "grammar", "grammar": nested}
        body["format"] = grammar
    return {"type": "custom", "custom": body}


def _write_tool_choice(choice: ToolChoice, tools: list[Tool]) -> str | dict[str, Any] | None:
    """Servers reject a choice of a tool that is not in `tools`; it is left out."""
    if choice.mode != "named":
        return None if choice.mode == "auto" else choice.mode
    for tool in tools:
        if tool.name == choice.name:
            kind = "custom" if tool.kind == "custom" else "function"
            return {"type": kind, kind: {"name": tool.name}}
    return None


def _write_reasoning(request: Request) -> dict[str, Any]:
    reasoning = request.reasoning
    body = present(reasoning_effort=reasoning.effort)
    if reasoning.enabled is not None and not (reasoning.effort == "none" and reasoning.enabled is False):
        body["chat_template_kwargs"] = request.chat_template_kwargs | {THINKING_KWARG: reasoning.enabled}
    exclude = None if reasoning.visible is None else not reasoning.visible
    return body | present(reasoning=present(max_tokens=reasoning.budget, exclude=exclude) or None)


def _write_response_format(constraint: Constraint | None) -> dict[str, Any] | None:
    """JSON constraints only: `write_extensions` writes grammars, and `tool_choice` covers the kind `tools`."""
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return None
    if constraint.kind == "json_object":
        return {"type": "json_object"}
    schema: dict[str, Any] = {"name": constraint.name or "response", "schema": Raw(constraint.text.encode())}
    schema |= present(description=constraint.description, strict=constraint.strict)
    return {"type": "json_schema", "json_schema": schema}


# --- replies and streams ----------------------------------------------------------------------------------------------

# The structs of upstream replies: every field is optional, because servers omit what they like.


class UpstreamLogprob(Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[UpstreamLogprob] | None = None

    def read(self) -> TokenLogprob:
        return TokenLogprob(
            self.token,
            MIN_LOGPROB if self.logprob is None else self.logprob,
            bytes(byte & 255 for byte in self.bytes or ()),
            tuple(other.read() for other in self.top_logprobs or ()),
        )


class UpstreamLogprobs(Struct):
    content: list[UpstreamLogprob] | None = None


_STOP_REASONS: dict[str, StopReason] = {
    "length": "max_tokens",
    "repetition": "repetition",  # vLLM's
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def read_reply(body: bytes) -> Reply:
    """A whole reply: a stream of one chunk. An `error` field or an unreadable body raises."""
    return ChatStreamReader().read_whole(body)


def _read_finish(finish: str | None, stop: object, has_calls: bool) -> tuple[StopReason, str | None]:
    """The stop reason and the stop string. Many servers end a turn that has calls with a plain `stop`."""
    reason = _STOP_REASONS.get(finish or "", "end")
    if reason == "end" and isinstance(stop, str):
        return "stop_string", stop
    if reason == "max_tokens" and stop == REPETITION:
        return "repetition", None
    return ("tool_calls" if reason == "end" and has_calls else reason), None


class CalledDelta(Struct):
    name: str | None = None
    arguments: Any = None
    input: str | None = None

    @property
    def text(self) -> str:
        return self.input if self.input is not None else read_arguments(self.arguments)


class ToolCallDelta(Struct):
    index: int | None = None
    id: str | None = None
    function: CalledDelta | None = None
    custom: CalledDelta | None = None
    extra_content: Any = None

    @property
    def signature(self) -> str:
        """Of the reasoning before the call, from Google's endpoint, which rejects a later turn without it."""
        google = self.extra_content.get("google") if isinstance(self.extra_content, dict) else None
        return str(google.get("thought_signature") or "") if isinstance(google, dict) else ""


class ChunkDelta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: CalledDelta | None = None


class ChunkChoice(Struct):
    """A whole reply has a `message` in place of the `delta`."""

    index: int = 0
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    logprobs: UpstreamLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class UpstreamChunk(Struct):
    id: str | None = None
    created: float | None = None
    model: str | None = None
    choices: list[ChunkChoice] | None = None
    usage: OpenAIUsage | None = None
    timings: UpstreamTimings | None = None
    prompt_progress: UpstreamProgress | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: Any = None


_chunk_decoder = msgspec.json.Decoder(UpstreamChunk)
_CONTENT = (b'"content":"', b'"content": "')
_MAX_LEARNED = 4  # chunks per stream; an upstream whose chunks differ in more than their text is not worth more
_LIMITS: tuple[StopReason, ...] = ("max_tokens", "content_filter")


def _only_text(chunk: UpstreamChunk) -> str | None:
    """The text, if the chunk says nothing else."""
    if chunk.usage is not None or chunk.timings is not None or chunk.prompt_progress is not None:
        return None
    if chunk.choices is None or len(chunk.choices) != 1:
        return None
    choice = chunk.choices[0]
    delta = choice.delta
    if choice.index != 0 or choice.logprobs is not None or choice.finish_reason is not None or delta is None:
        return None
    others = delta.refusal or delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.function_call
    return None if others else delta.content


def _around_text(data: bytes, text: str) -> tuple[bytes, bytes] | None:
    """The bytes of this chunk before and behind its text; None if the text is not found there exactly once."""
    written = encode(text)[1:]
    for name in _CONTENT:
        before, found, behind = data.partition(name + written)
        if found and name + written not in behind:
            return before + name, b'"' + behind
    return None


def _between(data: bytes, before: bytes, behind: bytes) -> bytes | None:
    """The text between these bytes if it is as it is written: without escapes and without its end."""
    if not data.startswith(before) or not data.endswith(behind):
        return None
    text = data[len(before) : len(data) - len(behind)]
    return text if len(data) >= len(before) + len(behind) and b'"' not in text and b"\\" not in text else None


class _OpenBlock:
    """A block of the stream. `index` is None while it waits in the queue, and `pieces` hold its text until then."""

    __slots__ = ("call_id", "custom", "index", "kind", "logprobs", "name", "pieces", "signature")

    def __init__(self, kind: BlockKind, call_id: str = "", custom: bool = False) -> None:
        self.kind, self.call_id, self.custom = kind, call_id, custom
        self.name = self.signature = ""
        self.pieces: list[str] = []
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.index: int | None = None

    @property
    def is_call(self) -> bool:
        return self.kind == "tool_call"

    @property
    def is_complete_call(self) -> bool:
        """Whether the arguments are a complete JSON object. Checked on every delta: the common case must be cheap."""
        if self.custom or not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return False
        return is_json_object("".join(self.pieces))


class ChatStreamReader(SseReader):
    """Events have at most one open block, but parallel calls may interleave on the wire. The block at the head of the
    queue is open. A later one waits until the head is complete: text and reasoning are complete when another block
    begins, a call when its arguments are a complete JSON object. The end of the answer closes the rest.

    The chunks of a text mostly differ in nothing but the text. `_around` are the bytes before and behind it in the last
    chunk: in the next one with the same bytes, what is between them is the text, and nothing is decoded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[_OpenBlock] = deque()
        self._calls: dict[int, _OpenBlock] = {}
        self._id: str | None = None  # None until the first chunk
        self._started_blocks = 0
        self._call_count = 0
        self._stop: tuple[StopReason, str | None] | None = None
        self._usage: Usage | None = None
        self._around: tuple[bytes, bytes] | None = None
        self._learned = 0

    def feed(self, data: bytes) -> list[Event]:
        """Text that arrives together is one event."""
        texts: list[bytes] = []
        for event in self._sse.feed(data):
            if self._around is not None and (text := _between(event.data, *self._around)) is not None:
                texts.append(text)
                continue
            if texts:
                self._add_texts(texts)
                texts = []
            self._read(event.data)
        if texts:
            self._add_texts(texts)
        return self._take()

    def _add_texts(self, texts: list[bytes]) -> None:
        try:
            self._add_text("text", b"".join(texts).decode(), ())
        except UnicodeDecodeError as error:
            self._fail(Incomplete(f"the upstream sent a chunk that cannot be read: {error}"))
        except ModelyardError as error:
            self._fail(error)

    def _end(self) -> None:
        if self._stop is not None:
            self._finish()
        else:
            super()._end()

    def _read(self, data: bytes) -> None:
        if self._done:
            return
        try:
            if data == b"[DONE]":
                self._read_done()
            else:
                chunk = _chunk_decoder.decode(data)
                self._read_chunk(chunk)
                self._learn(data, _only_text(chunk) if self._stop is None else None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(Incomplete(f"the upstream sent a chunk that cannot be read: {error}"))
        except ModelyardError as error:
            self._fail(error)

    def _learn(self, data: bytes, text: str | None) -> None:
        """`text` is all that the chunk says. An escape in it does not change what is around it."""
        around = self._around
        if not text:
            self._around = None
        elif around is None or not data.startswith(around[0]) or not data.endswith(around[1]):
            self._learned += 1
            self._around = _around_text(data, text) if self._learned <= _MAX_LEARNED else None

    def _read_chunk(self, chunk: UpstreamChunk) -> None:
        if chunk.error:
            raise read_error_field(chunk.error)
        if self._id is None:
            self._id = (chunk.id or "").removeprefix(ID_PREFIX)
            logprobs = read_upstream_prompt(chunk.prompt_logprobs)
            self._out.append(Started(self._id, chunk.model or "", int(chunk.created or 0), prompt_logprobs=logprobs))
        if chunk.prompt_progress is not None:
            self._out.append(chunk.prompt_progress.event)
        if chunk.timings is not None and self._stop is None and chunk.prompt_progress is None:
            self._out.append(chunk.timings.event)
        for choice in chunk.choices or ():
            if choice.index != 0 or self._stop is not None:
                continue
            if (delta := choice.delta or choice.message) is not None:
                logprobs = ()
                if choice.logprobs is not None:
                    logprobs = tuple(token.read() for token in choice.logprobs.content or ())
                self._read_delta(delta, logprobs)
            if choice.finish_reason is not None:
                self._close_all(choice.finish_reason, choice.stop_reason)
        if chunk.usage is not None:
            self._usage = read_usage(chunk.usage)
        if self._stop is not None and self._usage is not None:
            self._finish()

    def _read_done(self) -> None:
        """[DONE] ends the answer even without a finish_reason, but not before the first chunk."""
        if self._id is None:
            raise Incomplete("the upstream's stream has no answer")
        if self._stop is None:
            self._close_all("stop", None)
        self._finish()

    def _read_delta(self, delta: ChunkDelta, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._has_answer = True
        reasoning = delta.reasoning_content or delta.reasoning
        text = delta.content or delta.refusal or ""
        if isinstance(reasoning, str) and reasoning:
            self._add_text("thinking", reasoning, ())
        elif logprobs and not delta.tool_calls and not text:  # a token that is half a character
            self._add_text("text", "", logprobs)
        if text:
            self._add_text("text", text, logprobs)
        for index, call in enumerate(delta.tool_calls or ()):
            self._read_call(call, index)
        if delta.function_call is not None:
            self._read_call(ToolCallDelta(-1, function=delta.function_call), -1)

    def _read_call(self, delta: ToolCallDelta, position: int) -> None:
        called = delta.function or delta.custom or CalledDelta()
        index = position if delta.index is None else delta.index
        block = self._calls.get(index)
        if block is None or (
            delta.id and called.name and delta.id != block.call_id
        ):  # some servers number every call 0
            if delta.signature:
                self._add_signature(delta.signature)
            call_id = delta.id or f"call_{self._id}_{self._call_count}"
            block = _OpenBlock("tool_call", call_id, delta.custom is not None)
            self._call_count += 1
            self._calls[index] = block
            block.name = called.name or ""
            self._queue.append(block)
            self._advance()
        elif called.name and not block.name:
            block.name = called.name
            self._advance()
        self._extend(block, called.text, ())

    def _add_signature(self, signature: str) -> None:
        if not self._queue or self._queue[-1].kind != "thinking":
            self._queue.append(_OpenBlock("thinking"))
            self._advance()
        self._queue[-1].signature = signature

    def _add_text(self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not self._queue or self._queue[-1].kind != kind:
            self._queue.append(_OpenBlock(kind))
            self._advance()
        self._extend(self._queue[-1], text, logprobs)

    def _extend(self, block: _OpenBlock, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if not text and not logprobs:
            return
        if block.index is None:
            block.pieces.append(text)
            block.logprobs += logprobs
        elif not self._queue or self._queue[0] is not block:
            if text.strip():  # whitespace after a complete JSON object changes nothing
                raise Incomplete("the upstream continued a tool call whose arguments were already complete")
        else:
            self._out.append(BlockDelta(block.index, text, logprobs))
            if block.is_call:
                block.pieces.append(text)
                self._advance()

    def _advance(self) -> None:
        """Close complete blocks at the head of the queue and open the next. A call opens once its name is known."""
        while self._queue:
            head = self._queue[0]
            if head.index is None and not (head.is_call and not head.name):
                self._open(head)
            if len(self._queue) == 1 or head.index is None or (head.is_call and not head.is_complete_call):
                return
            self._close_head(complete=True)

    def _open(self, block: _OpenBlock) -> int:
        block.index = index = self._started_blocks
        self._started_blocks += 1
        self._out.append(BlockStart(index, block.kind, block.call_id, block.name, custom=block.custom))
        if block.pieces or block.logprobs:
            self._out.append(BlockDelta(index, "".join(block.pieces), block.logprobs))
        return index

    def _close_head(self, *, complete: bool) -> None:
        block = self._queue[0]
        index = self._open(block) if block.index is None else block.index
        self._queue.popleft()
        self._out.append(BlockEnd(index, block.signature, complete=complete))

    def _close_all(self, finish: str, stop: object) -> None:
        """The end of the answer. After a limit, a streamed call is complete only if its arguments are."""
        if finish == "error":
            raise Incomplete("the upstream ended its answer with an error")
        self._stop = _read_finish(finish, stop, self._call_count > 0)
        limited = self._stop[0] in _LIMITS and not self._is_whole
        while self._queue:
            block = self._queue[0]
            is_cut = limited and block.is_call and not block.is_complete_call
            self._close_head(complete=not is_cut or (block.custom and len(self._queue) > 1))

    def _finish(self) -> None:
        if not self._done and self._stop is not None:
            self._done = True
            self._out.append(Finished(self._stop[0], self._usage or Usage(), self._stop[1]))

    def _fail(self, error: ModelyardError) -> None:
        self._around = None
        super()._fail(error)
