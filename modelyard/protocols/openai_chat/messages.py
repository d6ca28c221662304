"""Chat messages ⇄ core messages: parts, reasoning, tool calls and their results."""

from __future__ import annotations

from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import (
    Image,
    Message,
    Part,
    ResultPart,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.common.json import dumps
from modelyard.protocols.openai_chat.body import CallBody, CalledFunction, MessageBody, PartBody

_ROLES = "system, developer, user, assistant, tool, function"
_PLAIN: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user"}
_TEXTS = frozenset({"text", "input_text", "output_text", ""})
_IMAGES = frozenset({"image_url", "input_image"})


def read_messages(bodies: list[MessageBody], warnings: list[str]) -> tuple[Message, ...]:
    if (asked := _only_asked(bodies)) is not None:
        return asked
    reading = _Reading(warnings)
    for i, body in enumerate(bodies):
        reading.add(body, i)
    return reading.messages()


def _only_asked(bodies: list[MessageBody]) -> tuple[Message, ...] | None:
    """The same, where only the client has spoken yet, and in texts; None where it takes a closer look."""
    said: list[Message] = []
    for body in bodies:
        role, content = _PLAIN.get(body.role), body.content
        if role is None or type(content) is not str or not content:
            return None
        said.append(Message(role, (Text(content),), body.name))
    return tuple(said)


class _Reading:
    """One pass over the messages; neighbouring tool results are collected into one message."""

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._done: list[Message] = []
        self._results: list[ToolResult] = []
        self._custom: set[str] = set()  # ids of custom calls: the wire's results do not say which kind they answer
        self._legacy: dict[str, str] = {}  # function name → the id we gave its last `function_call`

    def messages(self) -> tuple[Message, ...]:
        self._flush()
        return tuple(self._done)

    def add(self, body: MessageBody, i: int) -> None:
        role = body.role
        if role == "tool" or role == "function":
            self._results.append(self._result(body, i))
            return
        self._flush()
        if plain := _PLAIN.get(role):
            self._done.append(Message(plain, self._content(body, i), body.name))
        elif role == "assistant":
            self._done.append(Message("assistant", self._assistant(body, i), body.name))
        else:
            where = f"messages[{i}].role"
            raise InvalidRequest(f"{where}: unknown role {role!r}; the roles are {_ROLES}", param=where)

    def _flush(self) -> None:
        if self._results:
            self._done.append(Message("tool", tuple(self._results)))
            self._results = []

    def _content(self, body: MessageBody, i: int) -> tuple[ResultPart, ...]:
        content = body.content
        if not content:
            return ()
        if isinstance(content, str):
            return (Text(content),)
        parts = (self._part(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content))
        return tuple(part for part in parts if part is not None)

    def _part(self, part: PartBody | str, where: str) -> Text | Image | None:
        if isinstance(part, str):
            return Text(part)
        if part.type in _TEXTS:
            return Text(_text(part.text, where, "text"))
        if part.type in _IMAGES:
            return _read_image(part, where)
        if part.type == "refusal":
            return Text(_text(part.refusal, where, "refusal"))
        self._warnings.append(f"content_part_dropped: {where} is of type {part.type!r}")
        return None

    def _result(self, body: MessageBody, i: int) -> ToolResult:
        call_id = body.tool_call_id
        if body.role == "function":
            name = body.name or ""
            call_id = call_id or self._legacy.get(name) or f"call_{name}"
        if not call_id:
            where = f"messages[{i}].tool_call_id"
            raise InvalidRequest(f"{where} is required: it names the call that this message answers", param=where)
        return ToolResult(call_id, self._content(body, i), custom=call_id in self._custom)

    def _assistant(self, body: MessageBody, i: int) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = self._content(body, i)
        if body.refusal and not parts:
            parts = (Text(body.refusal),)
        reasoning = body.reasoning_content or body.reasoning
        if isinstance(reasoning, str) and reasoning:
            parts = (Thinking(reasoning), *parts)
        if body.tool_calls:
            calls = (self._call(call, i, j) for j, call in enumerate(body.tool_calls))
            parts += tuple(call for call in calls if call is not None)
        if body.function_call:
            parts += (self._legacy_call(body.function_call, i),)
        return parts

    def _call(self, call: CallBody, i: int, j: int) -> ToolCall | None:
        where = f"messages[{i}].tool_calls[{j}]"
        found = read_call(call, f"call_{i}_{j}")
        if found is None and call.type == "function":
            raise InvalidRequest(f"{where}.function is required", param=f"{where}.function")
        if found is None:
            self._warnings.append(f"tool_call_dropped: {where} is of type {call.type!r}")
        elif found.custom:
            self._custom.add(found.id)
        return found

    def _legacy_call(self, call: CalledFunction, i: int) -> ToolCall:
        """Old calls have no id: the place in the conversation gives one that stays the same on every turn."""
        self._legacy[call.name] = f"call_{i}"
        return ToolCall(f"call_{i}", call.name, read_arguments(call.arguments))


def read_call(call: CallBody, fallback_id: str) -> ToolCall | None:
    """None for a call of a kind that nobody here could run."""
    call_id = call.id or fallback_id
    if call.custom is not None:
        return ToolCall(call_id, call.custom.name, call.custom.input, custom=True)
    if call.function is not None:
        return ToolCall(call_id, call.function.name, read_arguments(call.function.arguments))
    return None


def _text(value: Any, where: str, field: str) -> str:
    if isinstance(value, str):
        return value
    raise InvalidRequest(f"{where}.{field} must be a string", param=f"{where}.{field}")


def _read_image(part: PartBody, where: str) -> Image:
    url: Any = part.image_url
    detail: Any = part.detail
    if isinstance(url, dict):
        url, detail = url.get("url"), url.get("detail", detail)
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{where}.image_url needs a url", param=f"{where}.image_url")
    return Image(url, detail if isinstance(detail, str) else None)


def read_arguments(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else dumps(value)


# --- the client role ------------------------------------------------------------------------------------------------


def write_messages(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "assistant":
            out.append(_write_assistant(message))
        elif message.role != "tool":
            out.append(_named(message, {"role": message.role, "content": _write_content(message.parts)}))
        out.extend(_write_result(part) for part in message.parts if isinstance(part, ToolResult))
    return out


def _named(message: Message, out: dict[str, Any]) -> dict[str, Any]:
    return out | {"name": message.name} if message.name is not None else out


def _write_assistant(message: Message) -> dict[str, Any]:
    """Chat has one order only: reasoning, content, calls. Redacted reasoning has no text to show."""
    calls = [write_call(part) for part in message.parts if isinstance(part, ToolCall)]
    content = _write_content(message.parts)
    out: dict[str, Any] = {"role": "assistant", "content": None if calls and content == "" else content}
    thinking = "".join(p.text for p in message.parts if isinstance(p, Thinking) and not p.redacted)
    if thinking:
        out["reasoning_content"] = thinking
    if calls:
        out["tool_calls"] = calls
    return _named(message, out)


def write_call(call: ToolCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _write_result(result: ToolResult) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": result.call_id, "content": _write_content(result.content)}


def _write_content(parts: tuple[Part, ...]) -> str | list[dict[str, Any]]:
    """A plain string wherever it says the same: many servers know nothing else."""
    shown = [_in_words(p) for p in parts if isinstance(p, Text | Image | ToolReference)]
    if not shown:
        return ""
    if len(shown) == 1 and isinstance(shown[0], Text) and shown[0].text:
        return shown[0].text
    return [_write_part(part) for part in shown]


def _in_words(part: Text | Image | ToolReference) -> Text | Image:
    """Chat cannot add a tool in mid-conversation: its definition goes into `tools`, and this is left in its place."""
    return Text(f"The tool {part.name} is now available.") if isinstance(part, ToolReference) else part


def _write_part(part: Text | Image) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    image = {"url": part.url} if part.detail is None else {"url": part.url, "detail": part.detail}
    return {"type": "image_url", "image_url": image}
