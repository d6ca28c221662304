"""Where images and audio are in a prompt.

For an engine that reads vectors between tokens each of them becomes a mark in the text; after the template is rendered,
the prompt is split at the marks. A mark holds two of the shield's sentinels in a row, which client text cannot hold.
For an engine that expands placeholder tokens by itself, the model's own template says how a placeholder is spelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Audio, Image, Message, Part, Request, ToolResult
from modelyard.prompt.template import ChatTemplate, TemplateFailed
from modelyard.tokenizer.shield import SENTINEL

MediaPart = Image | Audio

_EDGE = SENTINEL * 2
_MARK = re.compile(f"{_EDGE}\\[(?:image|audio) (\\d+)\\]{_EDGE}")


def media_parts(request: Request) -> Iterator[MediaPart]:
    """In the order of the conversation."""
    for message in request.messages:
        yield from _of_message(message)


def _of_message(message: Message) -> Iterator[MediaPart]:
    for part in message.parts:
        if isinstance(part, MediaPart):
            yield part
        elif isinstance(part, ToolResult):
            yield from (each for each in part.content if isinstance(each, MediaPart))


# --- marks ------------------------------------------------------------------------------------------------------------


def mark(part: Part, number: int) -> str:
    """The place of the request's image or audio with this number, from 1 on."""
    return f"{_EDGE}[{'image' if isinstance(part, Image) else 'audio'} {number}]{_EDGE}"


def split_at_marks(text: str) -> tuple[list[str], list[int]]:
    """The texts around the marks, and the number of each mark."""
    parts = _MARK.split(text)
    return parts[::2], [int(number) for number in parts[1::2]]


def require_all_marks(text: str, count: int) -> None:
    """Raises if the template dropped or repeated one: the model would not see what the client sent."""
    if sorted(split_at_marks(text)[1]) != list(range(1, count + 1)):
        raise InvalidRequest(
            "the model's chat template drops an image or audio part of this conversation; send it in a user message, "
            "or set another chat_template for the model",
            code="modality_unsupported",
            param="messages",
        )


# --- placeholders -----------------------------------------------------------------------------------------------------


def image_placeholder(template: ChatTemplate) -> str | None:
    """How the template writes an image; None if it does not."""
    content = [{"type": "text", "text": "probe one"}, {"type": "image"}, {"type": "text", "text": "probe two"}]
    try:
        text = template.render({"messages": [{"role": "user", "content": content}], "add_generation_prompt": True})
    except TemplateFailed:
        return None
    between = text.partition("probe one")[2].partition("probe two")
    return between[0].strip() or None if between[1] else None


def joined(items: Sequence[tuple[str, bool]]) -> str:
    """Texts, one per line, and the marks or placeholders of media (True), which get no line of their own."""
    out, after_media = "", True
    for text, is_media in items:
        out += text if is_media or after_media else f"\n{text}"
        after_media = is_media
    return out
