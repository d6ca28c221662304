"""A chat request's body ⇄ the core request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import astuple

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import DEFAULT_SAMPLING, Constraint, Request
from modelyard.protocols.common.extensions import (
    check_positive,
    read_constraint,
    read_priority,
    read_sampling,
    write_extensions,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_fields import MAX_N, check_range, read_session, read_stop, require_model
from modelyard.protocols.openai_chat.body import ChatCompletionBody, FormatBody, SchemaBody
from modelyard.protocols.openai_chat.messages import read_messages, write_messages
from modelyard.protocols.openai_chat.reasoning import read_reasoning, read_template_kwargs, write_reasoning
from modelyard.protocols.openai_chat.tools import read_choice, read_tools, write_tools

_MAX_TOP_LOGPROBS = 20
_decoder = msgspec.json.Decoder(ChatCompletionBody)
# All fields in one row: what nearly every request says, what is rare, the sampling. One look tells what is not asked.
_ROW = ChatCompletionBody.__struct_fields__
_RARE = slice(_ROW.index("prompt_cache_key") + 1, _ROW.index("temperature"))
_SAMPLING = slice(_RARE.stop, None)
_NOTHING_RARE, _NO_SAMPLING = (None,) * len(_ROW[_RARE]), (None,) * len(_ROW[_SAMPLING])


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    asked = decode(_decoder, body)
    model = require_model(asked.model)
    if not asked.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    row = astuple(asked)
    if row[_RARE] != _NOTHING_RARE:
        return _read(model, asked, headers)
    return _read_plain(model, asked, headers, is_sampled=row[_SAMPLING] != _NO_SAMPLING)


def _read_plain(model: str, asked: ChatCompletionBody, headers: Mapping[str, str], *, is_sampled: bool) -> Request:
    """The same as `_read` where nothing rare is asked for."""
    warnings: list[str] = []
    return Request(
        model=model,
        messages=read_messages(asked.messages or [], warnings),
        sampling=read_sampling(asked) if is_sampled else DEFAULT_SAMPLING,
        max_tokens=_read_max_tokens(asked),
        stream=asked.stream is True,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage is True,
        session=read_session(headers, asked.prompt_cache_key),
        user=asked.user or None,
        warnings=tuple(warnings),
    )


def _read(model: str, asked: ChatCompletionBody, headers: Mapping[str, str]) -> Request:
    check_range("n", asked.n, 1, MAX_N)
    warnings: list[str] = []
    return Request(
        model=model,
        messages=read_messages(asked.messages or [], warnings),
        tools=read_tools(asked),
        tool_choice=read_choice(asked, warnings),
        parallel_tool_calls=asked.parallel_tool_calls,
        sampling=read_sampling(asked),
        max_tokens=_read_max_tokens(asked),
        stop=read_stop(asked.stop, warnings),
        n=1 if asked.n is None else asked.n,
        logprobs=_read_logprobs(asked),
        constraint=_read_format(asked.response_format, warnings) or read_constraint(asked),
        reasoning=read_reasoning(asked),
        stream=asked.stream is True,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage is True,
        lora_adapter=asked.lora_adapter,
        chat_template_kwargs=read_template_kwargs(asked),
        documents=asked.documents or (),
        priority=read_priority(asked),
        session=read_session(headers, asked.prompt_cache_key),
        user=asked.user or asked.safety_identifier,
        metadata=asked.metadata,
        store=asked.store,
        warnings=tuple(warnings),
    )


def _read_max_tokens(asked: ChatCompletionBody) -> int | None:
    """`max_completion_tokens` is the newer name and wins, but a wrong value is told under either."""
    check_positive("max_tokens", asked.max_tokens)
    check_positive("max_completion_tokens", asked.max_completion_tokens)
    return asked.max_completion_tokens or asked.max_tokens


def _read_logprobs(asked: ChatCompletionBody) -> int | None:
    """`top_logprobs` alone asks for logprobs too; a number under `logprobs` is some servers' way to say both."""
    check_range("top_logprobs", asked.top_logprobs, 0, _MAX_TOP_LOGPROBS)
    flag = asked.logprobs
    if flag is None or flag is False:
        return asked.top_logprobs if flag is None else None
    if asked.top_logprobs is not None or flag is True:
        return asked.top_logprobs or 0
    check_range("logprobs", flag, 0, _MAX_TOP_LOGPROBS)
    return flag


def _read_format(asked: FormatBody | None, warnings: list[str]) -> Constraint | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_schema":
        return _read_schema(asked.json_schema or SchemaBody(schema=asked.schema))
    if asked.type == "json_object":
        has_schema = bytes(asked.schema).startswith(b"{")
        return _read_schema(SchemaBody(schema=asked.schema)) if has_schema else Constraint("json_object")
    warnings.append(f"response_format_ignored: type {asked.type!r} is none of text, json_object, json_schema")
    return None


def _read_schema(asked: SchemaBody) -> Constraint:
    """The schema stays the text it was: re-encoding would lose the form of its numbers."""
    text = bytes(asked.schema).decode()
    if not text.startswith("{"):
        where = "response_format.json_schema.schema"
        raise InvalidRequest(f"{where} is required and must be an object", param=where)
    return Constraint("json_schema", text, asked.name, asked.description, asked.strict)


# --- the client role ------------------------------------------------------------------------------------------------


def write_request(request: Request) -> bytes:
    out: dict[str, Any] = {"model": request.model, "messages": write_messages(request.messages)}
    out |= write_tools(request)
    out |= write_extensions(request)
    out |= write_reasoning(request)
    out |= _write_constraint(request.constraint)
    out |= _write_output(request)
    out |= {
        name: value
        for name, value in (
            ("prompt_cache_key", request.session),
            ("user", request.user),
            ("metadata", request.metadata),
            ("store", request.store),
        )
        if value is not None
    }
    return encode(out)


def _write_output(request: Request) -> dict[str, Any]:
    """`max_tokens`, the older name: every local server knows it, and some do not know the newer."""
    out: dict[str, Any] = {}
    if request.max_tokens is not None:
        out["max_tokens"] = request.max_tokens
    if request.stop:
        out["stop"] = request.stop
    if request.n != 1:
        out["n"] = request.n
    if request.logprobs is not None:
        out |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.stream:
        out["stream"] = True
    if request.include_usage:
        out["stream_options"] = {"include_usage": True}
    return out


_EXTENSIONS = {"gbnf": "grammar", "regex": "regex", "lark": "lark"}


def _write_constraint(constraint: Constraint | None) -> dict[str, Any]:
    """Constraints of kind `tools` are ours alone: on this wire `tool_choice` says it."""
    if constraint is None or constraint.kind == "tools":
        return {}
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if constraint.kind != "json_schema":
        return {_EXTENSIONS[constraint.kind]: constraint.text}
    schema: dict[str, Any] = {"name": constraint.name or "response", "schema": Raw(constraint.text.encode())}
    if constraint.description is not None:
        schema["description"] = constraint.description
    if constraint.strict is not None:
        schema["strict"] = constraint.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
