"""Writes the whole reply of `/api/chat`, and the last line of its stream."""

from __future__ import annotations

from typing import Any

from modelyard.core.events import Finished, Reply
from modelyard.core.request import Request, Text, ToolCall
from modelyard.protocols.common.call_arguments import write_arguments
from modelyard.protocols.common.json import encode
from modelyard.protocols.ollama.fields import DONE_REASONS, write_counts, write_logprobs, write_time


def write_reply(replies: list[Reply], request: Request) -> bytes:
    """This protocol has one choice. Incomplete calls are left out, because the client would run them."""
    reply = replies[0]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.thinking:
        message["thinking"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [write_call(call, at) for at, call in enumerate(reply.calls)]
    body = write_start(reply) | {"message": message} | write_end(reply.finished, request)
    if request.logprobs is not None:
        tokens = [token for block in reply.blocks if isinstance(block.part, Text) for token in block.logprobs]
        body["logprobs"] = write_logprobs(tokens)
    return encode(body)


def write_start(reply: Reply) -> dict[str, Any]:
    """The time is that of the end, as with Ollama."""
    ended = reply.started.created + (reply.finished.timings.total or 0)
    return {"model": reply.started.model, "created_at": write_time(ended)}


def write_end(finished: Finished, request: Request) -> dict[str, Any]:
    if request.load_only:
        return {"done": True, "done_reason": "unload" if request.keep_alive == 0 else "load"}
    return {"done": True, "done_reason": DONE_REASONS[finished.reason]} | write_counts(finished)


def write_call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": write_arguments(call.arguments)}
    return {"id": call.id, "function": function}
