"""Writes Messages replies, whole and as a stream in the order that clients require; token counts, lists and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Raw

from modelyard.core.errors import InvalidRequest
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
    Usage,
)
from modelyard.core.protocol import ModelCard
from modelyard.core.request import TOOL_SEARCH, Compaction, Request, Text, Thinking, ToolCall, ToolResult
from modelyard.core.store import FileRecord
from modelyard.protocols.anthropic_messages import mcp
from modelyard.protocols.anthropic_messages.client_tools import TOOLSETS
from modelyard.protocols.anthropic_messages.errors import error_body
from modelyard.protocols.anthropic_messages.request import UNPARSED
from modelyard.protocols.common.json import JsonObject, dumps, encode, is_json_object
from modelyard.protocols.common.media_parts import mime_type
from modelyard.protocols.common.openai_fields import PageQuery, read_page_query
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.sse import frame

STOP_REASONS: Mapping[StopReason, str] = {
    "end": "end_turn",
    "tool_calls": "tool_use",
    "stop_string": "stop_sequence",
    "repetition": "max_tokens",  # before the next: a client reads this name as that
    "max_tokens": "max_tokens",
    "window": "model_context_window_exceeded",
    "content_filter": "refusal",
    "compaction": "compaction",
}
ID_PREFIX = "msg_"


def write_reply(replies: list[Reply], request: Request) -> bytes:
    """This protocol has one choice: the first reply.

    Incomplete calls are left out, because the client would run them. A reply without blocks is one empty text block.
    """
    reply = replies[0]
    hidden = hides_thinking(request)
    calls = [block.part for block in reply.blocks if isinstance(block.part, ToolCall)]
    searches = [call.id for call in calls if call.server == TOOL_SEARCH]
    content = [_write_output(block.part, hidden, searches) for block in reply.blocks if block.complete]
    message = write_message(reply.started, content or [{"type": "text", "text": ""}])
    message["stop_reason"] = STOP_REASONS[reply.finished.reason]
    message["stop_sequence"] = reply.finished.stop_string
    message["usage"] = _final_usage(reply.finished)
    if request.context is not None:
        message["context_management"] = {"applied_edits": request.applied_edits}
    return encode(message)


def _final_usage(finished: Finished) -> dict[str, Any]:
    """A summary that came first is an iteration of its own."""
    usage = write_usage(finished.usage)
    if finished.compaction is None:
        return usage
    summary = write_usage(finished.compaction) | {"type": "compaction"}
    return usage | {"iterations": [summary, write_usage(finished.usage) | {"type": "message"}]}


def write_message(started: Started, content: list[dict[str, Any]]) -> dict[str, Any]:
    """The message object before its end; the stream begins with it."""
    return {
        "id": ID_PREFIX + started.id,
        "type": "message",
        "role": "assistant",
        "model": started.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": write_usage(Usage(started.usage.prompt, started.usage.cached)),
    }


def hides_thinking(request: Request) -> bool:
    """The client wants thinking blocks without text; the text travels in the signature only."""
    return request.reasoning.summary == "omitted"


def _write_output(
    part: Text | Thinking | ToolCall | ToolResult, hidden: bool, searches: Sequence[str]
) -> dict[str, Any]:
    if isinstance(part, Thinking) and not part.redacted:
        text = "" if hidden else part.text
        return {"type": "thinking", "thinking": text, "signature": part.signature or pack_reasoning(part.text)}
    if isinstance(part, ToolResult):
        return mcp.result_block(part, searches)
    if isinstance(part, Compaction):
        return _compaction_block(part.text)
    if isinstance(part, ToolCall) and part.server is not None:
        return mcp.use_block(part.id, part.name, part.server, _write_input(part))
    return write_block(part)


def _compaction_block(summary: str | None) -> dict[str, Any]:
    return {"type": "compaction", "content": summary, "encrypted_content": None}


def write_block(part: Text | Thinking | ToolCall) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, ToolCall):
        return _use_block(part.id, part.name, part.namespace, _write_input(part))
    if part.redacted:
        return {"type": "redacted_thinking", "data": part.signature}
    return {"type": "thinking", "thinking": part.text, "signature": part.signature}


def _use_block(id: str, name: str, toolset: str | None, input: Any) -> dict[str, Any]:
    """Only Anthropic's own toolsets are named: other protocols have namespaces of their clients."""
    block = {"type": "tool_use", "id": id, "name": name, "input": input}
    return block | {"toolset_name": toolset, "caller": {"type": "direct"}} if toolset in TOOLSETS else block


