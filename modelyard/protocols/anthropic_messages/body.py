"""The JSON bodies of the wire as structs, wide open to what clients will send next year.

A content block is ONE struct, not a tagged union: a union would refuse a type it does not know. Its fields are `Any` or
`Raw` because a block type of the future may use the same name for something else; `content.py` checks what it uses.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from modelyard.protocols.common.extensions import ExtensionFields


class ContentBlock(Struct, gc=False):
    type: str
    text: Any = None
    thinking: Any = None
    signature: Any = None
    data: Any = None
    id: Any = None
    name: Any = None
    input: Raw = field(default_factory=Raw)
    tool_use_id: Any = None
    tool_name: Any = None
    is_error: Any = None
    title: Any = None
    context: Any = None
    source: Raw = field(default_factory=Raw)
    content: Raw = field(default_factory=Raw)


Content = str | list[ContentBlock] | None


class Turn(Struct, gc=False):
    role: str
    content: Content = None


class ToolBody(Struct):
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoiceBody(Struct):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Struct):
    type: str = ""
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct):
    type: str = ""
    schema: Raw = field(default_factory=Raw)


class OutputConfig(Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesBody(ExtensionFields, kw_only=True):
    model: str = ""
    messages: list[Turn] = field(default_factory=list)
    system: Content = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | str | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where betas had it before output_config
    metadata: dict[str, Any] | None = None


class ToolFields(Struct):
    """The tools of a body with every field: only server tools need a second look."""

    tools: list[dict[str, Any]]


class UsageBody(Struct, frozen=True):
    """Missing counts stay None: a later event may know only some of them."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: dict[str, Any] | None = None


class ReplyBody(Struct, frozen=True):
    id: str = ""
    model: str = ""
    content: list[ContentBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: UsageBody = UsageBody()


body_decoder = Decoder(MessagesBody)
tool_fields_decoder = Decoder(ToolFields)
reply_decoder = Decoder(ReplyBody)
content_decoder: Decoder[Content] = Decoder(Content)
