"""Reads a Messages request body into a core request.

Reading is lenient: unknown fields, block types, enum values and betas are never an error. What a local model cannot be
shown is dropped and named in `Request.warnings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, TypeVar

from msgspec import DecodeError, Raw, Struct, ValidationError, convert, field
from msgspec.json import Decoder
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import (
    FILE_ID,
    TOOL_SEARCH,
    Compaction,
    Constraint,
    Document,
    Image,
    Message,
    Part,
    Reasoning,
    Request,
    ResultPart,
    Role,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
    ToolServer,
    summary_message,
)
from modelyard.protocols.anthropic_messages import context, mcp
from modelyard.protocols.anthropic_messages.client_tools import is_client_tool, read_client_tools
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    Ignored,
    check_option,
    check_positive,
    ignored_fields,
    read_constraint,
    read_priority,
    read_sampling,
)
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.reasoning_signature import unpack_reasoning

UNPARSED = "__unparsedToolInput"  # how clients return arguments that were not JSON

Warnings = dict[str, None]  # an ordered set
T = TypeVar("T")


# --- the body -------------------------------------------------------------------------------------------------------


class ContentBlock(Struct, gc=False):
    """Any content block. It is ONE struct, not a tagged union: a union would reject unknown types.

    Fields are `Any` or `Raw` because a future block type may use the same name for another shape; the readers below
    check what they use.
    """

    type: limits.Word
    text: Any = None
    thinking: Any = None
    signature: Any = None
    data: Any = None
    id: Any = None
    name: Any = None
    input: Raw = field(default_factory=Raw)
    tool_use_id: Any = None
    tool_name: Any = None
    toolset_name: Any = None
    server_name: Any = None
    is_error: Any = None
    title: Any = None
    context: Any = None
    source: Raw = field(default_factory=Raw)
    content: Raw = field(default_factory=Raw)
    tool: Any = None


Content = limits.Text | Annotated[list[ContentBlock], limits.Parts] | None


class AnthropicMessage(Struct, gc=False):
    role: limits.Word
    content: Content = None
    clear_at: limits.Word | None = None
    output_config: AnthropicOutputConfig | None = None


class AnthropicTool(Struct):
    name: limits.Name | None = None
    description: limits.Text | None = None
    input_schema: limits.JsonObject | None = None
    type: limits.Word | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class AnthropicToolChoice(Struct):
    type: limits.Word = "auto"
    name: limits.Name | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Struct):
    type: limits.Word = ""
    budget_tokens: int | None = None
    display: limits.Word | None = None


class AnthropicOutputFormat(Struct):
    type: limits.Word = ""
    schema: Raw = field(default_factory=Raw)


class AnthropicOutputConfig(Struct):
    effort: limits.Word | None = None
    format: AnthropicOutputFormat | None = None


class MessagesBody(ExtensionFields, kw_only=True):
    model: limits.Name = ""
    messages: Annotated[list[AnthropicMessage], limits.Messages] = field(default_factory=list)
    system: Content = None
    max_tokens: int | None = None
    stop_sequences: limits.StopStrings | None = None
    stream: bool | None = None
    tools: Annotated[list[AnthropicTool], limits.Tools] | None = None
    tool_choice: AnthropicToolChoice | limits.Word | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutputConfig | None = None
    output_format: AnthropicOutputFormat | None = None  # the older beta name of output_config.format
    metadata: limits.JsonObject | None = None
    mcp_servers: mcp.McpServerList | None = None
    thread: context.AnthropicThread | None = None
    compaction: context.AnthropicCompaction | None = None
    context_management: context.AnthropicContext | None = None
    fallbacks: context.Fallbacks = None
    # Without effect: they belong to Anthropic's services.
    billing_policy: Ignored = None
    cache_control: Ignored = None
    container: Ignored = None
    diagnostics: Ignored = None
    fallback_credit_token: Ignored = None
    inference_geo: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None


class TypedToolFields(Struct):
    """The tools of a body with every field. Only tools with a type of their own need this second decoding."""

    tools: Annotated[list[limits.JsonObject], limits.Tools]


class Source(Struct):
    """The `source` of an image or document block."""

    type: limits.Word = ""
    media_type: Any = None
    data: Any = None
    url: Any = None
    file_id: Any = None
    content: Raw = Raw()


class FoundTool(Struct):
    tool_name: limits.Name


class FoundTools(Struct):
    """The `content` of a tool_search_tool_result block."""

    tool_references: Annotated[list[FoundTool], limits.Tools] = field(default_factory=list)
    error_code: limits.Word | None = None
    error_message: limits.Text | None = None


class UnparsedInput(Struct):
    raw: limits.Text


MAX_TEMPERATURE = 1.0
_body_decoder = Decoder(MessagesBody)
_typed_tool_decoder = Decoder(TypedToolFields)
_content_decoder: Decoder[Content] = Decoder(Content)
_source_decoder = Decoder(Source)
_search_decoder = Decoder(FoundTools)
_unparsed_decoder = Decoder(dict[str, UnparsedInput])
_string_decoder = Decoder(str)


# --- the request ----------------------------------------------------------------------------------------------------

_BILLING_HEADER = "x-anthropic-billing-header"
_ROLES: Mapping[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",  # not Anthropic's, but proxies in front of us forward it
}
# `adaptive` lets the model decide how much to think, not whether: clients that want none omit it or send `disabled`.
_THINKING_ENABLED = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_DEFAULT_REASONING = Reasoning()
_AUTO = ToolChoice()


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """Also reads the body of count_tokens, which is the same without `max_tokens`."""
    parsed = decode(_body_decoder, body)
    if not parsed.model:
        raise InvalidRequest("model: the name of a model is required", param="model")
    thread = parsed.thread
    previous = thread.previous_message_id if thread is not None and thread.type == "continue" else None
    if thread is not None and thread.type == "continue" and not previous:
        raise InvalidRequest("thread.previous_message_id: name the reply to continue", param="thread")
    if previous and (parsed.system or parsed.tools):
        raise InvalidRequest("a thread has the system prompt and the tools of its first request", param="thread")
    if not parsed.messages and not previous:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    check_positive("max_tokens", parsed.max_tokens)
    warnings: Warnings = dict.fromkeys(ignored_fields(parsed))
    user = _read_user(parsed.metadata)
    tool_choice, parallel = _read_tool_choice(parsed.tool_choice, warnings)

    def ignore(name: str) -> None:
        warnings[f"field_ignored:{name}"] = None

    managed = None
    if parsed.compaction is not None or parsed.context_management is not None:
        managed = context.read_context(parsed.compaction, parsed.context_management, ignore)
    # A client sends few of the fields: what reads the others is not called.
    return Request(
        model=parsed.model,
        messages=_read_messages(parsed, warnings),
        tools=_with_changes(parsed, _read_tools(parsed, body) if parsed.tools or parsed.mcp_servers else ()),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        sampling=read_sampling(parsed, MAX_TEMPERATURE),
        max_tokens=parsed.max_tokens,
        stop=_read_stop_sequences(parsed.stop_sequences) if parsed.stop_sequences else (),
        constraint=read_constraint(parsed, ("output_config.format", _read_output_format(parsed))),
        reasoning=_read_reasoning(parsed),
        stream=bool(parsed.stream),
        lora_adapter=parsed.lora_adapter,
        chat_template_kwargs=parsed.chat_template_kwargs or {},
        documents=parsed.documents or (),
        priority=read_priority(parsed),
        session=_read_session(headers, user),
        user=user,
        metadata=parsed.metadata,
        previous=previous,
        thread=thread is not None,
        context=managed,
        fallbacks=context.read_fallbacks(parsed.fallbacks, _read_fallback_thinking) if parsed.fallbacks else (),
        warnings=tuple(warnings),
    )


def _read_stop_sequences(sequences: list[str]) -> tuple[str, ...]:
    limits.check_stop_strings("stop_sequences", sequences)
    for index, stop in enumerate(sequences):
        if not stop:
            path = f"stop_sequences[{index}]"
            raise InvalidRequest(f"{path}: an empty string would stop every answer at once", param=path)
    return tuple(sequences)


def _read_output_format(body: MessagesBody) -> Constraint | None:
    output_format = (body.output_config and body.output_config.format) or body.output_format
    if output_format is None:
        return None
    if output_format.type == "json_schema":
        try:
            schema = bytes(output_format.schema).decode() or "{}"
        except UnicodeDecodeError:
            raise InvalidRequest("output_config.format.schema: not UTF-8", param="output_config.format") from None
        limits.check_length("output_config.format.schema", schema, limits.MAX_SCHEMA)
        return Constraint("json_schema", schema)
    check_option("output_config.format.type", output_format.type, ("json_schema", "json_object"))
    return Constraint("json_object")


def _read_reasoning(body: MessagesBody) -> Reasoning:
    changes = [body.output_config, *(message.output_config for message in body.messages)]
    effort = next((change.effort for change in reversed(changes) if change is not None and change.effort), None)
    thinking = body.thinking
    if thinking is None:
        return Reasoning(effort=effort) if effort else _DEFAULT_REASONING
    return Reasoning(
        enabled=_THINKING_ENABLED.get(thinking.type),
        effort=effort,
        budget=thinking.budget_tokens,
        summary=thinking.display,
    )


def _read_fallback_thinking(thinking: dict[str, Any]) -> Reasoning:
    return _read_reasoning(MessagesBody(thinking=_converted(thinking, AnthropicThinking, "fallbacks.thinking")))


def _converted(value: dict[str, Any], kind: type[T], path: str) -> T:
    try:
        return convert(value, kind)
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {error}", param=path, code="invalid_type") from None


def _read_user(metadata: dict[str, Any] | None) -> str | None:
    user = metadata.get("user_id") if metadata else None
    return user if isinstance(user, str) and user else None


def _read_session(headers: Mapping[str, str], user: str | None) -> str | None:
    """The conversation this request belongs to. A subagent has its own conversation."""
    if session := headers.get("x-claude-code-session-id"):
        agent = headers.get("x-claude-code-agent-id")
        return f"{session}:{agent}" if agent else session
    return headers.get("x-session-id") or headers.get("x-session-affinity") or user


# --- tools ----------------------------------------------------------------------------------------------------------

_NOT_SETTINGS = frozenset({"type", "name", "cache_control", "defer_loading"})


def _read_tools(body: MessagesBody, data: bytes) -> tuple[Tool, ...]:
    tools, servers = body.tools or [], mcp.read_servers(body.mcp_servers) if body.mcp_servers else {}
    fields: list[dict[str, Any]] = []
    if any(_has_type(tool) for tool in tools):
        fields = decode(_typed_tool_decoder, data).tools
    read = tuple(_iter_tools(tools, fields, servers))
    return (*read, *mcp.without_toolset(servers, read)) if servers else read


def _with_changes(body: MessagesBody, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools as blocks within the conversation have changed them: one that is defined there is shown there."""
    found, changed = {tool.name: tool for tool in tools}, False
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if block.type in ("tool_addition", "tool_removal") and isinstance(block.tool, dict):
                changed, name = True, _changed_name(block)
                if isinstance(entry := block.tool.get("definition"), dict):
                    for new in _iter_tools([_converted(entry, AnthropicTool, "tool.definition")], [entry], {}):
                        found.setdefault(new.name, replace(new, deferred=True))
                elif block.type == "tool_removal":
                    found.pop(name, None)
    return tuple(found.values()) if changed else tools


