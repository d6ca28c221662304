"""A client's Messages body as a core request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import (
    Constraint,
    Message,
    Part,
    Reasoning,
    Request,
    Role,
    Text,
    ToolResult,
)
from modelyard.protocols.anthropic_messages.body import (
    MessagesBody,
    OutputFormat,
    Turn,
    body_decoder,
)
from modelyard.protocols.anthropic_messages.content import Warnings, read_content, says_something, within
from modelyard.protocols.anthropic_messages.tools import read_tool_choice, read_tools
from modelyard.protocols.common.extensions import check_positive, read_constraint, read_priority, read_sampling
from modelyard.protocols.common.json import decode

_BILLING = "x-anthropic-billing-header"
_ROLES: Mapping[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",  # not Anthropic's, but proxies in front of us pass it on
}
# `adaptive` lets the model decide how much, not whether: clients that want none leave it out or say `disabled`.
_THINKING_SWITCH = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_NO_REASONING = Reasoning()


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """Also reads the body of count_tokens, which is the same without `max_tokens`."""
    asked = decode(body_decoder, body)
    _check(asked)
    warnings: Warnings = {}
    user = _user(asked.metadata)
    choice, parallel = read_tool_choice(asked.tool_choice, warnings)
    return Request(
        model=asked.model,
        messages=_messages(asked, warnings),
        tools=read_tools(asked.tools, body) if asked.tools else (),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        sampling=read_sampling(asked),
        max_tokens=asked.max_tokens,
        stop=tuple(asked.stop_sequences or ()),
        constraint=_constraint(asked),
        reasoning=_reasoning(asked),
        stream=bool(asked.stream),
        lora_adapter=asked.lora_adapter,
        chat_template_kwargs=asked.chat_template_kwargs or {},
        documents=asked.documents or (),
        priority=read_priority(asked),
        session=_session(headers, user),
        user=user,
        metadata=asked.metadata,
        warnings=tuple(warnings),
    )


def _check(asked: MessagesBody) -> None:
    if not asked.model:
        raise InvalidRequest("model: the name of a model is required", param="model")
    if not asked.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    check_positive("max_tokens", asked.max_tokens)
    for place, stop in enumerate(asked.stop_sequences or ()):
        if not stop:
            path = f"stop_sequences[{place}]"
            raise InvalidRequest(f"{path}: an empty string would stop every answer before it began", param=path)


# --- messages -------------------------------------------------------------------------------------------------------


def _messages(asked: MessagesBody, warnings: Warnings) -> tuple[Message, ...]:
    messages: list[Message] = []
    if asked.system and says_something(head := _system(asked, warnings)):
        messages.append(Message("system", tuple(head)))
    for place, turn in enumerate(asked.messages):
        try:
            _add_turn(messages, turn, warnings)
        except InvalidRequest as error:
            raise within(f"messages[{place}]", error) from None
    return tuple(messages)


def _system(asked: MessagesBody, warnings: Warnings) -> list[Part]:
    try:
        return _without_billing(read_content(asked.system, warnings), warnings)
    except InvalidRequest as error:
        param = (error.param or "").replace("content", "system", 1)
        raise InvalidRequest(error.message.replace("content", "system", 1), param=param, code=error.code) from None


def _add_turn(messages: list[Message], turn: Turn, warnings: Warnings) -> None:
    role = _ROLES.get(turn.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"role: unknown role {turn.role!r}, expected one of {known}", param="role")
    parts = read_content(turn.content, warnings)
    if role == "system" and parts:
        parts = _without_billing(parts, warnings)
        if not parts:
            return
    if any(isinstance(part, ToolResult) for part in parts):
        _add_results(messages, role, parts)
    else:
        messages.append(Message(role, tuple(parts)))


def _add_results(messages: list[Message], role: Role, parts: Iterable[Part]) -> None:
    """Results get a message of their own, in their place; neighbouring ones share it, also across turns."""
    for is_result, run in groupby(parts, lambda part: isinstance(part, ToolResult)):
        if is_result and messages and messages[-1].role == "tool":
            messages[-1] = Message("tool", (*messages[-1].parts, *run))
        else:
            messages.append(Message("tool" if is_result else role, tuple(run)))


def _without_billing(parts: Iterable[Part], warnings: Warnings) -> list[Part]:
    """Without the line that changes with every request and would cost the whole KV prefix behind it."""
    return [kept for part in parts if (kept := _unbilled(part, warnings)) is not None]


def _unbilled(part: Part, warnings: Warnings) -> Part | None:
    if not isinstance(part, Text) or not part.text.startswith(_BILLING):
        return part
    warnings["billing_header_dropped"] = None
    rest = part.text.partition("\n")[2].lstrip("\n")
    return Text(rest) if rest else None


# --- the rest -------------------------------------------------------------------------------------------------------


def _constraint(asked: MessagesBody) -> Constraint | None:
    form = (asked.output_config and asked.output_config.format) or asked.output_format
    return (_schema(form) if form else None) or read_constraint(asked)


def _schema(form: OutputFormat) -> Constraint | None:
    if form.type == "json_schema":
        try:
            return Constraint("json_schema", bytes(form.schema).decode() or "{}")
        except UnicodeDecodeError:
            raise InvalidRequest("output_config.format.schema: not UTF-8", param="output_config.format") from None
    return Constraint("json_object") if form.type == "json_object" else None


def _reasoning(asked: MessagesBody) -> Reasoning:
    effort = asked.output_config.effort if asked.output_config else None
    thinking = asked.thinking
    if thinking is None:
        return Reasoning(effort=effort) if effort else _NO_REASONING
    return Reasoning(
        enabled=_THINKING_SWITCH.get(thinking.type),
        effort=effort,
        budget=thinking.budget_tokens,
        summary=thinking.display,
    )


def _user(metadata: dict[str, Any] | None) -> str | None:
    user = metadata.get("user_id") if metadata else None
    return user if isinstance(user, str) and user else None


def _session(headers: Mapping[str, str], user: str | None) -> str | None:
    """Which conversation this belongs to; a subagent is a conversation of its own."""
    if session := headers.get("x-claude-code-session-id"):
        agent = headers.get("x-claude-code-agent-id")
        return f"{session}:{agent}" if agent else session
    return headers.get("x-session-id") or headers.get("x-session-affinity") or user
