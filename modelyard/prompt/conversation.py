"""Messages of a request as the dictionaries that chat templates read.

Client text is shielded on the way: a spelling of a control token in it stays text. What an assistant said is shielded
too (a model may have quoted one), except for reasoning tags, which templates look for in its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from modelyard.core.request import (
    Image,
    Message,
    Part,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.prompt.sandbox import spelled
from modelyard.prompt.tools import Toolbox
from modelyard.tokenizer.shield import Shield

RAW = "__raw"  # holds arguments that are no JSON object: every template can print a dictionary
_decode = msgspec.json.Decoder().decode

Entry = dict[str, Any]


class Conversation:
    """Turns requests into entries. `images`: the template has a place for them; else a word stands there."""

    def __init__(self, specials: Sequence[str], toolbox: Toolbox, shield: Shield, *, images: bool) -> None:
        self._shield = shield
        self._shield_reply = Shield(text for text in specials if not _is_reasoning_tag(text))
        self._toolbox = toolbox
        self._images = images

    def entries(self, request: Request) -> list[Entry]:
        out: list[Entry] = []
        names: dict[str, str] = {}
        for message in request.messages:
            if message.role == "assistant":
                out.append(self._assistant(message, names))
            elif message.role == "tool":
                out.extend(self._results(message, names, request.tools))
            else:
                out.append(self._said(message, request.tools))
        return out

    def _said(self, message: Message, tools: Sequence[Tool]) -> Entry:
        entry: Entry = {"role": message.role, "content": self._content(message.parts, tools)}
        if message.name:
            entry["name"] = self._shield(message.name)
        return entry

    def _content(self, parts: Sequence[Part], tools: Sequence[Tool]) -> str | list[Entry]:
        if len(parts) == 1 and isinstance(part := parts[0], Text):
            return self._shield(part.text)
        items = list(self._items(parts, tools))
        if self._images and any(item["type"] == "image" for item in items):
            return items
        return self._shield("\n".join(item.get("text", "[image]") for item in items))

    def _items(self, parts: Sequence[Part], tools: Sequence[Tool]) -> Iterator[Entry]:
        for part in parts:
            if isinstance(part, Text):
                yield {"type": "text", "text": self._shield(part.text)}
            elif isinstance(part, Image):
                yield {"type": "image"}
            elif isinstance(part, ToolReference):
                yield {"type": "text", "text": self._toolbox.announce(part.name, tools)}

    def _results(self, message: Message, names: dict[str, str], tools: Sequence[Tool]) -> Iterator[Entry]:
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield {
                    "role": "tool",
                    "name": names.get(part.call_id, ""),
                    "tool_call_id": self._shield(part.call_id),
                    "content": self._content(part.content, tools),
                }
            else:
                yield {"role": "tool", "name": "", "tool_call_id": "", "content": self._content((part,), tools)}

    def _assistant(self, message: Message, names: dict[str, str]) -> Entry:
        shield = self._shield_reply
        entry: Entry = {"role": "assistant", "content": ""}
        texts = [part.text for part in message.parts if isinstance(part, Text)]
        if texts:
            entry["content"] = shield(texts[0] if len(texts) == 1 else "".join(texts))
        thoughts = [part.text for part in message.parts if isinstance(part, Thinking) and part.text]
        if thoughts:
            entry["reasoning_content"] = shield("\n".join(thoughts))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if calls:
            names.update((call.id, self._shield(call.name)) for call in calls)
            entry["tool_calls"] = [self._call(call) for call in calls]
        return entry

    def _call(self, call: ToolCall) -> Entry:
        function = {"name": self._shield(call.name), "arguments": self._arguments(call)}
        return {"id": self._shield(call.id), "type": "function", "function": function}

    def _arguments(self, call: ToolCall) -> Entry:
        text = call.arguments
        if call.custom:
            return {"input": self._shield(text)}
        try:
            value = _decode(text or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return {RAW: self._shield(text)}
        if call.verbatim:
            return spelled(self._shield.deep(value), self._shield(text))
        escaped = "\\u" in text or "\\/" in text  # a spelling may hide behind JSON's escapes
        return self._shield.deep(value) if escaped or self._shield(text) is not text else value


def _is_reasoning_tag(text: str) -> bool:
    return "think" in text.lower() or "reasoning" in text.lower()
