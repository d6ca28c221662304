"""The `response` object and its output items: one shape for the stream, the whole reply and what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Raw

from modelyard.core.events import Block, BlockKind, Finished, TokenLogprob, Usage
from modelyard.core.request import Request, Text, Thinking, ToolCall
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.response_metrics import write_metrics
from modelyard.protocols.openai_responses.outgoing import split_instructions, write_format
from modelyard.protocols.openai_responses.tools import write_choice, write_tools

Wire = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]
_EMPTY_LIST = Raw(b"[]")


class ResponseObject:
    """What was asked, echoed, plus what has become of it so far. The echo is encoded once: it may be large."""

    def __init__(self, request: Request, key: str) -> None:
        self.id = f"resp_{key}"
        self._model = request.model
        self._echo = _echo(request)

    def at(self, status: Status, created: int, **now: Any) -> Wire:
        """The object at this moment; `now` holds output, usage, error, incomplete_details, output_text, model."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": _EMPTY_LIST,
            "usage": None,
            **self._echo,
            **now,
        }

    def finished(self, finished: Finished, created: int, model: str, output: list[Wire]) -> Wire:
        reason = incomplete_reason(finished)
        return self.at(
            "incomplete" if reason else "completed",
            created,
            model=model,
            output=output,
            usage=write_usage(finished.usage),
            incomplete_details={"reason": reason} if reason else None,
            output_text=_output_text(output),
            metrics=write_metrics(finished),
        )


def _echo(request: Request) -> Wire:
    sampling, reasoning = request.sampling, request.reasoning
    return {
        "instructions": split_instructions(request)[0],
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": write_format(request.constraint)},
        "tool_choice": write_choice(request.tool_choice, request.tools),
        "tools": Raw(encode(write_tools(request.tools))) if request.tools else _EMPTY_LIST,
        "top_logprobs": request.logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def incomplete_reason(finished: Finished) -> str | None:
    if finished.reason in ("max_tokens", "window"):
        return "max_output_tokens"
    return "content_filter" if finished.reason == "content_filter" else None


def write_usage(usage: Usage) -> Wire:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def _output_text(output: Iterable[Mapping[str, Any]]) -> str:
    """The text of all messages in one string, as the SDKs offer it."""
    return "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])


# --- items ----------------------------------------------------------------------------------------------------------


def item_id(key: str, index: int, kind: BlockKind, custom: bool = False) -> str:
    """Made of the response's id and the item's place, so that a stream and its fold agree."""
    prefix = {"text": "msg", "thinking": "rs", "tool_call": "ctc" if custom else "fc"}[kind]
    return f"{prefix}_{key}_{index}"


def write_item(block: Block, key: str, index: int, request: Request) -> Wire:
    part = block.part
    if isinstance(part, Text):
        return message_item(item_id(key, index, "text"), "completed", [text_part(part.text, block.logprobs)])
    if isinstance(part, Thinking):
        return _reasoning_item(item_id(key, index, "thinking"), part, request)
    status: Status = "completed" if block.complete else "incomplete"
    return call_item(item_id(key, index, "tool_call", part.custom), status, part)


def message_item(id: str, status: Status, content: list[Wire]) -> Wire:
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str, logprobs: Iterable[TokenLogprob] = ()) -> Wire:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [write_logprob(p) for p in logprobs]}


def write_logprob(entry: TokenLogprob) -> Wire:
    return _token(entry) | {"top_logprobs": [_token(other) for other in entry.top]}


def _token(entry: TokenLogprob) -> Wire:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def wants_summary(request: Request) -> bool:
    return request.reasoning.summary not in (None, "none")


def _reasoning_item(id: str, part: Thinking, request: Request) -> Wire:
    """The engine's own seal goes out where it has one: it must find its way back to the same upstream."""
    item: Wire = {
        "id": id,
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": part.text}] if wants_summary(request) else [],
        "content": [{"type": "reasoning_text", "text": part.text}],
    }
    if request.encrypted_reasoning:
        item["encrypted_content"] = part.signature or pack_reasoning(part.text)
    return item


def call_item(id: str, status: Status, call: ToolCall) -> Wire:
    kind, field = ("custom_tool_call", "input") if call.custom else ("function_call", "arguments")
    item: Wire = {"id": id, "type": kind, "status": status, "call_id": call.id, "name": call.name}
    if call.namespace is not None:
        item["namespace"] = call.namespace
    item[field] = call.arguments
    return item
