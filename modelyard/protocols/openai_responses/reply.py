"""Writes the `response` object and its output items, for the stream, the whole reply and stored responses alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import Raw

from modelyard.core.events import Block, BlockKind, Finished, Reply, Started, StopReason, TokenLogprob, ToolList, Usage
from modelyard.core.request import Constraint, Message, Request, Text, Tool, ToolCall, ToolChoice, ToolResult
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.response_metrics import write_metrics
from modelyard.protocols.openai_responses import mcp

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_EMPTY_LIST = Raw(b"[]")
_NOT_STORED = {
    "code": "not_stored",
    "message": "the response could not be stored: previous_response_id cannot continue it, send the conversation again",
}
# Fields with the same value in nearly every response: there is one tier, no truncation and nothing of OpenAI's own
# services.
_CONSTANT = (
    {"background": False, "service_tier": "default", "truncation": "disabled"}
    | dict.fromkeys(("access_programs", "conversation", "image", "moderation", "prompt"))
    | dict.fromkeys(("prompt_cache_diagnostics", "prompt_cache_options", "tool_usage"))
)
_CONSTANT_FIELDS = b"," + encode(_CONSTANT)[1:]
_CUT_REASONS: Mapping[StopReason, str] = {
    "max_tokens": "max_output_tokens",
    "window": "max_output_tokens",
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
    text_format: JsonObject = {
        "format": written | {"strict": bool(written["strict"])} if "strict" in written else written
    }
    if verbosity := repeated.get("verbosity"):
        text_format["verbosity"] = verbosity
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
        "user": request.user,
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


def item_id(key: str, index: int, kind: BlockKind, custom: bool = False) -> str:
    """Built from the response's key and the item's index, so that a stream and the whole reply agree."""
    prefix = {"text": "msg", "thinking": "rs"}.get(kind, "ctc" if custom else "fc")
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
        elif isinstance(part, ToolCall) and part.server is not None:
            status = "calling" if block.complete else "incomplete"
            item = mcp.mcp_item(part, place, status, asks=block.asks, approved=block.approved)
            calls[part.id] = item
            output.append(item)
        else:
            output.append(write_item(block, key, len(output), request, is_cut and at == len(blocks)))
        place = place + 1 if isinstance(part, ToolCall) else 0
    return output


def write_item(block: Block, key: str, index: int, request: Request, is_cut: bool = False) -> JsonObject:
    part, status = block.part, _status(not is_cut)
    if isinstance(part, ToolResult):
        raise ValueError("a result is a part of its call's item")
    if isinstance(part, Text):
        return message_item(item_id(key, index, "text"), status, [text_part(part.text, block.logprobs)])
    if isinstance(part, ToolCall):
        return call_item(item_id(key, index, "tool_call", part.custom), _status(block.complete), part)
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


def _status(complete: bool) -> Status:
    return "completed" if complete else "incomplete"


def message_item(id: str, status: Status, content: list[JsonObject]) -> JsonObject:
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def call_item(id: str, status: Status, call: ToolCall) -> JsonObject:
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
