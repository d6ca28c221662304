"""The request that a chat sends, and the same request as text and code. Pure."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core.chat import Chat, ChatSettings
from modelyard.core.errors import InvalidRequest
from modelyard.core.protocol import EventReader
from modelyard.core.request import (
    Audio,
    Document,
    Image,
    Message,
    Part,
    Reasoning,
    Request,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from modelyard.http.errors import load_protocol
from modelyard.http.inference import PROGRESS_HEADER
from modelyard.protocols.openai_responses.client import ResponsesStreamReader
from modelyard.workbench import formatting as fmt

PROTOCOLS = {
    "openai_chat": "OpenAI Chat Completions",
    "openai_responses": "OpenAI Responses",
    "anthropic_messages": "Anthropic Messages",
}
THINKING_MODES = {"default": None, "on": True, "off": False}
_MAX_SHOWN_CHARACTERS = 2000


def wire_protocol(settings: ChatSettings) -> str:
    """Chat Completions have no way to name a server of tools."""
    return "openai_responses" if settings.mcp else settings.protocol


def answer_reader(settings: ChatSettings) -> EventReader:
    """With the calls that the server runs."""
    name = wire_protocol(settings)
    return ResponsesStreamReader(server_calls=True) if name == "openai_responses" else load_protocol(name).reader()


def chat_request(chat: Chat, model: str, end: str | None = None, draft: tuple[Part, ...] = ()) -> Request:
    """The request for an answer to the turn `end`, by default the last one; `draft` is a message that follows it."""
    settings = chat.settings
    system = (Message("system", (Text(settings.system),)),) if settings.system.strip() else ()
    drafted = (Message("user", draft),) if draft else ()
    return Request(
        model=model,
        messages=(*system, *_messages(chat, end), *drafted),
        tools=(*read_tools(settings.tools), *map(_server_tool, settings.mcp)),
        sampling=Sampling(
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, seed=settings.seed
        ),
        max_tokens=settings.max_tokens,
        stop=tuple(line for line in settings.stop.split("\n") if line),
        reasoning=Reasoning(enabled=THINKING_MODES[settings.thinking]),
        stream=True,
        include_usage=True,
    )


def _server_tool(name: str) -> Tool:
    return Tool("mcp", kind="server", type="mcp", parameters={"server_label": name, "require_approval": "never"})


def _messages(chat: Chat, end: str | None) -> Iterator[Message]:
    """Without the calls that the server ran, where the protocol has no item for them: the answer has what they gave."""
    for message in chat.messages(end):
        if wire_protocol(chat.settings) == "openai_responses" or message.role != "assistant":
            yield message
            continue
        ran = {part.id for part in message.parts if isinstance(part, ToolCall) and part.server is not None}
        kept = [part for part in message.parts if _call_of(part) not in ran]
        yield replace(message, parts=tuple(kept) or (Text(""),))


def _call_of(part: Part) -> str | None:
    return part.id if isinstance(part, ToolCall) else part.call_id if isinstance(part, ToolResult) else None


# --- how far it is ----------------------------------------------------------------------------------------------------

_COMMENT = f": {PROGRESS_HEADER}: ".encode()


class ProgressReader:
    """Finds what a stream tells about its progress, in comments between its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [line.removeprefix(_COMMENT) for line in lines if line.startswith(_COMMENT)]
        return [msgspec.json.decode(each) for each in found]


def progress_text(progress: Mapping[str, Any]) -> tuple[str, float]:
    """What to show, and the share that is done; 0 if nobody knows."""
    match progress.get("state"):
        case "queued":
            others = int(progress.get("waiting") or 0) - 1
            beside = f", with {fmt.plural(others, 'other request')}" if others > 0 else ""
            return f"Waiting for a free slot{beside}", 0
        case "loading":
            share = float(progress.get("progress") or 0)
            return f"Loading the model: {progress.get('phase') or 'waiting for memory'} · {fmt.percent(share)}", share
        case "reading":
            done, total = int(progress["done"]), int(progress["total"])
            return f"Reading the prompt: {fmt.count(done)} of {fmt.count(total)} tokens", done / max(1, total)
    return "Waiting", 0


# --- files ------------------------------------------------------------------------------------------------------------

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
PDF_TYPE = "application/pdf"
_AUDIO_TYPES = {  # what browsers call the formats
    **dict.fromkeys(("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"), "audio/wav"),
    **dict.fromkeys(("audio/mpeg", "audio/mp3"), "audio/mpeg"),
    **dict.fromkeys(("audio/flac", "audio/x-flac"), "audio/flac"),
}
FILE_TYPES = (*IMAGE_TYPES, *_AUDIO_TYPES, PDF_TYPE)


def attached_part(name: str, content_type: str, data: bytes) -> Image | Audio | Document:
    """A file as a part of a message. Raises InvalidRequest."""
    encoded = base64.b64encode(data).decode()
    if content_type in IMAGE_TYPES:
        return Image(f"data:{content_type};base64,{encoded}")
    if content_type in _AUDIO_TYPES:
        return Audio(f"data:{_AUDIO_TYPES[content_type]};base64,{encoded}")
    if content_type == PDF_TYPE:
        return Document(f"data:{PDF_TYPE};base64,{encoded}", name)
    kind = f" ({content_type})" if content_type else ""
    raise InvalidRequest(f"{name}{kind} cannot be attached: images, WAV, MP3, FLAC and PDF can", code="invalid_file")


def refusal(part: Part, name: str, modalities: Mapping[str, Sequence[str]]) -> str:
    """Why a model does not take this file, given what each model takes; empty if all do. Every model takes a PDF: at
    least the text of its pages."""
    needed = "image" if isinstance(part, Image) else "audio" if isinstance(part, Audio) else "text"
    for model, taken in modalities.items():
        if needed not in taken:
            return f"{model} takes {' and '.join(taken)} only: {name} is not attached."
    return ""


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
    """Indented JSON in which files are shortened."""
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
