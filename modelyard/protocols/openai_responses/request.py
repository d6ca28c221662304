"""Reads a Responses request body into a core request.

The input lists the reasoning, calls and text of a turn as separate items. Neighbouring assistant items become one
assistant message with parts in order, neighbouring outputs one tool message. What cannot be carried over is dropped and
named in `Request.warnings`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import (
    FILE_ID,
    TOOL_SEARCH,
    Constraint,
    ContextManagement,
    Image,
    ItemReference,
    Message,
    Part,
    Reasoning,
    Request,
    ResultPart,
    Role,
    Text,
    Thinking,
    Tool,
    ToolApproval,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
    summary_message,
)
from modelyard.protocols.common.dialects import DEFAULT_DIALECT, is_openai_client, read_dialect
from modelyard.protocols.common.extensions import (
    MAX_TEMPERATURE,
    ExtensionFields,
    Ignored,
    check_option,
    check_positive,
    ignored_fields,
    read_constraint,
    read_priority,
    read_sampling,
)
from modelyard.protocols.common.json import JsonObject, dumps
from modelyard.protocols.common.media_parts import read_audio, read_file
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL, check_range, read_stop
from modelyard.protocols.common.reasoning_signature import unpack_reasoning
from modelyard.protocols.openai_responses import client_tools, mcp
from modelyard.protocols.pool_responses import ITEM_TYPES as POOL_ITEM_TYPES
from modelyard.protocols.pool_responses import PoolResponsesBody

# --- the body -------------------------------------------------------------------------------------------------------


class InputImageUrl(Struct):
    """Chat's form of an image, which some clients send here too."""

    url: limits.Text = ""
    detail: limits.Word | None = None


class InputPart(Struct, gc=False):
    """A content part of any type; `type` says which fields count."""

    type: limits.Word = ""
    text: limits.Text | None = None
    refusal: limits.Text | None = None
    image_url: limits.Text | InputImageUrl | None = None
    input_audio: Any = None
    file_id: limits.Id | None = None
    file_data: limits.Text | None = None
    file_url: limits.Text | None = None
    filename: limits.Text | None = None
    detail: limits.Word | None = None
    stdout: limits.Text | None = None  # of a shell's output, with the next two
    stderr: limits.Text | None = None
    outcome: limits.JsonObject | None = None


class InputItem(Struct, gc=False):
    """An input item of any type. Item ids are read only of MCP's items, which have no other one.

    `Any` where unknown item types use the same field name for another shape.
    """

    type: limits.Word | None = None
    role: limits.Word | None = None
    content: limits.Text | Annotated[list[InputPart], limits.Parts] | limits.JsonObject | None = None
    call_id: limits.Id | None = None
    name: limits.Name | None = None
    namespace: limits.Name | None = None
    arguments: Any = None
    input: Any = None
    output: limits.Text | Annotated[list[InputPart], limits.Parts] | limits.JsonObject | None = None
    action: Any = None
    actions: Any = None
    operation: Any = None
    status: Any = None
    summary: Annotated[list[InputPart], limits.Parts] | None = None
    encrypted_content: limits.Text | None = None
    id: Any = None
    server_label: Any = None
    approval_request_id: Any = None
    approve: Any = None
    reason: Any = None
    error: Any = None
    execution: Any = None
    tools: Annotated[list[limits.JsonObject], limits.Tools] | None = None
    reasoning: limits.JsonObject | None = None


class TextFormat(Struct):
    type: limits.Word = "text"
    name: limits.Name | None = None
    description: limits.Text | None = None
    schema: limits.JsonObject | None = None
    strict: bool | None = None


class TextSettings(Struct):
    format: TextFormat | None = None
    verbosity: limits.Word | None = None


class ReasoningSettings(Struct):
    effort: limits.Word | None = None
    summary: limits.Word | None = None
    generate_summary: limits.Word | None = None  # the older name of `summary`
    max_tokens: int | None = None  # not OpenAI's; the same extension as on Chat


class ContextEdit(Struct):
    type: limits.Word = ""
    compact_threshold: int | None = None


