"""The JSON shapes of a chat request, as wide as clients write them: unknown fields and types are never an error."""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct, field

from modelyard.protocols.common.extensions import ExtensionFields


class PartBody(Struct, gc=False):
    """Any: a part of a type that we do not know may carry anything under these names."""

    type: str = ""
    text: Any = None
    image_url: Any = None
    detail: Any = None
    refusal: Any = None


class CalledFunction(Struct):
    name: str = ""
    arguments: Any = ""


class CalledCustom(Struct):
    name: str = ""
    input: str = ""


class CallBody(Struct):
    id: str | None = None
    type: str | None = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class MessageBody(Struct, gc=False):
    role: str
    content: str | list[PartBody | str] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None


class FunctionBody(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomBody(Struct):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ToolBody(Struct):
    type: str = "function"
    function: FunctionBody | None = None
    custom: CustomBody | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Named(Struct):
    name: str = ""


class Allowed(Struct):
    mode: str = "auto"


class ChoiceBody(Struct):
    type: str = "function"
    name: str | None = None
    mode: str = "auto"
    function: Named | None = None
    custom: Named | None = None
    allowed_tools: Allowed | None = None


class SchemaBody(Struct):
    """`Raw` may stand in no union: `null` arrives as the text it is. A factory, because no schema can show a Raw."""

    name: str | None = None
    schema: Raw = field(default_factory=Raw)
    strict: bool | None = None
    description: str | None = None


class FormatBody(Struct):
    """`schema` beside `json_object` is llama.cpp's way to ask for a schema."""

    type: str = "text"
    json_schema: SchemaBody | None = None
    schema: Raw = field(default_factory=Raw)


class StreamOptions(Struct):
    include_usage: bool | None = None


class ReasoningBody(Struct):
    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None


class ThinkingBody(Struct):
    type: str = ""
    budget_tokens: int | None = None


class ChatCompletionBody(ExtensionFields):
    """In the order in which `request.py` looks at them: what nearly every request says comes first."""

    model: str | None = None
    messages: list[MessageBody] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | ChoiceBody | None = None
    functions: list[FunctionBody] | None = None
    function_call: str | Named | None = None
    parallel_tool_calls: bool | None = None
    response_format: FormatBody | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningBody | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingBody | bool | str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