def _changed_name(block: ContentBlock) -> str:
    tool = block.tool if isinstance(block.tool, dict) else {}
    definition = tool.get("definition")
    names = definition if isinstance(definition, dict) else tool
    return _string(names.get("name") or names.get("server_name") or names.get("type"), "tool.name")


def _has_type(tool: AnthropicTool) -> bool:
    """It is a tool of Anthropic, which runs there or in the client."""
    return tool.type is not None and tool.type != "custom"


def _iter_tools(
    tools: list[AnthropicTool], fields: list[dict[str, Any]], servers: Mapping[str, ToolServer]
) -> Iterator[Tool]:
    for index, tool in enumerate(tools):
        deferred = tool.defer_loading is True
        if tool.type is not None and is_client_tool(tool.type):
            yield from read_client_tools(tool.type, fields[index])
        elif _has_type(tool):
            settings = {name: value for name, value in fields[index].items() if name not in _NOT_SETTINGS}
            is_mcp = tool.type == mcp.TOOLSET
            server = mcp.read_toolset(settings, servers, f"tools[{index}]") if is_mcp else None
            name = tool.name or (server.label if server is not None else tool.type or "")
            yield Tool(name, "", settings, "server", tool.type, deferred=deferred, server=server)
        elif tool.name:
            schema = tool.input_schema or {}
            yield Tool(tool.name, tool.description or "", schema, strict=tool.strict, deferred=deferred)
        else:
            raise InvalidRequest(f"tools[{index}].name: a tool needs a name", param=f"tools[{index}].name")


