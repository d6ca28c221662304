"""The pool dialect's request as it stands on the wire, and the sign by which a body is known to be in it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from modelyard.protocols.common.extensions import ExtensionFields

ITEM_TYPES = frozenset({"text", "image_url"})  # of `input`; OpenAI's own are called input_text and input_image


class ImageUrl(Struct):
    url: str = ""
    detail: str | None = None


class Item(Struct):
    """A content item; `type` says which of the fields counts."""

    type: str = ""
    text: str | None = None
    image_url: ImageUrl | str | None = None


class Turn(Struct):
    role: str = ""
    content: str | list[Item] | None = None


class Decoding(ExtensionFields):
    """The dialect has seven fields here; the extension fields of every protocol may stand among them."""

    max_tokens: int | None = None
    stop: str | list[str] | None = None


class PoolResponsesBody(ExtensionFields):
    model: str | None = None
    input: str | list[Item] | None = None
    messages: list[Turn] | None = None
    instructions: str | None = None
    source_lang_code: str | None = None
    target_lang_code: str | None = None
    allow_remote: bool | None = None
    stream: bool | None = None
    thinking: str | None = None
    decoding: Decoding | None = None
    tools: Any = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


BODY = msgspec.json.Decoder(PoolResponsesBody)