class ResponsesBody(ExtensionFields):
    model: limits.Name | None = None
    input: limits.Text | Annotated[list[InputItem], limits.Messages] | None = None
    instructions: limits.Text | None = None
    tools: Annotated[list[limits.JsonObject], limits.Tools] | None = None
    tool_choice: limits.Word | limits.JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stop: limits.StopString | limits.StopStrings | None = None  # not OpenAI's; the same extension as on Chat
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: limits.Words | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    generate: bool | None = None  # of WebSocket mode; false: read the prompt, and answer nothing
    store: bool | None = None
    background: bool | None = None
    previous_response_id: limits.Id | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: limits.Name | None = None
    metadata: limits.JsonObject | None = None
    user: limits.Name | None = None
    safety_identifier: limits.Name | None = None
    max_tool_calls: int | None = None
    prompt_cache_retention: limits.Word | None = None
    context_management: Annotated[list[ContextEdit], msgspec.Meta(max_length=16)] | None = None
    # Without effect: they belong to OpenAI's services.
    access_programs: Ignored = None
    image: Ignored = None
    moderation: Ignored = None
    multi_agent: Ignored = None
    prompt_cache_options: Ignored = None
    service_tier: Ignored = None
    stream_options: Ignored = None
    truncation: Ignored = None
    # Keys of the pool dialect: only their presence matters here.
    decoding: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    thinking: Raw | UnsetType = UNSET
    source_lang_code: Raw | UnsetType = UNSET
    target_lang_code: Raw | UnsetType = UNSET
    allow_remote: Raw | UnsetType = UNSET


body_decoder = msgspec.json.Decoder(ResponsesBody)


def is_pool_dialect(body: ResponsesBody, headers: Mapping[str, str]) -> bool:
    """The header of the request decides, then the setting: `openai`, or else a key or an item type that only the pool
    dialect has; where the setting is `pool`, every body without a key or an item of OpenAI's, unless the client is
    OpenAI's."""
    if (asked := read_dialect(headers, ("openai", "pool"))) in ("openai", "pool"):
        return asked == "pool"
    default = "auto" if asked == "auto" else headers.get(DEFAULT_DIALECT, "auto")
    if default == "openai":
        return False
    items = body.input if isinstance(body.input, list) else []
    pools = not POOL_ITEM_TYPES.isdisjoint([item.type for item in items])
    # A `thinking` that is an object is Anthropic's, sent by mistake.
    thinks = body.thinking is not UNSET and bytes(body.thinking).startswith(b'"')
    if pools or thinks or any(getattr(body, key) is not UNSET for key in _POOL_KEYS):
        return True
    is_openai = bool(items) or is_openai_client(headers)
    return default == "pool" and not is_openai and all(getattr(body, key) is None for key in _OPENAI_KEYS)


_POOL_KEYS = ("decoding", "messages", "source_lang_code", "target_lang_code", "allow_remote")
_OPENAI_KEYS = tuple(set(ResponsesBody.__struct_fields__) - set(PoolResponsesBody.__struct_fields__) | {"tools"})


# --- the request ----------------------------------------------------------------------------------------------------

INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
_MAX_TOP_LOGPROBS = 20
_COMPACT_ABOVE = 150_000  # tokens, if no threshold is given
# A Codex subagent is a thread in its parent's session: the thread is the conversation.
_SESSION_HEADERS = ("thread-id", "session-id", "x-session-id", "x-session-affinity")


def read_body(body: ResponsesBody, headers: Mapping[str, str]) -> Request:
    previous = body.previous_response_id or body.conversation
    if not body.input and not previous:
        raise InvalidRequest("input is empty: send a text or a list of items", param="input")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: its result is fetched later", param="background")
    conversation = _read_conversation(body)
    if body.prompt:
        raise Unsupported("prompt: prompts are not stored here; send instructions and input", param="prompt")
    check_positive("max_output_tokens", body.max_output_tokens)
    check_range("top_logprobs", body.top_logprobs, 0, _MAX_TOP_LOGPROBS)
    warnings = ignored_fields(body)
    include = body.include or ()
    items = body.input if isinstance(body.input, list) else []
    tool_choice, tools = read_tool_choice(body.tool_choice, _with_found(body.tools or [], items), warnings)
    if listed := listed_servers(items):
        tools = mcp.with_listed(tools, listed)
    messages = _read_messages(body, warnings)
    if len(messages) == (body.instructions is not None) and not (previous or body.generate is False):
        raise InvalidRequest(f"input has nothing that is read: {'; '.join(warnings)}", param="input")
    return Request(
        model=body.model or DEFAULT_MODEL,
        messages=messages,
        instructions=body.instructions is not None,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        max_tool_calls=body.max_tool_calls,
        sampling=read_sampling(body, MAX_TEMPERATURE),
        max_tokens=1 if body.generate is False else body.max_output_tokens,
        stop=read_stop(body.stop, warnings),
        logprobs=(body.top_logprobs or 0) if INCLUDE_LOGPROBS in include else None,
        constraint=read_constraint(body, ("text.format", _read_text_format(body))),
        reasoning=_read_reasoning(_newest_reasoning(body.reasoning, items)),
        stream=bool(body.stream),
        lora_adapter=body.lora_adapter,
        chat_template_kwargs=body.chat_template_kwargs or {},
        documents=body.documents or (),
        priority=read_priority(body),
        session=next((value for name in _SESSION_HEADERS if (value := headers.get(name))), body.prompt_cache_key),
        user=body.safety_identifier if body.user is None else body.user,
        metadata=body.metadata,
        repeated=_read_repeated(body),
        warm_up=body.generate is False,
        previous=body.previous_response_id,
        store=body.store,
        background=bool(body.background),
        conversation=conversation,
        has_references=any(isinstance(part, ItemReference) for message in messages for part in message.parts),
        encrypted_reasoning=INCLUDE_ENCRYPTED in include,
        context=_read_context(body, warnings),
        warnings=tuple(warnings),
    )