def _read_tool_choice(choice: AnthropicToolChoice | str | None, warnings: Warnings) -> tuple[ToolChoice, bool | None]:
    """The choice and whether parallel calls are allowed."""
    if choice is None:
        return _AUTO, None
    if isinstance(choice, str):
        choice = AnthropicToolChoice(choice)
    serial = choice.disable_parallel_tool_use
    parallel = None if serial is None else not serial
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name: name the tool that must be called", param="tool_choice.name")
        return ToolChoice("named", choice.name), parallel
    if choice.type == "any":
        return ToolChoice("required"), parallel
    if choice.type == "none":
        return ToolChoice("none"), parallel
    if choice.type != "auto":
        warnings[f"tool_choice_unknown:{choice.type}"] = None
    return _AUTO, parallel


# --- messages -------------------------------------------------------------------------------------------------------


def _read_messages(body: MessagesBody, warnings: Warnings) -> tuple[Message, ...]:
    messages: list[Message] = []
    if body.system and has_content(system := _read_system(body.system, warnings)):
        messages.append(Message("system", tuple(system)))
    users = [index for index, message in enumerate(body.messages) if message.role == "user"]
    for index, message in enumerate(body.messages):
        if message.clear_at == "next_user_message" and users and users[-1] > index:
            continue
        try:
            _read_message(messages, message, warnings)
        except InvalidRequest as error:
            raise _with_path(f"messages[{index}]", error) from None
    return tuple(messages)


