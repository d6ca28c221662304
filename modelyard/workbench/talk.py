"""A conversation in the playground as data: what was asked and answered, and the request that comes next. Pure."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
from msgspec import Struct, field

from modelyard import plugins
from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Reply
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Image, Message, Part, Reasoning, Request, Sampling, Text, Thinking, Tool, ToolResult

WIRES = {
    "openai_chat": "OpenAI Chat Completions",
    "openai_responses": "OpenAI Responses",
    "anthropic_messages": "Anthropic Messages",
}
THINKING = {"default": None, "on": True, "off": False}


class Knobs(Struct):
    """What can be set beside the conversation, as it stands in the form."""

    model: str = ""
    wire: str = "openai_chat"
    system: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = 1024
    seed: int | None = None
    stop: str = ""  # one a line
    thinking: str = "default"
    tools: str = ""


class Talk(Struct):
    knobs: Knobs = field(default_factory=Knobs)
    messages: list[Message] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # data URLs that the next message takes along

    def say(self, text: str) -> None:
        parts: list[Part] = [Image(url) for url in self.pictures]
        if text:
            parts.append(Text(text))
        self.messages.append(Message("user", tuple(parts)))
        self.pictures = []

    def hand_over(self, results: dict[str, str]) -> None:
        """What the tools said, by the ids of their calls."""
        parts = tuple(ToolResult(call, (Text(text),)) for call, text in results.items())
        self.messages.append(Message("tool", parts))

    def answered(self, reply: Reply) -> None:
        """Reasoning stays out: it was for this turn."""
        parts = tuple(block.part for block in reply.blocks if not isinstance(block.part, Thinking))
        self.messages.append(Message("assistant", parts or (Text(""),)))

    def broke_off(self, text: str) -> None:
        """A stopped answer is part of the conversation as far as it came; with nothing said, the question goes back."""
        if text:
            self.messages.append(Message("assistant", (Text(text),)))
        elif self.messages:
            self.messages.pop()

    def clear(self) -> None:
        self.messages, self.pictures = [], []

    def request(self) -> Request:
        knobs = self.knobs
        system = (Message("system", (Text(knobs.system),)),) if knobs.system.strip() else ()
        return Request(
            model=knobs.model,
            messages=(*system, *self.messages),
            tools=read_tools(knobs.tools),
            sampling=Sampling(temperature=knobs.temperature, top_p=knobs.top_p, top_k=knobs.top_k, seed=knobs.seed),
            max_tokens=knobs.max_tokens,
            stop=tuple(line for line in knobs.stop.split("\n") if line),
            reasoning=Reasoning(enabled=THINKING[knobs.thinking]),
            stream=True,
            include_usage=True,
        )


def wire(name: str) -> WireProtocol:
    found: WireProtocol = plugins.load("protocols", name)
    return found


def read_tools(text: str) -> tuple[Tool, ...]:
    """A JSON list of tools, in whichever protocol's words they were copied."""
    if not text.strip():
        return ()
    try:
        told = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the tools are no JSON: {error}", param="tools") from None
    listed = told if isinstance(told, list) else [told]
    return tuple(_tool(one, place) for place, one in enumerate(listed))


def _tool(told: Any, place: int) -> Tool:
    fields = told.get("function", told) if isinstance(told, dict) else None
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise InvalidRequest(f"tool {place + 1} has no name", param="tools")
    schema = fields.get("parameters") or fields.get("input_schema") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of {fields['name']} are no JSON Schema", param="tools")
    return Tool(fields["name"], str(fields.get("description") or ""), schema)


# --- the same request elsewhere ---------------------------------------------------------------------------------------


def pretty(body: bytes) -> str:
    """Indented for people; pictures are cut short, nobody reads them."""
    return msgspec.json.format(msgspec.json.encode(_short(msgspec.json.decode(body))), indent=2).decode()


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, str) and len(value) > 2000 and " " not in value[:2000]:
        return f"{value[:60]}… ({len(value)} characters)"
    return value


def curl(url: str, path: str, body: bytes, keyed: bool) -> str:
    lines = [f"curl -N {url}{path}", "-H 'content-type: application/json'"]
    if keyed:
        lines.append('-H "authorization: Bearer $MODELYARD_API_KEY"')
    return " \\\n  ".join([*lines, f"-d {shlex.quote(body.decode())}"])


_PYTHON = """import json
{imports}
import httpx

body = json.loads({body})
{headers}with httpx.stream("POST", "{url}{path}", json=body{given}, timeout=None) as reply:
    for line in reply.iter_lines():
        print(line)
"""


def python(url: str, path: str, body: bytes, keyed: bool) -> str:
    headers = 'headers = {"authorization": f"Bearer {os.environ[\'MODELYARD_API_KEY\']}"}\n' if keyed else ""
    return _PYTHON.format(
        imports="import os\n" if keyed else "",
        body=repr(body.decode()),
        headers=headers,
        url=url,
        path=path,
        given=", headers=headers" if keyed else "",
    )