def _read_conversation(body: ResponsesBody) -> str | None:
    """Its id, by itself or in an object."""
    found = body.conversation
    if not found:
        return None
    id = found.get("id") if isinstance(found, dict) else found
    if not isinstance(id, str) or not id:
        raise InvalidRequest('conversation must be an id, or {"id": …}', param="conversation")
    if body.previous_response_id:
        raise InvalidRequest("send conversation or previous_response_id, not both", param="previous_response_id")
    return limits.check_length("conversation", id, limits.MAX_NAME)


# Fields of the body that only the reply repeats.
_REPEATED = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "max_tool_calls")
_repeated_values = attrgetter(*_REPEATED)
_NONE_REPEATED = (None,) * len(_REPEATED)


def _read_repeated(body: ResponsesBody) -> JsonObject | None:
    values, verbosity = _repeated_values(body), body.text.verbosity if body.text else None
    if values == _NONE_REPEATED and verbosity is None:
        return None
    return dict(zip(_REPEATED, values, strict=True)) | ({"verbosity": verbosity} if verbosity else {})


def _read_messages(body: ResponsesBody, warnings: list[str]) -> tuple[Message, ...]:
    system = [] if body.instructions is None else [Message("system", (Text(body.instructions),))]
    if isinstance(body.input, str):
        return (*system, Message("user", (Text(body.input),)))
    return (*system, *join_turns(read_turns(_uncompacted(body.input or []), "input", warnings)))


def _read_context(body: ResponsesBody, warnings: list[str]) -> ContextManagement | None:
    """A trigger as the last item asks for a summary and nothing else."""
    if isinstance(body.input, list) and body.input and body.input[-1].type == "compaction_trigger":
        return ContextManagement(compact_now=True)
    above = None
    for edit in body.context_management or ():
        if edit.type == "compaction":
            above = _COMPACT_ABOVE if edit.compact_threshold is None else max(0, edit.compact_threshold)
        else:
            warnings.append(f"field_ignored:context_management.{edit.type}")
    return None if above is None else ContextManagement(compact_above=above)


def _uncompacted(items: list[InputItem]) -> list[InputItem]:
    """Without what the newest summary stands for: only instructions and texts of the user count before it."""
    own = [at for at, i in enumerate(items) if i.type == "compaction" and unpack_reasoning(i.encrypted_content or "")]
    if not own:
        return items
    kept = [item for item in items[: own[-1]] if item.role in ("user", "system", "developer")]
    return [*kept, *items[own[-1] :]]


def _read_text_format(body: ResponsesBody) -> Constraint | None:
    text_format = body.text.format if body.text else None
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return Constraint("json_object")
    check_option("text.format.type", text_format.type, ("text", "json_object", "json_schema"))
    if text_format.schema is None:
        raise InvalidRequest("text.format.schema is required for json_schema", param="text.format.schema")
    schema = limits.check_length("text.format.schema", dumps(text_format.schema), limits.MAX_SCHEMA)
    return Constraint("json_schema", schema, text_format.name, text_format.description, text_format.strict)


