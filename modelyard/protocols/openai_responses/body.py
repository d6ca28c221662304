"""The Responses request as it stands on the wire: wide structs, because clients send items that nobody announced."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from modelyard.protocols.common.extensions import ExtensionFields


class ImageUrl(Struct):
    """The Chat spelling of an image, which some clients send here too."""

    url: str = ""
    detail: str | None = None


class Part(Struct, gc=False):
    """A content part of any type; `type` says which of the fields count."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    detail: str | None = None


class Item(Struct, gc=False):
    """An input item of any type. Ids of items are not read: nothing here depends on them.

    `Any` stands where item types that we do not know use the same field name for another shape.
    """

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | dict[str, Any] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: str | list[Part] | dict[str, Any] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class Format(Struct):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(Struct):
    format: Format | None = None


class ReasoningSettings(Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name of `summary`


class ResponsesBody(ExtensionFields):
    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None  # not OpenAI's; the same extension as on Chat
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # Keys of the other dialect on this path: that they are there is all that is asked of them here.
    decoding: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    thinking: Raw | UnsetType = UNSET
    source_lang_code: Raw | UnsetType = UNSET
    target_lang_code: Raw | UnsetType = UNSET


BODY = msgspec.json.Decoder(ResponsesBody)