def _write_input(call: ToolCall) -> Any:
    """The arguments as a JSON object, unchanged where they are one: re-serialising would break the KV prefix."""
    if call.custom:
        return {"input": call.arguments}
    text = call.arguments.strip()
    if is_json_object(text):
        return Raw(text.encode())
    return {UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}} if text else {}


def write_usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` counts only uncached tokens: clients add the three input counts."""
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


# --- token counts and models ----------------------------------------------------------------------------------------

_MAX_PAGE = 1000


def write_count(tokens: int) -> bytes:
    return encode({"input_tokens": tokens})


def write_model(card: ModelCard) -> bytes:
    return encode(_model(card))


def write_models(
    models: Sequence[ModelCard], *, limit: int | None = None, before_id: str | None = None, after_id: str | None = None
) -> bytes:
    """One page. Without a limit it holds all models: the list is short, and not every client turns pages."""
    if limit is not None and not 1 <= limit <= _MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {_MAX_PAGE}, got {limit}", param="limit")
    start = 0 if after_id is None else _index(models, after_id, "after_id") + 1
    end = len(models) if before_id is None else _index(models, before_id, "before_id")
    found, limit = models[start:end], limit or len(models)
    page = found[-limit:] if before_id is not None and after_id is None else found[:limit]
    return encode(
        {
            "data": [_model(card) for card in page],
            "has_more": len(page) < len(found),
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
    )


def _index(models: Sequence[ModelCard], id: str, param: str) -> int:
    for index, card in enumerate(models):
        if card.id == id:
            return index
    raise InvalidRequest(f"{param}: there is no model {id!r}", param=param)


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.display_name or card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.context,
        "max_tokens": card.max_output or card.context,
        "lifecycle": "active",
        "state": card.state,
        "aliases": card.aliases,
        "modalities": card.modalities,
    }


# --- the stream -------------------------------------------------------------------------------------------------------

_PING = frame(b'{"type":"ping"}', "ping")
_MESSAGE_STOP = frame(b'{"type":"message_stop"}', "message_stop")
_DELTA_END = b"}}\n\n"
# block kind → (type of its deltas, the field that holds their text)
_DELTA_TYPES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
    "compaction": ("compaction_delta", "content"),
}


class MessagesStreamWriter:
    """The stream of one request. It keeps the text of a block only where the end of the block needs it."""

    def __init__(self, request: Request, trace: str) -> None:
        self._trace, self._request = trace, request
        self._hides_thinking = hides_thinking(request)
        self._blocks = 0
        self._block = BlockStart(0, "text")
        self._delta_start = b""
        self._text: list[str] | None = None
        self._searches: list[str] = []  # calls that searched for tools
        self._hidden = False

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if isinstance(event, BlockDelta):
            return self._write_delta(event.text)
        if isinstance(event, BlockStart):
            return self._start_block(event)
        if isinstance(event, BlockEnd):
            return self._end_block(event)
        if isinstance(event, Started):
            return _frame({"type": "message_start", "message": write_message(event, [])}) + _PING
        if isinstance(event, Finished):
            return self._finish(event)
        return frame(error_body(event.error, self._trace), "error") if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return _PING

    def end(self) -> bytes:
        return b""  # message_stop or error has ended the stream

    def _start_block(self, event: BlockStart) -> bytes:
        if event.kind == "tool_result":
            return b""  # it is sent whole at its end
        self._block = event
        self._blocks += 1
        self._delta_start = _delta_start(event.index, *_DELTA_TYPES[event.kind])
        self._text = None if event.kind == "text" else []
        self._hidden = event.kind == "thinking" and self._hides_thinking
        if event.server == TOOL_SEARCH:
            self._searches.append(event.call_id)
        block = _use_block(event.call_id, event.name, event.namespace, {})
        if event.kind == "text":
            block = {"type": "text", "text": ""}
        elif event.kind == "compaction":
            block = _compaction_block(None)
        elif event.kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif event.server is not None:
            block = mcp.use_block(event.call_id, event.name, event.server, {})
        start = _frame({"type": "content_block_start", "index": event.index, "content_block": block})
        return start + self._json_delta('{"input":"') if event.custom else start

    def _write_delta(self, text: str) -> bytes:
        if not text:
            return b""
        if self._text is not None:
            self._text.append(text)
            if self._hidden:
                return b""
            if self._block.custom:
                text = dumps(text)[1:-1]
        return self._delta_start + encode(text) + _DELTA_END

    def _json_delta(self, text: str) -> bytes:
        return self._delta_start + encode(text) + _DELTA_END

    def _end_block(self, event: BlockEnd) -> bytes:
        last = b""
        if event.result is not None:
            block = mcp.result_block(event.result, self._searches)
            last = _frame({"type": "content_block_start", "index": event.index, "content_block": block})
        elif self._block.kind == "thinking":
            signature = event.signature or pack_reasoning("".join(self._text or ()))
            last = _delta_start(event.index, "signature_delta", "signature") + encode(signature) + _DELTA_END
        elif self._block.kind == "tool_call":
            last = self._end_call(event.complete)
        return last + _frame({"type": "content_block_stop", "index": event.index})

    def _end_call(self, complete: bool) -> bytes:
        """The arguments of an incomplete call must not parse: a client would run them."""
        if complete:
            return self._json_delta('"}') if self._block.custom else b""
        text = "".join(self._text or ()).strip()
        parses = not self._block.custom and (not text or is_json_object(text))
        return self._json_delta("{") if parses else b""

    def _finish(self, event: Finished) -> bytes:
        """A reply without blocks gets one empty text block."""
        empty = b"" if self._blocks else self._start_block(BlockStart(0, "text")) + self._end_block(BlockEnd(0))
        delta = {"stop_reason": STOP_REASONS[event.reason], "stop_sequence": event.stop_string}
        body = {"type": "message_delta", "delta": delta, "usage": _final_usage(event)}
        if self._request.context is not None:
            body["context_management"] = {"applied_edits": self._request.applied_edits}
        end = _frame(body)
        return empty + end + _MESSAGE_STOP


def _frame(body: dict[str, Any]) -> bytes:
    return frame(encode(body), body["type"])


def _delta_start(index: int, kind: str, field: str) -> bytes:
    """Everything before the text of a delta, encoded once per block instead of once per token."""
    start = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"{kind}","{field}":'
    return b"event: content_block_delta\ndata: " + start.encode()


# --- lists and files --------------------------------------------------------------------------------------------------

_CURSOR = "page_"


def read_query(params: Mapping[str, str]) -> PageQuery:
    """The newest first. `before_id` asks for the page that ends before an object: it is read from its end. `page` is a
    `next_page` of `write_list`."""
    after, before = params.get("after_id", ""), params.get("before_id", "")
    after = params["page"].removeprefix(_CURSOR) if params.get("page") else after
    limits = {"limit": params["limit"]} if "limit" in params else {}
    limit = read_page_query(limits, most=1000).limit
    return PageQuery(before, limit, newest_first=False) if before else PageQuery(after, limit, newest_first=True)


def write_list(objects: Sequence[JsonObject], has_more: bool) -> bytes:
    """Some lists of the SDK go on after `last_id`, others with `next_page`."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    following = _CURSOR + last if has_more and last else None
    return encode({"data": objects, "has_more": has_more, "first_id": first, "last_id": last, "next_page": following})


def write_time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def write_file(file: FileRecord) -> JsonObject:
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": mime_type(file),
        "size_bytes": file.bytes,
        "created_at": write_time(file.created),
        "downloadable": True,
    }


def write_deleted_file(id: str) -> JsonObject:
    return {"id": id, "type": "file_deleted"}