def _newest_reasoning(settings: ReasoningSettings | None, items: Sequence[InputItem]) -> ReasoningSettings | None:
    """An item may have changed the effort since the first turn."""
    changes = (item.reasoning for item in items if item.type == "configuration_update" and item.reasoning)
    effort = next(reversed([change["effort"] for change in changes if isinstance(change.get("effort"), str)]), None)
    return settings if effort is None else msgspec.structs.replace(settings or ReasoningSettings(), effort=effort)


def _read_reasoning(settings: ReasoningSettings | None) -> Reasoning:
    if settings is None:
        return Reasoning()
    return Reasoning(
        enabled=False if settings.effort == "none" else None,
        effort=settings.effort,
        summary=settings.summary or settings.generate_summary,
        budget=settings.max_tokens if settings.max_tokens is None or settings.max_tokens >= 0 else None,
    )


# --- input items ----------------------------------------------------------------------------------------------------

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_IMAGE_TYPES = frozenset({"input_image", "image_url"})

Turn = tuple[Role, tuple[Part, ...]]


def join_turns(turns: Iterable[Turn]) -> list[Message]:
    """Join neighbouring turns of the assistant, and of tools, into one message each."""
    joined: list[tuple[Role, list[Part]]] = []
    for role, parts in turns:
        if role in ("assistant", "tool") and joined and joined[-1][0] == role:
            joined[-1][1].extend(parts)
        else:
            joined.append((role, list(parts)))
    return [Message(role, tuple(parts)) for role, parts in joined]


def read_turns(items: Sequence[InputItem], field: str, warnings: list[str]) -> Iterator[Turn]:
    """`field` names the list in errors. The results of MCP calls that the model made in one turn follow all of them."""
    approved = {id for item in items if item.type == "mcp_call" and (id := item.approval_request_id)}
    results: list[Turn] = []
    for index, item in enumerate(items):
        path = f"{field}[{index}]"
        if results and not (item.type == "mcp_call" and mcp.continues_turn(str(item.id))):
            yield from results
            results = []
        if item.type == "mcp_call":
            call, result = _read_mcp_call(item, path)
            yield call
            results.append(result)
        elif item.type in mcp.ITEM_TYPES:
            yield from _read_approval(item, path, approved)
        elif (turn := read_item(item, path, warnings)) is not None:
            yield turn
    yield from results


def listed_servers(items: Iterable[InputItem]) -> set[str]:
    """The MCP servers whose tools the items list."""
    return {str(item.server_label) for item in items if item.type == "mcp_list_tools"}


def _read_mcp_call(item: InputItem, path: str) -> tuple[Turn, Turn]:
    id, name = _required(item, "id", path), _required(item, "name", path)
    label, arguments = _required(item, "server_label", path), item.arguments
    text = arguments if isinstance(arguments, str) else dumps(arguments or {})
    call = ToolCall(mcp.call_id(id), name, text, server=label)
    output = item.output if isinstance(item.output, str) else None
    return ("assistant", (call,)), ("tool", (mcp.read_result(id, output, item.error),))


def _read_approval(item: InputItem, path: str, approved: set[str]) -> Iterator[Turn]:
    """Of a call that was run, its own item has everything. Lists of tools are read by the tools of the request."""
    if item.type == "mcp_approval_request":
        id, label = _required(item, "id", path), _required(item, "server_label", path)
        arguments = item.arguments if isinstance(item.arguments, str) else "{}"
        if id not in approved:
            call = ToolCall(mcp.call_id(id), _required(item, "name", path), arguments, server=label)
            yield "assistant", (call,)
    elif item.type == "mcp_approval_response":
        id = _required(item, "approval_request_id", path)
        if id in approved:
            return
        yield "tool", (ToolApproval(mcp.call_id(id)) if item.approve is True else mcp.refusal(id, item.reason),)


def read_item(item: InputItem, path: str, warnings: list[str]) -> Turn | None:
    kind = item.type or ("message" if item.role is not None else "item_reference" if item.id is not None else None)
    if kind is None:
        raise InvalidRequest(f"{path} needs a type or a role", param=path)
    read = _ITEM_READERS.get(kind)
    if read is None:
        warnings.append(f"item_ignored:{kind} at {path}")
        return None
    return read(item, path, warnings)


def _read_reference(item: InputItem, path: str, warnings: list[str]) -> Turn:
    """Only output items have ids that a client may refer to."""
    del warnings
    return "assistant", (ItemReference(_required(item, "id", path)),)


