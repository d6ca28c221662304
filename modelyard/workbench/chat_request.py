"""The request that a chat sends, and the same request as text and code. Pure."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from modelyard.core.chat import Chat
from modelyard.core.errors import InvalidRequest
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
)

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
