"""Writes the `response` object and its output items, for the stream, the whole reply and stored responses alike.

The events of a stream:

    response.created · response.in_progress · (output_item.added … output_item.done)* · completed | incomplete | failed

The response's id comes from the trace, so that a keep-alive before `Started` already has the final id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import Raw

from modelyard.core.errors import Cancelled
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
    TokenLogprob,
    ToolList,
    Usage,
)
from modelyard.core.request import (
    TOOL_SEARCH,
    Compaction,
    Constraint,
    Message,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.response_metrics import write_metrics
from modelyard.protocols.common.sse import delta_start, frame
from modelyard.protocols.openai_responses import client_tools, mcp
from modelyard.protocols.openai_responses.errors import write_failure

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_EMPTY_LIST = Raw(b"[]")
_NOT_STORED = {
    "code": "not_stored",
    "message": "the response could not be stored: previous_response_id cannot continue it, send the conversation again",
}
# Fields with the same value in nearly every response: there is one tier and no truncation. Fields of OpenAI's own
# services are left out: its specification allows null in none of them.
_CONSTANT = {"background": False, "service_tier": "default", "truncation": "disabled"} | dict.fromkeys(
    ("conversation", "moderation", "prompt")
)
_CONSTANT_FIELDS = b"," + encode(_CONSTANT)[1:]
_CUT_REASONS: Mapping[StopReason, str] = {
    "max_tokens": "max_output_tokens",
    "window": "max_output_tokens",
    "repetition": "max_output_tokens",
    "content_filter": "content_filter",
}
_EMPTY_REPLY = (Block(Text("")),)  # a reply without blocks is one empty message, as in the stream


def write_reply(replies: list[Reply], request: Request) -> bytes:
    """This protocol has one choice: the first reply."""
    reply = replies[0]
    key, blocks = reply.started.id, () if request.warm_up else reply.blocks or _EMPTY_REPLY
    is_cut = cut_reason(reply.finished, request) is not None
    output = write_output(reply.started.tool_lists, blocks, key, request, is_cut)
    return bytes(ResponseObject(request, key).finished(reply.started, reply.finished, output)[1])


class ResponseObject:
    """The `response` object: the request's fields echoed, plus the state so far. `key` is its id without prefix."""

    def __init__(self, request: Request, key: str) -> None:
        self._id, self._request = f"resp_{key}", request
        self._stored = request.store is not False
        constant = _CONSTANT_FIELDS
        if request.background or request.conversation is not None:
            conversation = None if request.conversation is None else {"id": request.conversation}
            constant = b"," + encode(_CONSTANT | {"background": request.background, "conversation": conversation})[1:]
        self._echo = b"," + encode(_echo(request))[1:-1] + constant

    def at(self, status: Status, started: Started, **state: Any) -> Raw:
        """The object now; `state` has output, usage, error, incomplete_details, completed_at, output_text, metrics and
        what replaces `store`."""
        fields = {
            "id": self._id,
            "object": "response",
            "created_at": started.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": started.model,
            "output": _EMPTY_LIST,
            "usage": None,
            "store": self._stored,
            **state,
        }
        return Raw(encode(fields)[:-1] + self._echo)

    def finished(self, started: Started, finished: Finished, output: list[JsonObject]) -> tuple[Status, Raw]:
        """The status and the object. `output_text` is the text of all messages in one string, as the SDKs have it."""
        reason = cut_reason(finished, self._request)
        text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
        storing = {"store": False, "store_error": _NOT_STORED} if finished.storing_failed else {}
        status: Status = "incomplete" if reason else "completed"
        return status, self.at(
            status,
            started,
            completed_at=None if reason else int(started.created + (finished.timings.total or 0)),
            output=output,
            usage=write_usage(finished.usage),
            incomplete_details={"reason": reason} if reason else None,
            output_text=text,
            metrics=write_metrics(finished),
            **storing,
        )


def cut_reason(finished: Finished, request: Request) -> str | None:
    """Why the response is incomplete, and with it the text or reasoning that it ends with."""
    return None if request.warm_up else _CUT_REASONS.get(finished.reason)