def _read_message(item: InputItem, path: str, warnings: list[str]) -> Turn:
    if item.role not in _ROLES:
        problem = "is missing" if item.role is None else f"{item.role!r} is unknown"
        raise InvalidRequest(f"{path}.role {problem}; the roles are {', '.join(_ROLES)}", param=f"{path}.role")
    return cast("Role", item.role), tuple(_read_content(item.content, f"{path}.content", warnings, item.role))


def _read_content(content: object, path: str, warnings: list[str], role: str) -> Iterator[ResultPart]:
    if isinstance(content, str):
        yield Text(content)
    elif isinstance(content, list):
        for index, part in enumerate(content):
            yield from _read_part(part, f"{path}[{index}]", warnings, role)
    elif isinstance(content, dict):
        yield Text(dumps(content))


def _read_part(part: InputPart, path: str, warnings: list[str], role: str) -> Iterator[ResultPart]:
    if part.type in _TEXT_TYPES:
        yield Text(part.text or "")
    elif part.type == "refusal":
        yield Text(part.refusal or "")
    elif part.type in _IMAGE_TYPES:
        url, detail = part.image_url, part.detail
        if isinstance(url, InputImageUrl):
            detail = url.detail or detail
            url = url.url
        if not url and part.file_id:
            url = FILE_ID + part.file_id
        if url:
            yield Image(url, detail)
        else:
            yield from _refuse_part(f"{path} needs image_url or file_id", f"{path}.image_url", role)
    elif part.type in ("input_audio", "input_file") and role != "assistant":
        try:
            yield _read_media(part, path)
        except InvalidRequest as error:
            if role != "tool":
                raise
            yield from _refuse_part(error.message, path, role)
    elif role == "assistant":  # its own earlier reply, which may come from another provider
        warnings.append(f"{path}: content of type {part.type!r} is ignored")
    else:
        problem = f"{path} is of type {part.type[:40]!r}, which no model reads here; "
        problem += "send input_text, input_image, input_audio or input_file"
        yield from _refuse_part(problem, f"{path}.type", role)


def _read_media(part: InputPart, path: str) -> ResultPart:
    if part.type == "input_audio":
        return read_audio(part.input_audio, f"{path}.input_audio")
    fields = {"file_data": part.file_data, "file_url": part.file_url, "filename": part.filename}
    return read_file(fields | {"file_id": part.file_id}, path)


def _refuse_part(problem: str, path: str, role: str) -> Iterator[ResultPart]:
    """In a tool's output the model reads what is missing: a refusal would end an agent's session, because the part
    stays in its history."""
    if role != "tool":
        raise InvalidRequest(problem, param=path, code="modality_unsupported")
    yield Text("[a part that this model does not read]")


def _read_reasoning_item(item: InputItem, _path: str, _warnings: list[str]) -> Turn:
    """The reasoning itself where it is present, else its summary. Clients that know neither send an item with its id
    only, because OpenAI does not show the reasoning: it is taken from the stored response."""
    if isinstance(item.content, str):
        text = item.content
    elif isinstance(item.content, list) and item.content:
        text = "".join(part.text or "" for part in item.content)
    else:
        text = "\n\n".join(part.text or "" for part in item.summary or ())
    if not text and not item.encrypted_content and isinstance(item.id, str) and response_of(item.id) is not None:
        return "assistant", (ItemReference(item.id, optional=True),)
    return "assistant", (read_thinking(item.encrypted_content or "", text),)


_ITEM_ID = re.compile(rf"(?:msg|rs|fc|ctc|cmp|{'|'.join(client_tools.PREFIXES)})_(\w+)_\d+")  # of `reply.item_id`


def response_of(item: str) -> str | None:
    """The id of the response that an output item belongs to."""
    found = _ITEM_ID.fullmatch(item)
    return None if found is None else f"resp_{found[1]}"


def read_thinking(signature: str, text: str) -> Thinking:
    """The text packed in our signature wins over the visible one, which the client may have shortened.

    A foreign signature is only carried along.
    """
    packed = unpack_reasoning(signature)
    if packed is not None:
        return Thinking(packed, signature)
    return Thinking(text, signature, redacted=bool(signature) and not text)


def _read_compaction(item: InputItem, path: str, warnings: list[str]) -> Turn | None:
    summary = unpack_reasoning(item.encrypted_content or "")
    if summary is None:
        warnings.append(f"{path}: a compaction of another provider is ignored")
        return None
    return "user", summary_message(summary).parts


