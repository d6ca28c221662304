"""`modelyard parse`: what the scanner makes of an output, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Tool
from modelyard.scanner.detect import detect
from modelyard.scanner.parsed import parse

_SCHEMAS = ("parameters", "input_schema")


def parse_output(
    text: str,
    *,
    format: str,
    template: str | None = None,
    tools: bytes | None = None,
    chunk: int | None = None,
    prefill: str = "",
) -> str:
    """`tools` is a JSON list in any protocol's shape; `chunk` feeds that many characters at a time."""
    if format == "auto" and template is None:
        raise InvalidRequest("--format auto needs --template FILE, the chat template to detect the format from")
    step = chunk or max(1, len(text))
    found = parse(
        [text[at : at + step] for at in range(0, len(text), step)],
        format=detect(format, template or "", "").format,
        tools=None if tools is None else read_tools(tools),
        prefill=prefill,
    )
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def read_tools(text: bytes) -> list[Tool]:
    try:
        given: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the tools are not JSON: {error}") from error
    listed = given.get("tools", [given]) if isinstance(given, dict) else given
    if not isinstance(listed, list):
        raise InvalidRequest("the tools are a JSON list, or an object with `tools`")
    return [_tool(one) for one in listed]


def _tool(given: Any) -> Tool:
    """OpenAI's shapes, with `function` around the rest or without, and Anthropic's."""
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(name, str):
        raise InvalidRequest(f"this is no tool, for it has no name: {msgspec.json.encode(given).decode()[:80]}")
    schema: dict[str, Any] = next((inner[key] for key in _SCHEMAS if isinstance(inner.get(key), dict)), {})
    return Tool(name, parameters=schema, kind="custom" if given.get("type") == "custom" else "function")