def _echo(request: Request) -> JsonObject:
    """The fields of the request. A sampling field that is set nowhere has the default of the engines."""
    sampling, reasoning, repeated = request.sampling, request.reasoning, request.repeated or {}
    written = write_text_format(request.constraint)
    if "strict" in written:  # Open Responses requires all fields, OpenAI's specification allows no null
        written |= {"strict": bool(written["strict"]), "description": written["description"] or ""}
    text_format: JsonObject = {"format": written}
    if verbosity := repeated.get("verbosity"):
        text_format["verbosity"] = verbosity
    user = {} if request.user is None else {"user": request.user}  # it may be absent, not null
    return {
        "instructions": split_instructions(request)[0],
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": repeated.get("max_tool_calls"),
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "prompt_cache_key": repeated.get("prompt_cache_key"),
        "prompt_cache_retention": repeated.get("prompt_cache_retention"),
        "safety_identifier": repeated.get("safety_identifier"),
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "text": text_format,
        "tool_choice": write_tool_choice(request.tool_choice, request.tools),
        "tools": write_tools(mcp.public_tools(request.tools)),
        "top_logprobs": request.logprobs or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        **user,
    }


def split_instructions(request: Request) -> tuple[str | None, tuple[Message, ...]]:
    """The text that came as `instructions`, and the messages without it."""
    if request.instructions and request.messages:
        match request.messages[0]:
            case Message(role="system", parts=(Text(text=text),)):
                return text, request.messages[1:]
    return None, request.messages


def write_text_format(constraint: Constraint | None) -> JsonObject:
    """`text.format`. Upstreams require a name, so a schema without one gets one."""
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return {"type": "text"}
    if constraint.kind == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "name": constraint.name or "answer",
        "description": constraint.description,
        "schema": msgspec.json.decode(constraint.text),
        "strict": constraint.strict,
    }


def write_tools(tools: tuple[Tool, ...]) -> list[JsonObject]:
    """Neighbouring tools of one namespace share its entry."""
    out: list[JsonObject] = []
    for namespace, group in groupby(tools, key=lambda tool: tool.namespace):
        written = [_write_tool(tool) for tool in group]
        if namespace is None:
            out += written
        else:
            out.append({"type": "namespace", "name": namespace, "description": "", "tools": written})
    return out


def _write_tool(tool: Tool) -> JsonObject:
    if tool.vendor is not None and tool.type in client_tools.TOOLS:
        return tool.vendor
    if tool.kind == "server":
        return {"type": tool.type or tool.name} | tool.parameters
    body: JsonObject = {"type": tool.kind, "name": tool.name, "description": tool.description}
    if tool.kind == "custom":
        body["format"] = {"type": "text"} if tool.grammar is None else {"type": "grammar"} | tool.grammar
    else:
        body |= {"parameters": tool.parameters, "strict": tool.strict}
    return body | {"defer_loading": True} if tool.deferred else body


def write_tool_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> str | JsonObject:
    if choice.server is not None:
        named = {"type": "mcp", "server_label": choice.server}
        return named if choice.name is None else named | {"name": choice.name}
    if choice.mode != "named":
        return choice.mode
    if (kind := client_tools.call_type(tools, choice.name or "")) is not None:
        return {"type": kind}
    custom = any(tool.kind == "custom" and tool.name == choice.name for tool in tools)
    return {"type": "custom" if custom else "function", "name": choice.name}


def write_usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


# --- output items ---------------------------------------------------------------------------------------------------


def item_id(key: str, index: int, kind: BlockKind, call: ToolCall | None = None) -> str:
    """Built from the response's key and the item's index, so that a stream and the whole reply agree."""
    prefix = {"text": "msg", "thinking": "rs", "compaction": "cmp"}.get(kind, "fc")
    if call is not None and call.vendor_type is not None:
        prefix = client_tools.prefix(call.vendor_type)
    elif call is not None and call.custom:
        prefix = "ctc"
    return f"{prefix}_{key}_{index}"


def write_output(
    lists: Sequence[ToolList], blocks: Sequence[Block], key: str, request: Request, is_cut: bool
) -> list[JsonObject]:
    """`is_cut`: a limit ended the last block. A call says itself whether it is complete."""
    output = [mcp.list_item(listed, key, index) for index, listed in enumerate(lists)]
    calls: dict[str, JsonObject] = {}  # items of MCP calls by the ids of the calls
    place = 0  # of a call among those of one turn
    for at, block in enumerate(blocks, 1):
        part = block.part
        if isinstance(part, ToolResult):
            if (item := calls.get(part.call_id)) is not None:
                mcp.add_result(item, part)
            else:
                output.append(search_item(part, key, len(output), request))
        elif isinstance(part, ToolCall) and part.server not in (None, TOOL_SEARCH):
            status = "calling" if block.complete else "incomplete"
            item = mcp.mcp_item(part, place, status, asks=block.asks, approved=block.approved)
            calls[part.id] = item
            output.append(item)
        else:
            output.append(write_item(block, key, len(output), request, is_cut and at == len(blocks)))
        place = place + 1 if isinstance(part, ToolCall) else 0
    return output