def _read_elsewhere(item: InputItem, path: str, warnings: list[str]) -> Turn | None:
    """It says something about the request: `_read_context` and `_newest_reasoning` have read it."""
    del item, path, warnings
    return None


def _read_more_tools(item: InputItem, path: str, _warnings: list[str]) -> Turn:
    return "developer", _found_tools(item, path)


def _read_search(item: InputItem, _path: str, _warnings: list[str]) -> Turn:
    arguments = item.arguments if isinstance(item.arguments, str) else dumps(item.arguments or {})
    server = None if item.execution == "client" else TOOL_SEARCH
    return "assistant", (ToolCall(item.call_id or _SEARCH, _SEARCH, arguments, server=server, vendor_type=_SEARCH),)


def _read_found(item: InputItem, path: str, _warnings: list[str]) -> Turn:
    return "tool", (ToolResult(item.call_id or _SEARCH, _found_tools(item, path)),)


def _found_tools(item: InputItem, path: str) -> tuple[ToolReference, ...]:
    """Where the model is shown them for the first time."""
    return tuple(ToolReference(tool.name) for tool in read_tools(item.tools or [], f"{path}.tools"))


def _with_found(tools: list[JsonObject], items: Sequence[InputItem]) -> tuple[Tool, ...]:
    """The request's tools, and those that its items bring: the prompt shows these where the item stands."""
    given, found = read_tools(tools), dict[str, Tool]()
    for at, item in enumerate(items):
        if item.tools and item.type in ("additional_tools", "tool_search_output"):
            for tool in read_tools(item.tools, f"input[{at}].tools"):
                found.setdefault(tool.name, msgspec.structs.replace(tool, deferred=True))
    known = {tool.name for tool in given} if found else set()
    return (*given, *(tool for tool in found.values() if tool.name not in known))


def _read_call(item: InputItem, path: str, _warnings: list[str]) -> Turn:
    custom = item.type == "custom_tool_call"
    value = item.input if custom else item.arguments
    arguments = value if isinstance(value, str) else "" if value is None else dumps(value)
    call_id, name = _required(item, "call_id", path), _required(item, "name", path)
    return "assistant", (ToolCall(call_id, name, arguments, item.namespace, custom=custom),)


def _read_output(item: InputItem, path: str, warnings: list[str]) -> Turn:
    content = tuple(_read_content(item.output, f"{path}.output", warnings, "tool"))
    custom = item.type == "custom_tool_call_output"
    return "tool", (ToolResult(_required(item, "call_id", path), content, custom=custom),)


def _read_client_call(item: InputItem, path: str, _warnings: list[str]) -> Turn:
    values = {"action": item.action, "actions": item.actions, "operation": item.operation}
    fields = {name: value for name, value in values.items() if value is not None}
    if not fields:
        raise InvalidRequest(f"{path}: a {item.type} needs an action or an operation", param=path)
    return "assistant", (client_tools.read_call(str(item.type), _required(item, "call_id", path), fields),)


def _read_client_output(item: InputItem, path: str, _warnings: list[str]) -> Turn:
    """A local shell's output has the call's id as its own."""
    id = _required(item, "id" if item.call_id is None and item.type == "local_shell_call_output" else "call_id", path)
    status = item.status if isinstance(item.status, str) else None
    return "tool", (client_tools.read_output(id, msgspec.to_builtins(item.output), status),)


def _required(item: InputItem, field: str, path: str) -> str:
    value: Any = getattr(item, field)
    if not value or not isinstance(value, str):
        raise InvalidRequest(f"{path}: a {item.type} needs {field}", param=f"{path}.{field}")
    return value


