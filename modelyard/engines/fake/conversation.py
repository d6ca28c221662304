"""What the fake engine can see of a conversation: the last user turn, tool results after it, and the tools on offer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol

from modelyard.core.request import Message, Request, Text, ToolResult
from modelyard.core.tokenizer import Tokenizer


class ConversationView(Protocol):
    @property
    def user(self) -> str: ...
    @property
    def result(self) -> str | None: ...
    @property
    def tools(self) -> dict[str, dict[str, Any]]: ...


# --- as a TextEngine sees it: token ids only ------------------------------------------------------------------------

_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_JSON_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_XML_TOOL = re.compile(r"<name>([\w.-]+)</name>")
_HARMONY_TOOL = re.compile(r"^type ([\w.-]+) = \(", re.MULTILINE)
_TAIL = 2000  # tokens looked at where no turn marker is known

THINK = "<think>"
OPENED = 4  # a prompt that ends inside the reasoning has opened it among so many of its last tokens


class PromptView:
    """Read lazily and from the end: a long prompt is decoded whole only when the tools are asked for."""

    def __init__(self, ids: list[int], vocab: Tokenizer) -> None:
        self._ids, self._vocab = ids, vocab

    @property
    def user(self) -> str:
        return self._last[0]

    @property
    def result(self) -> str | None:
        return self._last[1]

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        return tools_in(self._vocab.decode(self._ids))

    @cached_property
    def thinks_already(self) -> bool:
        """Some templates open the reasoning themselves: the answer then begins inside it."""
        opener, closer = (self._vocab.specials.get(text, -1) for text in (THINK, "</think>"))
        tail = self._ids[-OPENED:]
        return opener in tail and closer not in tail

    @cached_property
    def _last(self) -> tuple[str, str | None]:
        result: str | None = None
        for role, text in self._turns_backwards():
            results = _RESULT.findall(text) if role == "user" else [text] if role == "tool" else []
            if results:
                result = "\n".join(results) if result is None else "\n".join([*results, result])
            elif role == "user":
                return text, result
        return "", result

    def _turns_backwards(self) -> Iterator[tuple[str, str]]:
        for opener, cut in (("<|im_start|>", _chatml), ("<|start|>", _harmony)):
            marker = self._vocab.specials.get(opener)
            if marker is not None and marker in self._ids:
                return self._cut(marker, cut)
        return iter([("user", self._vocab.decode(self._ids[-_TAIL:], specials=False).strip())])

    def _cut(self, marker: int, cut: Callable[[str], tuple[str, str]]) -> Iterator[tuple[str, str]]:
        backwards, end = self._ids[::-1], 0
        while True:
            try:
                start = backwards.index(marker, end)
            except ValueError:
                return
            yield cut(self._vocab.decode(backwards[end:start][::-1]))
            end = start + 1


def _chatml(turn: str) -> tuple[str, str]:
    role, _, text = turn.partition("\n")
    return role, text.split("<|im_end|>")[0].strip("\n")


def _harmony(turn: str) -> tuple[str, str]:
    head, _, text = turn.partition("<|message|>")
    role = head.split("<|")[0].split(" ")[0]
    return "tool" if role.startswith("functions.") else role, text.split("<|end|>")[0]


def tools_in(text: str) -> dict[str, dict[str, Any]]:
    """Name → parameter schema; empty where the template does not write the schema as JSON."""
    listed = _JSON_TOOLS.search(text)
    found = dict(tool for line in listed[1].splitlines() if (tool := _json_tool(line))) if listed else {}
    names = _XML_TOOL.findall(text) + _HARMONY_TOOL.findall(text)
    return found or {name: {} for name in names}


def _json_tool(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        tool = json.loads(line)
    except ValueError:
        return None
    tool = tool.get("function", tool) if isinstance(tool, dict) else {}
    return (tool["name"], tool.get("parameters") or {}) if "name" in tool else None


# --- as a ChatEngine sees it ----------------------------------------------------------------------------------------


class RequestView:
    """The same view of a request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @cached_property
    def user(self) -> str:
        raw = [prompt for prompt in self._request.prompts if isinstance(prompt, str)]
        return next((_text(m) for m in reversed(self._request.messages) if m.role == "user"), "".join(raw[:1]))

    @cached_property
    def result(self) -> str | None:
        results: list[str] = []
        for message in reversed(self._request.messages):
            if message.role == "user":
                break
            results[:0] = [_text(message)] if message.role == "tool" else []
        return "\n".join(results) if results else None

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        return {tool.name: tool.parameters for tool in self._request.tools if tool.kind == "function"}


def _text(message: Message) -> str:
    return "\n".join(
        part.text if isinstance(part, Text) else "\n".join(p.text for p in part.content if isinstance(p, Text))
        for part in message.parts
        if isinstance(part, Text | ToolResult)
    )