def _read_system(system: Content, warnings: Warnings) -> list[Part]:
    try:
        return _drop_billing(read_content(system, warnings), warnings)
    except InvalidRequest as error:
        param = (error.param or "").replace("content", "system", 1)
        raise InvalidRequest(error.message.replace("content", "system", 1), param=param, code=error.code) from None


def _read_message(messages: list[Message], message: AnthropicMessage, warnings: Warnings) -> None:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"role: unknown role {message.role!r}, expected one of {known}", param="role")
    parts = read_content(message.content, warnings)
    if role == "system" and (parts or message.output_config is not None):
        parts = _drop_billing(parts, warnings)
        if not parts:
            return
    if (at := next((at for at, part in enumerate(parts) if isinstance(part, Compaction)), None)) is not None:
        del messages[1 if messages and messages[0].role == "system" else 0 :]  # the summary stands for them
        messages.append(summary_message("".join(part.text for part in parts[at : at + 1] if isinstance(part, Text))))
        parts = parts[at + 1 :]
        if not parts:
            return
    if not any(isinstance(part, ToolResult) for part in parts):
        messages.append(Message(role, tuple(parts)))
        return
    # Tool results become `tool` messages in their place; neighbouring results share one, also across turns.
    for is_result, group in groupby(parts, lambda part: isinstance(part, ToolResult)):
        if is_result and messages and messages[-1].role == "tool":
            messages[-1] = Message("tool", (*messages[-1].parts, *group))
        else:
            messages.append(Message("tool" if is_result else role, tuple(group)))


def _drop_billing(parts: Iterable[Part], warnings: Warnings) -> list[Part]:
    """Remove Claude Code's billing line: it changes with every request and would invalidate the KV prefix behind it."""
    kept: list[Part] = []
    for part in parts:
        if isinstance(part, Text) and part.text.startswith(_BILLING_HEADER):
            warnings["billing_header_dropped"] = None
            if rest := part.text.partition("\n")[2].lstrip("\n"):
                kept.append(Text(rest))
        else:
            kept.append(part)
    return kept


