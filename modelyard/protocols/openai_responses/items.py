"""Input items to messages: what one turn of the model said becomes one message again.

The wire lists a turn's reasoning, calls and text as items of their own. Neighbouring items of the assistant are one
assistant message with parts in order, neighbouring outputs one tool message. What cannot be carried over is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Part, ResultPart, Role, Text, Thinking, ToolCall, ToolResult
from modelyard.protocols.common.json import dumps
from modelyard.protocols.common.reasoning_signature import unpack_reasoning
from modelyard.protocols.openai_responses.body import ImageUrl, Item
from modelyard.protocols.openai_responses.body import Part as WirePart

ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
IMAGE_TYPES = frozenset({"input_image", "image_url"})


Turn = tuple[Role, tuple[Part, ...]]


def read_items(items: list[Item], warnings: list[str]) -> list[Message]:
    read = (_read_item(item, f"input[{index}]", warnings) for index, item in enumerate(items))
    return join_turns(turn for turn in read if turn is not None)


def join_turns(turns: Iterable[Turn]) -> list[Message]:
    """What an assistant says, or tools answer, without anybody else between is one message."""
    joined: list[tuple[Role, list[Part]]] = []
    for role, parts in turns:
        if role in ("assistant", "tool") and joined and joined[-1][0] == role:
            joined[-1][1].extend(parts)
        else:
            joined.append((role, list(parts)))
    return [Message(role, tuple(parts)) for role, parts in joined]


def _read_item(item: Item, path: str, warnings: list[str]) -> Turn | None:
    kind = item.type or ("message" if item.role is not None else None)
    if kind is None:
        raise InvalidRequest(f"{path} needs a type or a role", param=path)
    read = _READERS.get(kind)
    if read is None:
        warnings.append(f"{path}: items of type {kind!r} are left out")
        return None
    return read(item, path, warnings)


def _read_message(item: Item, path: str, warnings: list[str]) -> Turn:
    if item.role not in ROLES:
        told = "is missing" if item.role is None else f"{item.role!r} is unknown"
        raise InvalidRequest(f"{path}.role {told}; known roles are {', '.join(ROLES)}", param=f"{path}.role")
    return cast("Role", item.role), tuple(_read_content(item.content, f"{path}.content", warnings))


def _read_content(content: object, path: str, warnings: list[str]) -> Iterator[ResultPart]:
    if isinstance(content, str):
        yield Text(content)
    elif isinstance(content, list):
        for index, part in enumerate(content):
            yield from _read_part(part, f"{path}[{index}]", warnings)
    elif isinstance(content, dict):
        yield Text(dumps(content))


def _read_part(part: WirePart, path: str, warnings: list[str]) -> Iterator[ResultPart]:
    if part.type in TEXT_TYPES:
        yield Text(part.text or "")
    elif part.type == "refusal":
        yield Text(part.refusal or "")
    elif part.type in IMAGE_TYPES:
        yield from _read_image(part, path, warnings)
    else:
        warnings.append(f"{path}: content of type {part.type!r} is left out")


def _read_image(part: WirePart, path: str, warnings: list[str]) -> Iterator[Image]:
    url, detail = part.image_url, part.detail
    if isinstance(url, ImageUrl):
        detail = url.detail or detail
        url = url.url
    if url:
        yield Image(url, detail)
    else:
        warnings.append(f"{path}: an image without image_url is left out; uploaded files are not kept here")


def _read_reasoning(item: Item, _path: str, _warnings: list[str]) -> Turn:
    sealed = item.encrypted_content or ""
    return "assistant", (read_thinking(sealed, reasoning_text(item)),)


def read_thinking(sealed: str, shown: str) -> Thinking:
    """Our own seal knows the text better than a client that may have shortened it; a foreign one is only carried."""
    own = unpack_reasoning(sealed)
    if own is not None:
        return Thinking(own, sealed)
    return Thinking(shown, sealed, redacted=bool(sealed) and not shown)


def reasoning_text(item: Item) -> str:
    """The reasoning itself where it was given, else its summary."""
    content = item.content
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(part.text or "" for part in content)
    return "\n\n".join(part.text or "" for part in item.summary or ())


def _read_function_call(item: Item, path: str, _warnings: list[str]) -> Turn:
    arguments = item.arguments
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else dumps(arguments)
    call = ToolCall(_need(item, "call_id", path), _need(item, "name", path), arguments, item.namespace)
    return "assistant", (call,)


def _read_custom_call(item: Item, path: str, _warnings: list[str]) -> Turn:
    text = item.input if isinstance(item.input, str) else "" if item.input is None else dumps(item.input)
    call = ToolCall(_need(item, "call_id", path), _need(item, "name", path), text, item.namespace, custom=True)
    return "assistant", (call,)


def _read_output(item: Item, path: str, warnings: list[str]) -> Turn:
    content = tuple(_read_content(item.output, f"{path}.output", warnings))
    custom = item.type == "custom_tool_call_output"
    return "tool", (ToolResult(_need(item, "call_id", path), content, custom=custom),)


def _need(item: Item, field: str, path: str) -> str:
    value: str | None = getattr(item, field)
    if not value:
        raise InvalidRequest(f"{path}: a {item.type} needs {field}", param=f"{path}.{field}")
    return value


_READERS: dict[str, Callable[[Item, str, list[str]], Turn]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_function_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
}