def search_item(result: ToolResult, key: str, index: int, request: Request) -> JsonObject:
    """The tools that a search has found, as the request defines them."""
    names = {part.name for part in result.content if isinstance(part, ToolReference)}
    found = write_tools(tuple(tool for tool in request.tools if tool.name in names and tool.deferred))
    return {"id": f"tso_{key}_{index}"} | client_tools.search_output(result.call_id, found)


def write_item(block: Block, key: str, index: int, request: Request, is_cut: bool = False) -> JsonObject:
    part, status = block.part, _status(not is_cut)
    if isinstance(part, ToolResult):
        raise ValueError("a result is a part of its call's item")
    if isinstance(part, Compaction):
        return _compaction_item(item_id(key, index, "compaction"), pack_reasoning(part.text))
    if isinstance(part, Text):
        return message_item(item_id(key, index, "text"), status, [text_part(part.text, block.logprobs)])
    if isinstance(part, ToolCall):
        call = client_tools.typed(part, request.tools)
        return call_item(item_id(key, index, "tool_call", call), _status(block.complete), call)
    item: JsonObject = {
        "id": item_id(key, index, "thinking"),
        "type": "reasoning",
        "status": status,
        "summary": [{"type": "summary_text", "text": part.text}] if wants_summary(request) else [],
        "content": [{"type": "reasoning_text", "text": part.text}],
    }
    if request.encrypted_reasoning:  # an upstream's own signature must return to that upstream unchanged
        item["encrypted_content"] = part.signature or pack_reasoning(part.text)
    return item


def _compaction_item(id: str, content: str) -> JsonObject:
    return {"id": id, "type": "compaction", "encrypted_content": content}


def _status(complete: bool) -> Status:
    return "completed" if complete else "incomplete"


def message_item(id: str, status: Status, content: list[JsonObject]) -> JsonObject:
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def call_item(id: str, status: Status, call: ToolCall) -> JsonObject:
    if call.vendor_type is not None:
        return {"id": id} | client_tools.write_call(call.vendor_type, status, call)
    kind, field = ("custom_tool_call", "input") if call.custom else ("function_call", "arguments")
    item: JsonObject = {"id": id, "type": kind, "status": status, "call_id": call.id, "name": call.name}
    if call.namespace is not None:
        item["namespace"] = call.namespace
    item[field] = call.arguments
    return item


def text_part(text: str, logprobs: Iterable[TokenLogprob] = ()) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": write_logprobs(logprobs)}


def write_logprobs(tokens: Iterable[TokenLogprob]) -> list[JsonObject]:
    return [_write_logprob(t) | {"top_logprobs": [_write_logprob(other) for other in t.top]} for t in tokens]


def _write_logprob(token: TokenLogprob) -> JsonObject:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


def wants_summary(request: Request) -> bool:
    return request.reasoning.summary not in (None, "none")


NamedEvent = tuple[str, JsonObject]  # an event's type and its fields


# --- the stream -------------------------------------------------------------------------------------------------------


class ResponsesStreamWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._key = request, trace
        self._response = ResponseObject(request, trace)
        self._started = Started(trace, request.model, 0)
        self._is_created = False
        self._item: _ItemWriter | mcp.McpCallWriter | None = None
        self._ended: BlockEnd | None = None  # of the text or reasoning, until it is known whether a limit cut it off
        self._calls: dict[str, mcp.McpCallWriter] = {}  # of MCP servers' tools; their results come later
        self._place = 0  # of a call among those of one turn
        self._output: list[JsonObject] = []
        self._sequence_number = 0

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if isinstance(event, BlockDelta):
            return self._write_delta(event)
        if self._request.warm_up and isinstance(event, BlockStart | BlockEnd):
            return b""
        if isinstance(event, BlockStart):
            return self._end_held(False) + self._start_item(event)
        if isinstance(event, BlockEnd):
            return self._end_item(event)
        if isinstance(event, Started):
            self._started = event
            return self.keepalive() + self._write_lists()
        if isinstance(event, Finished):
            return self._finish(event)
        return self._fail(event) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        """A repeated `response.in_progress`: the idle timers of clients ignore comments."""
        return self._created() + self._frame("response.in_progress", {"response": self._in_progress()})

    def end(self) -> bytes:
        """OpenAI's streams have no `[DONE]`, and its clients expect none."""
        return b""

    def queued(self, created: int) -> bytes:
        """The first events of a background response, which waits without its client."""
        self._started = Started(self._key, self._request.model, created)
        self._is_created = True
        response = {"response": self._response.at("queued", self._started)}
        return self._frame("response.created", response) + self._frame("response.queued", response)

    def _frame(self, name: str, fields: JsonObject) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return frame(encode({"type": name, "sequence_number": number} | fields), name)

    def _in_progress(self) -> Raw:
        return self._response.at("in_progress", self._started)

    def _created(self) -> bytes:
        if self._is_created:
            return b""
        self._is_created = True
        return self._frame("response.created", {"response": self._in_progress()})

    def _finish(self, finished: Finished) -> bytes:
        """A reply without items gets one empty message."""
        empty = b""
        if not (self._output or self._ended or self._request.warm_up):
            empty = self._start_item(BlockStart(0, "text")) + self._end_item(BlockEnd(0))
        last = self._end_held(cut_reason(finished, self._request) is not None)
        status, response = self._response.finished(self._started, finished, self._output)
        return empty + last + self._frame(f"response.{status}", {"response": response})

    def _fail(self, failed: Failed) -> bytes:
        begun = self._end_held(False) + self._created()
        if self._request.background and isinstance(failed.error, Cancelled):
            response = self._response.at("cancelled", self._started, output=self._output)
            return begun + self._frame("response.incomplete", {"response": response})
        error = write_failure(failed.error, self._request)
        response = self._response.at("failed", self._started, output=self._output, error=error)
        return begun + self._frame("response.failed", {"response": response})

    # --- output items

    def _start_item(self, start: BlockStart) -> bytes:
        index, place = len(self._output), self._place
        self._place = place + 1 if start.kind == "tool_call" else 0
        if start.kind == "tool_result":
            return b""
        if start.server in (None, TOOL_SEARCH):
            self._item = _ItemWriter(start, self._key, index, self._request)
        else:
            self._item = self._calls[start.call_id] = mcp.McpCallWriter(start, index, place)
        return self._frames(self._item.start_events())

    def _frames(self, events: Iterable[NamedEvent]) -> bytes:
        return b"".join([self._frame(name, fields) for name, fields in events])

    def _write_lists(self) -> bytes:
        written = b""
        for listed in self._started.tool_lists:
            item = mcp.list_item(listed, self._key, len(self._output))
            written += self._frames(mcp.list_events(item, len(self._output)))
            self._output.append(item)
        return written

    def _write_delta(self, delta: BlockDelta) -> bytes:
        """The hot path: everything but the number and the text was encoded when the item began."""
        item = self._item
        if item is None or not (delta.text or delta.logprobs):
            return b""
        text, end = encode(delta.text), item.add(delta)
        frames = []
        for start in item.delta_starts:
            frames.append(b'%b%d,"delta":%b%b}\n\n' % (start, self._sequence_number, text, end))
            self._sequence_number += 1
        return b"".join(frames)

    def _end_item(self, end: BlockEnd) -> bytes:
        if end.result is not None:
            return self._end_call(end.result)
        writer, self._item = self._item, None
        if writer is None:
            return b""
        if isinstance(writer, mcp.McpCallWriter):
            written = self._frames(writer.end(end))
            self._output.append(writer.item)
            return written
        if not writer.is_call:
            self._item, self._ended = writer, end
            return b""
        return self._close(writer, end)

    def _end_held(self, is_cut: bool) -> bytes:
        """End the text or reasoning that waits for the event after it."""
        writer, end = self._item, self._ended
        if end is None or not isinstance(writer, _ItemWriter):
            return b""
        self._item = self._ended = None
        return self._close(writer, end, is_cut)

    def _close(self, writer: _ItemWriter, end: BlockEnd, is_cut: bool = False) -> bytes:
        item, events = writer.end(end, is_cut)
        self._output.append(item)
        return self._frames(events)

    def _end_call(self, result: ToolResult) -> bytes:
        call = self._calls.pop(result.call_id, None)
        if call is not None:
            return self._frames(call.finish(result))
        item = search_item(result, self._key, index := len(self._output), self._request)
        self._output.append(item)
        added = {"output_index": index, "item": item}
        return self._frame("response.output_item.added", added) + self._frame("response.output_item.done", added)


