"""Content blocks ⇄ core parts. What a local model cannot be shown is dropped with a warning, never refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import (
    Image,
    Part,
    ResultPart,
    Text,
    Thinking,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.protocols.anthropic_messages.body import Content, ContentBlock, content_decoder
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.reasoning_signature import unpack_reasoning

Warnings = dict[str, None]  # an ordered set
FILE_ID = "file-id:"  # an image in the upstream's file store: kept for forwarding, no local model can open it
UNPARSED = "__unparsedToolInput"  # how clients send back arguments that were not JSON


class _Source(Struct):
    type: str = ""
    media_type: Any = None
    data: Any = None
    url: Any = None
    file_id: Any = None
    content: Raw = Raw()


class _Unparsed(Struct):
    raw: str


_source_decoder = Decoder(_Source)
_unparsed_decoder = Decoder(dict[str, _Unparsed])
_string_decoder = Decoder(str)


def within(place: str, error: InvalidRequest) -> InvalidRequest:
    """The same complaint, with the path that leads to it put in front."""
    inner = error.param or ""
    said = error.message.removeprefix(f"{inner or 'body'}: ")
    path = place + ("." if inner and not inner.startswith("[") else "") + inner
    return InvalidRequest(f"{path}: {said}", param=path, code=error.code)


def read_content(content: Content, warnings: Warnings) -> list[Part]:
    """A string is one text block; absence is no block at all."""
    if isinstance(content, str):
        return [Text(content)]
    parts: list[Part] = []
    for place, block in enumerate(content or ()):
        read = _READERS.get(block.type)
        if read is None:
            warnings[f"block_dropped:{block.type}"] = None
            continue
        try:
            parts.extend(read(block, warnings))
        except InvalidRequest as error:
            raise within(f"content[{place}]", error) from None
    return parts


def says_something(parts: Iterable[Part]) -> bool:
    """An empty system prompt, as a string or as a block, is none."""
    return any(not isinstance(part, Text) or part.text for part in parts)


def _string(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    raise InvalidRequest(f"{field}: a string is required", param=field, code="invalid_type")


def _nested(raw: Raw, warnings: Warnings) -> list[Part]:
    if not raw:
        return []
    try:
        inner = decode(content_decoder, bytes(raw))
    except InvalidRequest as error:
        raise within("content", error) from None
    return read_content(inner, warnings)


def _source(block: ContentBlock) -> _Source:
    try:
        return decode(_source_decoder, bytes(block.source) or b"{}")
    except InvalidRequest as error:
        raise within("source", error) from None


# --- one reader a block type ----------------------------------------------------------------------------------------


def _text(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (Text(_string(block.text, "text")),)


def _image(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    source = _source(block)
    if source.type == "base64":
        media = _string(source.media_type, "source.media_type")
        return (Image(f"data:{media};base64,{_string(source.data, 'source.data')}"),)
    if source.type == "url":
        return (Image(_string(source.url, "source.url")),)
    if source.type == "file":
        return (Image(FILE_ID + _string(source.file_id, "source.file_id")),)
    warnings[f"image_dropped:{source.type}"] = None
    return ()


def _document(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    source = _source(block)
    head = [told for told in (block.title, block.context) if isinstance(told, str) and told]
    if source.type == "text":
        return (Text("\n\n".join([*head, _string(source.data, "source.data")])),)
    if source.type == "content":
        return (*map(Text, head), *_nested(source.content, warnings))
    warnings[f"document_dropped:{source.type}"] = None
    return ()


def _search_result(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    where = _decoded_string(block.source)
    head = [told for told in (block.title, where) if isinstance(told, str) and told]
    body = [part.text for part in _nested(block.content, warnings) if isinstance(part, Text)]
    return (Text("\n\n".join(["\n".join(head), *body] if head else body)),)


def _decoded_string(raw: Raw) -> str | None:
    try:
        return _string_decoder.decode(raw)
    except DecodeError:
        return None


def _thinking(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    signature = block.signature if isinstance(block.signature, str) else ""
    text = block.thinking if isinstance(block.thinking, str) else ""
    return (Thinking(text or unpack_reasoning(signature) or "", signature),)


def _redacted(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    data = block.data if isinstance(block.data, str) else ""
    text = unpack_reasoning(data)
    return (Thinking("", data, redacted=True) if text is None else Thinking(text, data),)


def _tool_use(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (ToolCall(_string(block.id, "id"), _string(block.name, "name"), read_input(block.input)),)


def read_input(raw: Raw) -> str:
    """A call's arguments as they stood on the wire."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("input: the text is not UTF-8", param="input", code="invalid_json") from None
    if UNPARSED in text[:40] and (unparsed := _unparsed(text)) is not None:
        return unparsed
    return "{}" if text in ("", "null") else text


def _unparsed(text: str) -> str | None:
    try:
        found = _unparsed_decoder.decode(text)
    except DecodeError:
        return None
    return found[UNPARSED].raw if found.keys() == {UNPARSED} else None


def _tool_result(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    content: list[ResultPart] = []
    for part in _nested(block.content, warnings):
        if isinstance(part, Text | Image | ToolReference):
            content.append(part)
        else:
            warnings["block_dropped:in_tool_result"] = None
    return (ToolResult(_string(block.tool_use_id, "tool_use_id"), tuple(content), block.is_error is True),)


def _tool_reference(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (ToolReference(_string(block.tool_name, "tool_name")),)


_READERS: Mapping[str, Callable[[ContentBlock, Warnings], Iterable[Part]]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "thinking": _thinking,
    "redacted_thinking": _redacted,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "tool_reference": _tool_reference,
}
