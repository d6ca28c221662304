"""The request that a chat sends, and the same request as text and code. Pure."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from modelyard.core.chat import Chat
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Message, Part, Reasoning, Request, Sampling, Text, Tool

PROTOCOLS = {
    "openai_chat": "OpenAI Chat Completions",
    "openai_responses": "OpenAI Responses",
    "anthropic_messages": "Anthropic Messages",
}
THINKING_MODES = {"default": None, "on": True, "off": False}
_MAX_SHOWN_CHARACTERS = 2000


def chat_request(chat: Chat, model: str, end: str | None = None, draft: tuple[Part, ...] = ()) -> Request:
    """The request for an answer to the turn `end`, by default the last one; `draft` is a message that follows it."""
    settings = chat.settings
    system = (Message("system", (Text(settings.system),)),) if settings.system.strip() else ()
    drafted = (Message("user", draft),) if draft else ()
    return Request(
        model=model,
        messages=(*system, *chat.messages(end), *drafted),
        tools=read_tools(settings.tools),
        sampling=Sampling(
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, seed=settings.seed
        ),
        max_tokens=settings.max_tokens,
        stop=tuple(line for line in settings.stop.split("\n") if line),
        reasoning=Reasoning(enabled=THINKING_MODES[settings.thinking]),
        stream=True,
        include_usage=True,
    )


def read_tools(text: str) -> tuple[Tool, ...]:
    """Tools as JSON, one or a list, in the format of any of the protocols."""
    if not text.strip():
        return ()
    try:
        decoded = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the tools are not valid JSON: {error}", param="tools") from None
    items = decoded if isinstance(decoded, list) else [decoded]
    return tuple(_read_tool(item, number) for number, item in enumerate(items, 1))


def _read_tool(item: Any, number: int) -> Tool:
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"tool {number} has no name", param="tools")
    schema = function.get("parameters") or function.get("input_schema") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of {function['name']} are not a JSON Schema", param="tools")
    return Tool(function["name"], str(function.get("description") or ""), schema)


# --- the request as text ----------------------------------------------------------------------------------------------


def format_body(body: bytes) -> str:
    """Indented JSON in which images are shortened."""
    return msgspec.json.format(msgspec.json.encode(_shortened(msgspec.json.decode(body))), indent=2).decode()


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARACTERS and " " not in value[:_MAX_SHOWN_CHARACTERS]:
        return f"{value[:60]}… ({len(value)} characters)"
    return value


def curl_snippet(url: str, path: str, body: bytes, needs_key: bool) -> str:
    lines = [f"curl -N {url}{path}", "-H 'content-type: application/json'"]
    if needs_key:
        lines.append('-H "authorization: Bearer $MODELYARD_API_KEY"')
    return " \\\n  ".join([*lines, f"-d {shlex.quote(body.decode())}"])


_PYTHON = """import json
{imports}
import httpx

body = json.loads({body})
{headers}with httpx.stream("POST", "{url}{path}", json=body{arguments}, timeout=None) as reply:
    for line in reply.iter_lines():
        print(line)
"""


def python_snippet(url: str, path: str, body: bytes, needs_key: bool) -> str:
    headers = 'headers = {"authorization": f"Bearer {os.environ[\'MODELYARD_API_KEY\']}"}\n'
    return _PYTHON.format(
        imports="import os\n" if needs_key else "",
        body=repr(body.decode()),
        headers=headers if needs_key else "",
        url=url,
        path=path,
        arguments=", headers=headers" if needs_key else "",
    )