class _ItemWriter:
    """One block as the output item at `index`: the events that start and end it, and the start of its deltas."""

    def __init__(self, start: BlockStart, key: str, index: int, request: Request) -> None:
        self._start = start
        self._key, self._index, self._request = key, index, request
        self.is_call = start.kind == "tool_call"
        self._type = client_tools.call_type(request.tools, start.name) if self.is_call else None
        self._id = item_id(key, index, start.kind, self._call(""))
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._has_summary = start.kind == "thinking" and wants_summary(request)
        self._arguments = "custom_tool_call_input" if start.custom else "function_call_arguments"
        self.delta_starts = tuple(delta_start(name, fields) for name, fields in self._delta_events())

    def _position(self, *counters: str) -> JsonObject:
        return {"item_id": self._id, "output_index": self._index} | dict.fromkeys(counters, 0)

    def _call(self, text: str) -> ToolCall:
        start = self._start
        call = ToolCall(start.call_id, start.name, text, start.namespace, start.custom, vendor_type=self._type)
        return msgspec.structs.replace(call, server=start.server)

    def start_events(self) -> Iterator[NamedEvent]:
        if self._start.kind == "text":
            item, part = message_item(self._id, "in_progress", []), text_part("")
        elif self._start.kind == "thinking":
            item = {"id": self._id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        elif self._start.kind == "compaction":
            item, part = _compaction_item(self._id, ""), {}
        else:
            item, part = call_item(self._id, "in_progress", self._call("")), {}
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        if self._start.kind == "compaction":
            yield "response.compaction.compacting", self._position()
        if part:
            yield "response.content_part.added", self._position("content_index") | {"part": part}
        if self._has_summary:
            part = {"type": "summary_text", "text": ""}
            yield "response.reasoning_summary_part.added", self._position("summary_index") | {"part": part}

    def _delta_events(self) -> Iterator[NamedEvent]:
        if self._start.kind == "text":
            yield "response.output_text.delta", self._position("content_index")
        elif self._start.kind == "thinking":
            yield "response.reasoning_text.delta", self._position("content_index")
        elif self._type is None and self.is_call:  # the fields of other calls are not their arguments
            yield f"response.{self._arguments}.delta", self._position()
        if self._has_summary:
            yield "response.reasoning_summary_text.delta", self._position("summary_index")

    def add(self, delta: BlockDelta) -> bytes:
        """Record the delta. Returns the JSON fields after its text."""
        self._text.append(delta.text)
        if self._start.kind != "text":
            return b""
        if not delta.logprobs:
            return b',"logprobs":[]'
        self._logprobs.extend(delta.logprobs)
        return b',"logprobs":' + encode(write_logprobs(delta.logprobs))

    def end(self, end: BlockEnd, is_cut: bool) -> tuple[JsonObject, Iterator[NamedEvent]]:
        """The finished item, and the events that end it."""
        text = "".join(self._text)
        if self._start.kind == "text":
            block = Block(Text(text), tuple(self._logprobs))
        elif self._start.kind == "thinking":
            block = Block(Thinking(text, end.signature))
        elif self._start.kind == "compaction":
            block = Block(Compaction(text))
        else:
            block = Block(self._call(text), complete=end.complete)
        item = write_item(block, self._key, self._index, self._request, is_cut)
        return item, self._end_events(text, end.complete, item)

    def _end_events(self, text: str, complete: bool, item: JsonObject) -> Iterator[NamedEvent]:
        position = self._position("content_index")
        if self._start.kind == "text":
            logprobs = item["content"][0]["logprobs"]
            yield "response.output_text.done", position | {"text": text, "logprobs": logprobs}
        elif self._start.kind == "thinking":
            yield "response.reasoning_text.done", position | {"text": text}
        elif not self.is_call:
            yield "response.output_item.done", {"output_index": self._index, "item": item}
            return
        elif self._type is not None:
            if not complete:
                return
            if self._type == "shell":
                yield from client_tools.command_events(item, self._index)
        elif complete:
            done = {"input": text} if self._start.custom else {"name": self._start.name, "arguments": text}
            yield f"response.{self._arguments}.done", self._position() | done
        elif self._start.custom:
            return  # clients run a custom call that is «done» whatever its status, and cut free text looks complete
        if self._start.kind != "tool_call":
            yield "response.content_part.done", position | {"part": item["content"][0]}
        if self._has_summary:
            position = self._position("summary_index")
            yield "response.reasoning_summary_text.done", position | {"text": text}
            yield "response.reasoning_summary_part.done", position | {"part": item["summary"][0]}
        yield "response.output_item.done", {"output_index": self._index, "item": item}