def has_content(parts: Iterable[Part]) -> bool:
    """False for an empty system prompt, as a string or as a block."""
    return any(not isinstance(part, Text) or part.text for part in parts)


# --- content blocks -------------------------------------------------------------------------------------------------


def read_content(content: Content, warnings: Warnings) -> list[Part]:
    """A string is one text block; a missing content has no block."""
    if isinstance(content, str):
        return [Text(content)]
    parts: list[Part] = []
    for index, block in enumerate(content or ()):
        read = _BLOCK_READERS.get(block.type)
        if read is None:
            warnings[f"block_dropped:{block.type}"] = None
            continue
        try:
            parts.extend(read(block, warnings))
        except InvalidRequest as error:
            raise _with_path(f"content[{index}]", error) from None
    return parts


def _with_path(path: str, error: InvalidRequest) -> InvalidRequest:
    """The same error with `path` in front of its field."""
    inner = error.param or ""
    message = error.message.removeprefix(f"{inner or 'body'}: ")
    path += ("." if inner and not inner.startswith("[") else "") + inner
    return InvalidRequest(f"{path}: {message}", param=path, code=error.code)


def _string(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    raise InvalidRequest(f"{name}: a string is required", param=name, code="invalid_type")


def _nested_content(raw: Raw, warnings: Warnings) -> list[Part]:
    if not raw:
        return []
    try:
        content = decode(_content_decoder, bytes(raw))
    except InvalidRequest as error:
        raise _with_path("content", error) from None
    return read_content(content, warnings)


def _source(block: ContentBlock) -> Source:
    try:
        return decode(_source_decoder, bytes(block.source) or b"{}")
    except InvalidRequest as error:
        raise _with_path("source", error) from None


def _headings(*values: object) -> list[str]:
    return [value for value in values if isinstance(value, str) and value]


def _read_text(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (Text(_string(block.text, "text")),)


def _read_image(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    source = _source(block)
    if source.type == "base64":
        media_type = _string(source.media_type, "source.media_type")
        return (Image(f"data:{media_type};base64,{_string(source.data, 'source.data')}"),)
    if source.type == "url":
        return (Image(_string(source.url, "source.url")),)
    if source.type == "file":
        return (Image(FILE_ID + _string(source.file_id, "source.file_id")),)
    warnings[f"image_dropped:{source.type}"] = None
    return (Text("[image: it was sent in a form that is not read here]"),)  # the model is told, as for a document


def _read_document(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    source, headings = _source(block), _headings(block.title, block.context)
    if source.type == "text":
        return (Text("\n\n".join([*headings, _string(source.data, "source.data")])),)
    if source.type == "content":
        return (*map(Text, headings), *_nested_content(source.content, warnings))
    name = block.title if isinstance(block.title, str) else ""
    context = map(Text, _headings(block.context))
    if source.type == "base64":
        media_type = _string(source.media_type, "source.media_type")
        return (*context, Document(f"data:{media_type};base64,{_string(source.data, 'source.data')}", name))
    if source.type == "url":
        return (*context, Document(_string(source.url, "source.url"), name))
    if source.type == "file" and isinstance(source.file_id, str):
        return (*context, Document(FILE_ID + source.file_id, name))
    # The model is told: a refusal would end an agent's session, because the document stays in its history.
    warnings[f"document_replaced:{source.type}"] = None
    return (Text("\n\n".join([*headings, "[document: this model reads text only]"])),)


def _read_search_result(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    try:
        source = _string_decoder.decode(block.source)
    except DecodeError:
        source = None
    headings = _headings(block.title, source)
    texts = [part.text for part in _nested_content(block.content, warnings) if isinstance(part, Text)]
    return (Text("\n\n".join(["\n".join(headings), *texts] if headings else texts)),)


def _read_thinking(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    signature = block.signature if isinstance(block.signature, str) else ""
    text = block.thinking if isinstance(block.thinking, str) else ""
    return (Thinking(text or unpack_reasoning(signature) or "", signature),)


def _read_redacted(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    data = block.data if isinstance(block.data, str) else ""
    text = unpack_reasoning(data)
    return (Thinking("", data, redacted=True) if text is None else Thinking(text, data),)


def _read_tool_use(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    toolset = None if block.toolset_name is None else _string(block.toolset_name, "toolset_name")
    return (ToolCall(_string(block.id, "id"), _string(block.name, "name"), read_input(block.input), toolset),)


def read_input(raw: Raw) -> str:
    """The arguments of a call, exactly as the client wrote them."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("input: the text is not UTF-8", param="input", code="invalid_json") from None
    if UNPARSED in text[:40]:
        try:
            unparsed = _unparsed_decoder.decode(text)
        except DecodeError:
            return text
        if unparsed.keys() == {UNPARSED}:
            return unparsed[UNPARSED].raw
    return "{}" if text in ("", "null") else text


def _read_tool_result(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    content: list[ResultPart] = []
    for part in _nested_content(block.content, warnings):
        if isinstance(part, Text | Image | Document | ToolReference):
            content.append(part)
        else:
            warnings["block_dropped:in_tool_result"] = None
    return (ToolResult(_string(block.tool_use_id, "tool_use_id"), tuple(content), block.is_error is True),)


def _read_server_use(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    """A search for tools; other calls ran at Anthropic, and their results are dropped with them."""
    name = _string(block.name, "name")
    if not name.startswith("tool_search_tool"):
        warnings["block_dropped:server_tool_use"] = None
        return ()
    return (ToolCall(mcp.call_id(_string(block.id, "id")), name, read_input(block.input), server=TOOL_SEARCH),)


def _read_search_tools(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    try:
        found = _search_decoder.decode(block.content or b"{}")
    except DecodeError as error:
        raise InvalidRequest(f"content: {error}", param="content") from None
    content: tuple[ResultPart, ...] = tuple(ToolReference(one.tool_name) for one in found.tool_references)
    if found.error_code is not None:
        content = (Text(found.error_message or found.error_code),)
    id = mcp.call_id(_string(block.tool_use_id, "tool_use_id"))
    return (ToolResult(id, content, found.error_code is not None),)


def _read_mcp_use(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    id, server = mcp.call_id(_string(block.id, "id")), _string(block.server_name, "server_name")
    return (ToolCall(id, _string(block.name, "name"), read_input(block.input), server=server),)


def _read_mcp_result(block: ContentBlock, warnings: Warnings) -> Iterable[Part]:
    (result,) = _read_tool_result(block, warnings)
    return (replace(result, call_id=mcp.call_id(result.call_id)),) if isinstance(result, ToolResult) else ()


def _read_nothing(_block: ContentBlock, _: Warnings) -> Iterable[Part]:
    """The tools of a server, which it lists itself; where another model went on."""
    return ()


def _read_addition(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (ToolReference(_changed_name(block)),)


def _read_removal(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (Text(f"The tool {_changed_name(block)} is no longer available."),)


def _read_tool_reference(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    return (ToolReference(_string(block.tool_name, "tool_name")),)


def _read_compaction(block: ContentBlock, _: Warnings) -> Iterable[Part]:
    """Without a content the compaction failed, and nothing is left out."""
    try:
        summary = _string_decoder.decode(block.content) if block.content else ""
    except DecodeError:
        summary = ""
    return (Compaction(summary),) if summary else ()


_BLOCK_READERS: Mapping[str, Callable[[ContentBlock, Warnings], Iterable[Part]]] = {
    "text": _read_text,
    "image": _read_image,
    "document": _read_document,
    "search_result": _read_search_result,
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted,
    "tool_use": _read_tool_use,
    "tool_result": _read_tool_result,
    "tool_reference": _read_tool_reference,
    "server_tool_use": _read_server_use,
    "tool_search_tool_result": _read_search_tools,
    "mcp_tool_use": _read_mcp_use,
    "mcp_tool_result": _read_mcp_result,
    "mcp_tool_listing": _read_nothing,
    "fallback": _read_nothing,
    "tool_addition": _read_addition,
    "tool_removal": _read_removal,
    "compaction": _read_compaction,
}