_ITEM_READERS: dict[str, Callable[[InputItem, str, list[str]], Turn | None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning_item,
    "compaction": _read_compaction,
    **dict.fromkeys(("compaction_trigger", "configuration_update"), _read_elsewhere),
    "additional_tools": _read_more_tools,
    "tool_search_call": _read_search,
    "tool_search_output": _read_found,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_call,
    "custom_tool_call_output": _read_output,
    "item_reference": _read_reference,
    **dict.fromkeys(client_tools.CALL_ITEMS, _read_client_call),
    **dict.fromkeys(client_tools.OUTPUT_ITEMS, _read_client_output),
}


# --- tools ----------------------------------------------------------------------------------------------------------

_TOOL_CHOICE_MODES = ("auto", "none", "required")


_SEARCH = "tool_search"


def read_tools(tools: list[JsonObject], field: str = "tools") -> tuple[Tool, ...]:
    return tuple(tool for index, body in enumerate(tools) for tool in _read_tool(body, f"{field}[{index}]", None))


def _read_tool(body: JsonObject, path: str, namespace: str | None) -> Iterator[Tool]:
    kind = _string(body, "type", path) or "function"
    if kind == "function":
        yield _read_function(body, path, namespace)
    elif kind == "custom":
        yield _read_custom(body, path, namespace)
    elif kind == "namespace":
        yield from _read_namespace(body, path)
    elif client_tools.is_client_tool(kind, body):
        yield client_tools.read_client_tool(kind, body, namespace)
    else:  # a server tool keeps its settings, so that an upstream which knows the tool gets all of it
        settings = {name: value for name, value in body.items() if name != "type"}
        server = mcp.read_server(body, path) if kind == "mcp" else None
        yield Tool(kind, parameters=settings, kind="server", type=kind, namespace=namespace, server=server)


def _read_function(body: JsonObject, path: str, namespace: str | None) -> Tool:
    parameters, strict = body.get("parameters"), body.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{path}.parameters must be a JSON schema object", param=f"{path}.parameters")
    return Tool(
        _tool_name(body, path),
        _string(body, "description", path) or "",
        parameters or {},
        namespace=namespace,
        strict=strict if isinstance(strict, bool) else None,
        deferred=body.get("defer_loading") is True,
    )


def _read_custom(body: JsonObject, path: str, namespace: str | None) -> Tool:
    tool_format, grammar = body.get("format"), None
    if isinstance(tool_format, dict) and tool_format.get("type") == "grammar":
        grammar = {name: value for name, value in tool_format.items() if name != "type"}
    return Tool(
        _tool_name(body, path),
        _string(body, "description", path) or "",
        kind="custom",
        namespace=namespace,
        deferred=body.get("defer_loading") is True,
        grammar=grammar,
    )


def _read_namespace(body: JsonObject, path: str) -> Iterator[Tool]:
    name, tools = _tool_name(body, path), body.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{path}.tools must be a list of tools", param=f"{path}.tools")
    for index, tool in enumerate(tools):
        tool_path = f"{path}.tools[{index}]"
        if tool.get("type") == "namespace":
            raise InvalidRequest(f"{tool_path}: a namespace cannot contain another one", param=tool_path)
        yield from _read_tool(tool, tool_path, name)


def _tool_name(body: JsonObject, path: str) -> str:
    name = _string(body, "name", path)
    if not name:
        raise InvalidRequest(f"{path}.name is required; in this protocol it is a field beside type", param=path)
    return limits.check_length(f"{path}.name", name, limits.MAX_NAME)


def _string(body: JsonObject, field: str, path: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{path}.{field} must be a string", param=f"{path}.{field}")
    return value


def read_tool_choice(
    choice: str | JsonObject | None, tools: tuple[Tool, ...], warnings: list[str]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that it allows."""
    if choice is None or isinstance(choice, str):
        return _read_choice_mode(choice, warnings), tools
    kind = choice.get("type")
    if kind in ("function", "custom") and isinstance(choice.get("name"), str):
        return ToolChoice("named", choice["name"]), tools
    if isinstance(kind, str) and client_tools.call_type(tools, kind) is not None:
        return ToolChoice("named", kind), tools
    if kind == "mcp" and isinstance(label := choice.get("server_label"), str):
        name = choice.get("name")
        return ToolChoice("named" if name else "required", name if isinstance(name, str) else None, label), tools
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        wanted = [tool for tool in choice["tools"] if isinstance(tool, dict)]
        allowed = ["mcp" if tool.get("type") == "mcp" else tool.get("name") or tool.get("type") for tool in wanted]
        return _read_choice_mode(choice.get("mode"), warnings), tuple(tool for tool in tools if tool.name in allowed)
    warnings.append(f"tool_choice of type {kind!r} is read as 'auto'")
    return ToolChoice(), tools


def _read_choice_mode(mode: object, warnings: list[str]) -> ToolChoice:
    if mode is None or mode == "auto":
        return ToolChoice()
    if mode in _TOOL_CHOICE_MODES:
        return ToolChoice(cast("Any", mode))
    warnings.append(f"tool_choice {mode!r} is read as 'auto'")
    return ToolChoice()
