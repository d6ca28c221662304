"""Reads a chat request body into a core request.

Unknown fields are never an error. What changes the answer if it is ignored is refused: a content part that no model
reads here, an unknown response format. The rest of what cannot be carried over is dropped and named in
`Request.warnings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Raw, Struct, field

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import (
    Audio,
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
    ToolResult,
)
from modelyard.protocols.common.dialects import (
    DEFAULT_DIALECT,
    DIALECT_HEADER,
    INFER_SERVER,
    is_openai_client,
    read_dialect,
)
from modelyard.protocols.common.extensions import (
    MAX_TEMPERATURE,
    Ignored,
    check_option,
    check_positive,
    ignored_fields,
    read_constraint,
    read_priority,
    read_sampling,
    read_slot,
    take_biased_texts,
)
from modelyard.protocols.common.json import decode, dumps
from modelyard.protocols.common.media_parts import read_audio, read_file
from modelyard.protocols.common.openai_fields import (
    DEFAULT_MODEL,
    MAX_N,
    MAX_TOP_LOGPROBS,
    ServerFields,
    StreamOptions,
    check_range,
    read_prompt_logprobs,
    read_session,
    read_stop,
    read_timings,
    require_model,
)

# --- the body -------------------------------------------------------------------------------------------------------


class ChatContentPart(Struct, gc=False):
    """`Any`: a part of an unknown type may use these names for anything."""

    type: limits.Word = ""
    text: Any = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None  # vLLM's form
    file: Any = None
    detail: Any = None
    refusal: Any = None


class FunctionCall(Struct):
    name: limits.Name = ""
    arguments: Any = ""


class CustomCall(Struct):
    name: limits.Name = ""
    input: limits.Text = ""


class ChatToolCall(Struct):
    id: limits.Id | None = None
    type: limits.Word | None = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(Struct, gc=False):
    role: limits.Word
    content: limits.Text | Annotated[list[ChatContentPart | limits.Text], limits.Parts] | None = None
    name: limits.Name | None = None
    tool_calls: Annotated[list[ChatToolCall], limits.Calls] | None = None
    tool_call_id: limits.Id | None = None
    function_call: FunctionCall | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: limits.Text | None = None


class FunctionDefinition(Struct):
    name: limits.Name
    description: limits.Text | None = None
    parameters: limits.JsonObject | None = None
    strict: bool | None = None


class CustomToolDefinition(Struct):
    name: limits.Name
    description: limits.Text | None = None
    format: limits.JsonObject | None = None


class ChatTool(Struct):
    type: limits.Word = "function"
    function: FunctionDefinition | None = None
    custom: CustomToolDefinition | None = None
    name: limits.Name | None = None
    description: limits.Text | None = None
    parameters: limits.JsonObject | None = None
    strict: bool | None = None


class ToolName(Struct):
    name: limits.Name = ""


class AllowedTool(Struct):
    type: limits.Word = "function"
    name: limits.Name | None = None
    function: ToolName | None = None
    custom: ToolName | None = None


class AllowedTools(Struct):
    mode: limits.Word = "auto"
    tools: Annotated[list[AllowedTool], limits.Tools] | None = None


class ChatToolChoice(Struct):
    type: limits.Word = "function"
    name: limits.Name | None = None
    mode: limits.Word = "auto"
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: AllowedTools | None = None
    tools: Annotated[list[AllowedTool], limits.Tools] | None = None  # without `allowed_tools` around it


class JsonSchemaFormat(Struct):
    """`Raw` cannot be part of a union: `null` arrives as its text. A factory, because no JSON schema can show Raw."""

    name: limits.Name | None = None
    schema: Raw = field(default_factory=Raw)
    strict: bool | None = None
    description: limits.Text | None = None


class ResponseFormat(Struct):
    """`schema` beside `json_object` is llama.cpp's way to send a schema."""

    type: limits.Word = "text"
    json_schema: JsonSchemaFormat | None = None
    schema: Raw = field(default_factory=Raw)


class ChatReasoning(Struct):
    effort: limits.Word | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None


class ChatThinking(Struct):
    type: limits.Word = ""
    budget_tokens: int | None = None


class ChatCompletionBody(ServerFields):
    model: limits.Name | None = None
    messages: Annotated[list[ChatMessage], limits.Messages] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: limits.Name | None = None
    prompt_cache_key: limits.Name | None = None
    tools: Annotated[list[ChatTool], limits.Tools] | None = None
    tool_choice: limits.Word | ChatToolChoice | None = None
    functions: Annotated[list[FunctionDefinition], limits.Tools] | None = None
    function_call: limits.Word | ToolName | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: limits.Words | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    stop: limits.StopString | limits.StopStrings | None = None
    reasoning_effort: limits.Word | None = None
    reasoning: ChatReasoning | None = None
    include_reasoning: bool | None = None
    reasoning_format: limits.Word | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | limits.Word | None = None
    thinking_budget: int | None = None  # three servers' names of one limit
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking: ChatThinking | bool | limits.Word | None = None
    metadata: limits.JsonObject | None = None
    safety_identifier: limits.Name | None = None
    store: bool | None = None
    # Without effect: they belong to OpenAI's services.
    audio: Ignored = None
    moderation: Ignored = None
    prediction: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None
    verbosity: Ignored = None
    web_search_options: Ignored = None


# --- the request ----------------------------------------------------------------------------------------------------

_RESPONSE_FORMATS = ("text", "json_object", "json_schema")
_decoder = msgspec.json.Decoder(ChatCompletionBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    parsed = decode(_decoder, body)
    dialect = _read_dialect(headers)
    model = require_model(parsed.model) if dialect == INFER_SERVER else parsed.model or DEFAULT_MODEL
    stream = parsed.stream is True or (parsed.stream is None and dialect == INFER_SERVER)
    if not parsed.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    if parsed.n is not None:
        check_range("n", parsed.n, 1, MAX_N)
    if parsed.modalities and "audio" in parsed.modalities:
        raise Unsupported('modalities: no model speaks here; send ["text"]', param="modalities")
    warnings = ignored_fields(parsed)
    messages, kwargs, form = _read_messages(parsed.messages, warnings), parsed.chat_template_kwargs, None
    if parsed.response_format is not None:
        form = _read_response_format(parsed.response_format)
    chooses = parsed.tool_choice is not None or parsed.function_call is not None
    tools = _read_tools(parsed) if parsed.tools or parsed.functions else ()
    if isinstance(parsed.tool_choice, ChatToolChoice) and parsed.tool_choice.type == "allowed_tools":
        tools = _allowed_tools(parsed.tool_choice, tools)
    biased_texts = take_biased_texts(parsed) if parsed.logit_bias else ()
    # A client sends few of the fields: what reads the others is not called.
    return Request(
        model=model,
        messages=messages,
        tools=tools,
        tool_choice=_read_tool_choice(parsed, warnings) if chooses else _TOOL_CHOICES["auto"],
        parallel_tool_calls=parsed.parallel_tool_calls,
        sampling=read_sampling(parsed, MAX_TEMPERATURE),
        biased_texts=biased_texts,
        max_tokens=_read_max_tokens(parsed),
        stop=read_stop(parsed.stop, warnings) if parsed.stop else (),
        n=1 if parsed.n is None else parsed.n,
        logprobs=None if parsed.logprobs is None and parsed.top_logprobs is None else _read_logprobs(parsed),
        prompt_logprobs=None if parsed.prompt_logprobs is None else read_prompt_logprobs(parsed, stream),
        constraint=read_constraint(parsed, ("response_format", form)),
        reasoning=_read_reasoning(parsed),
        stream=stream,
        include_usage=parsed.stream_options is not None and parsed.stream_options.include_usage is True,
        progress=parsed.return_progress is True and stream,
        timings=read_timings(parsed),
        lora_adapter=parsed.lora_adapter,
        chat_template_kwargs=_read_template_kwargs(kwargs) if kwargs else {},
        add_generation_prompt=_prompt_end(parsed, "add_generation_prompt") if kwargs else parsed.add_generation_prompt,
        continue_final_message=_read_continuation(parsed, messages)
        if kwargs or parsed.continue_final_message is not None
        else None,
        documents=parsed.documents or (),
        priority=None if parsed.priority is None else read_priority(parsed),
        session=read_session(headers, parsed.prompt_cache_key),
        slot=None if parsed.id_slot is None else read_slot(parsed),
        user=parsed.user or parsed.safety_identifier,
        metadata=parsed.metadata,
        store=parsed.store,
        dialect=dialect,
        warnings=tuple(warnings),
    )


def _read_dialect(headers: Mapping[str, str]) -> str:
    """Of Infer Server: `stream` is true unless the request says otherwise, and a stream that fails has a finish reason.
    OpenAI's otherwise, and for OpenAI's clients, whatever the setting."""
    if DIALECT_HEADER in headers:
        is_asked_for = read_dialect(headers, ("openai", INFER_SERVER)) == INFER_SERVER
    else:
        is_asked_for = headers.get(DEFAULT_DIALECT) == INFER_SERVER and not is_openai_client(headers)
    return INFER_SERVER if is_asked_for else ""


def _read_max_tokens(body: ChatCompletionBody) -> int | None:
    """`max_completion_tokens` is the newer name and takes precedence; a wrong value is an error under either name."""
    check_positive("max_tokens", body.max_tokens)
    check_positive("max_completion_tokens", body.max_completion_tokens)
    return body.max_completion_tokens or body.max_tokens


def _read_logprobs(body: ChatCompletionBody) -> int | None:
    """`top_logprobs` alone turns logprobs on too; some clients send the number under `logprobs`."""
    check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    flag = body.logprobs
    if flag is None or flag is False:
        return body.top_logprobs if flag is None else None
    if body.top_logprobs is not None or flag is True:
        return body.top_logprobs or 0
    check_range("logprobs", flag, 0, MAX_TOP_LOGPROBS)
    return flag


def _read_response_format(response_format: ResponseFormat) -> Constraint | None:
    if response_format.type == "text":
        return None
    check_option("response_format.type", response_format.type, _RESPONSE_FORMATS)
    if response_format.type == "json_schema":
        return _read_schema(response_format.json_schema or JsonSchemaFormat(schema=response_format.schema))
    has_schema = bytes(response_format.schema).startswith(b"{")
    return _read_schema(JsonSchemaFormat(schema=response_format.schema)) if has_schema else Constraint("json_object")


def _read_schema(json_schema: JsonSchemaFormat) -> Constraint:
    """The schema keeps its text: re-encoding would change the form of its numbers."""
    text = bytes(json_schema.schema).decode()
    if not text.startswith("{"):
        path = "response_format.json_schema.schema"
        raise InvalidRequest(f"{path} is required and must be an object", param=path)
    limits.check_length("response_format", text, limits.MAX_SCHEMA)
    return Constraint("json_schema", text, json_schema.name, json_schema.description, json_schema.strict)


# --- reasoning ------------------------------------------------------------------------------------------------------

THINKING_KWARG = "enable_thinking"  # the name of the switch in chat templates

_CONTINUED_PARTS = ("content", "reasoning_content")
_PROMPT_ENDS = frozenset({"add_generation_prompt", "continue_final_message"})
_DEFAULT_REASONING = Reasoning()
_BUDGETS = ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget")
_SWITCHES = (
    *("reasoning_effort", "reasoning", "include_reasoning", "reasoning_format"),
    *("thinking", "enable_thinking", "chat_template_kwargs"),
)
_reasoning_fields, _budgets = attrgetter(*_SWITCHES, *_BUDGETS), attrgetter(*_BUDGETS)
_NO_FIELDS = (None,) * len(_SWITCHES + _BUDGETS)
_NO_REASONING, _NO_THINKING = ChatReasoning(), ChatThinking()
# The names of llama-server, then Groq's: whether the text of the reply has the reasoning.
_REASONING_FORMATS: dict[str, Literal["only", "too"] | None] = {
    "auto": None,
    "deepseek": None,
    "deepseek-legacy": "too",
    "none": "only",
    "parsed": None,
    "raw": "only",
    "hidden": None,
}
_THINKING_ENABLED = {
    "enabled": True,
    "adaptive": True,
    "on": True,
    "auto": None,
    "disabled": False,
    "off": False,
    "none": False,
}


def _read_reasoning(body: ChatCompletionBody) -> Reasoning:
    """Clients send the switch in five ways; the most specific one that is set wins. Those that send `reasoning` or
    `include_reasoning` read `reasoning` in the reply too."""
    if _reasoning_fields(body) == _NO_FIELDS:
        return _DEFAULT_REASONING
    reasoning, thinking = body.reasoning or _NO_REASONING, _read_thinking(body.thinking)
    effort = body.reasoning_effort if body.reasoning_effort is not None else reasoning.effort
    switches = (
        _template_switch(body.chat_template_kwargs),
        body.enable_thinking,
        _THINKING_ENABLED.get(thinking.type),
        reasoning.enabled,
        False if effort == "none" else None,
    )
    shown = body.include_reasoning if body.include_reasoning is not None else None
    if shown is None and reasoning.exclude is not None:
        shown = not reasoning.exclude
    if (form := body.reasoning_format) is not None and form not in _REASONING_FORMATS:
        known = ", ".join(_REASONING_FORMATS)
        raise InvalidRequest(f"reasoning_format: must be one of {known}; got {form!r}", param="reasoning_format")
    return Reasoning(
        enabled=next((switch for switch in switches if switch is not None), None),
        effort=effort,
        budget=_read_budget((reasoning.max_tokens, thinking.budget_tokens, *_budgets(body))),
        visible=False if form == "hidden" else shown,
        in_text=_REASONING_FORMATS[form or "auto"],
        both_names=body.include_reasoning is True or body.reasoning is not None,
    )


def _read_budget(values: Iterable[int | None]) -> int | None:
    """The first limit that is set. A negative number is no limit."""
    return next((value for value in values if value is not None and value >= 0), None)


def _read_thinking(thinking: ChatThinking | bool | str | None) -> ChatThinking:
    if isinstance(thinking, ChatThinking):
        return thinking
    if isinstance(thinking, bool):
        return ChatThinking("enabled" if thinking else "disabled")
    return ChatThinking(thinking) if thinking else _NO_THINKING


def _template_switch(kwargs: dict[str, Any] | None) -> bool | None:
    switch = kwargs.get(THINKING_KWARG) if kwargs else None
    return switch if isinstance(switch, bool) else None


def _prompt_end(body: ChatCompletionBody, name: str) -> Any:
    """Some clients send these switches of the renderer among the template's variables."""
    value = getattr(body, name)
    if value is None and body.chat_template_kwargs:
        value = body.chat_template_kwargs.get(name)
    if value is None or isinstance(value, bool) or name == "continue_final_message":
        return value
    raise InvalidRequest(f"chat_template_kwargs.{name} must be true or false", param=f"chat_template_kwargs.{name}")


def _read_continuation(
    body: ChatCompletionBody, messages: tuple[Message, ...]
) -> bool | Literal["content", "reasoning_content"] | None:
    """llama-server also takes the name of the part to continue."""
    path = "continue_final_message"
    asked = _prompt_end(body, path)
    if not asked:
        return None if asked is None else False
    if asked is not True and asked not in _CONTINUED_PARTS:
        raise InvalidRequest(f"{path} must be true, false or one of {', '.join(_CONTINUED_PARTS)}", param=path)
    if _prompt_end(body, "add_generation_prompt"):
        raise InvalidRequest(f"{path} and add_generation_prompt cannot both be true: send one of them", param=path)
    if messages[-1].role != "assistant":
        raise InvalidRequest(f"{path} needs an assistant message at the end of messages", param=path)
    if any(isinstance(part, ToolCall) for part in messages[-1].parts):
        raise InvalidRequest(f"{path}: a message with tool calls cannot be continued", param=path)
    return cast(Literal[True, "content", "reasoning_content"], asked)


def _read_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Without the thinking switch, which goes into `Reasoning.enabled`, and the switches of the renderer."""
    if not kwargs:
        return {}
    switches = _PROMPT_ENDS if _template_switch(kwargs) is None else _PROMPT_ENDS | {THINKING_KWARG}
    return kwargs if switches.isdisjoint(kwargs) else {k: v for k, v in kwargs.items() if k not in switches}


# --- tools ----------------------------------------------------------------------------------------------------------

_TOOL_CHOICES: dict[str, ToolChoice] = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def _read_tools(body: ChatCompletionBody) -> tuple[Tool, ...]:
    tools = tuple(_read_tool(tool, i) for i, tool in enumerate(body.tools)) if body.tools else ()
    if body.functions:
        tools += tuple(_read_function(function) for function in body.functions)
    return tools


def _read_tool(tool: ChatTool, index: int) -> Tool:
    if tool.function is not None:
        return _read_function(tool.function)
    if tool.custom is not None:
        custom, grammar = tool.custom, tool.custom.format
        if grammar and isinstance(grammar.get("grammar"), dict):
            grammar = {"type": "grammar"} | grammar["grammar"]  # Chat nests it one level deeper than Responses
        return Tool(custom.name, custom.description or "", kind="custom", grammar=grammar)
    if tool.type != "function":
        return Tool(tool.name or tool.type, tool.description or "", kind="server", type=tool.type)
    if not tool.name:
        raise InvalidRequest(f"tools[{index}].function is required", param=f"tools[{index}].function")
    return _read_function(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _read_function(function: FunctionDefinition) -> Tool:
    return Tool(function.name, function.description or "", function.parameters or {}, strict=function.strict)


def _read_tool_choice(body: ChatCompletionBody, warnings: list[str]) -> ToolChoice:
    choice: str | ChatToolChoice | None = body.tool_choice
    if choice is None and body.function_call is not None:
        legacy = body.function_call
        choice = legacy if isinstance(legacy, str) else ChatToolChoice(name=legacy.name)
    if choice is None:
        return _TOOL_CHOICES["auto"]
    if isinstance(choice, str):
        return _read_choice_mode(choice, warnings)
    if choice.type == "allowed_tools":
        return _read_choice_mode((choice.allowed_tools or choice).mode, warnings)
    tool = choice.function or choice.custom
    if name := tool.name if tool else choice.name:
        return ToolChoice("named", name)
    if choice.type in _TOOL_CHOICES:
        return _TOOL_CHOICES[choice.type]
    raise InvalidRequest("tool_choice names no tool: set function.name", param="tool_choice")


def _allowed_tools(choice: ChatToolChoice, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that may be called. The others are not offered: a model cannot call what it never saw."""
    listed = (choice.allowed_tools or choice).tools
    if listed is None:
        raise InvalidRequest("tool_choice lists no allowed tools: set allowed_tools.tools", param="tool_choice")
    named = [tool.function or tool.custom or tool for tool in listed]
    names = {tool.name for tool in named}
    if None in names or "" in names:
        raise InvalidRequest("tool_choice allows a tool without a name: set function.name", param="tool_choice")
    if unknown := names - {tool.name for tool in tools}:
        name = next(iter(unknown))
        raise InvalidRequest(f"tool_choice allows the tool {name!r}, which is not in tools", param="tool_choice")
    return tuple(tool for tool in tools if tool.name in names)


def _read_choice_mode(mode: str, warnings: list[str]) -> ToolChoice:
    if mode not in _TOOL_CHOICES:
        warnings.append(f"tool_choice_unknown: {mode!r} is read as 'auto'")
    return _TOOL_CHOICES.get(mode, _TOOL_CHOICES["auto"])


# --- messages -------------------------------------------------------------------------------------------------------

_ROLES = "system, developer, user, assistant, tool, function"
_CONTENT_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user"}
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", ""})
_IMAGE_TYPES = frozenset({"image_url", "input_image"})
_MEDIA_TYPES = frozenset({"input_audio", "audio_url", "file"})
_TOOL_ROLES = ("tool", "function")


def _read_messages(messages: list[ChatMessage], warnings: list[str]) -> tuple[Message, ...]:
    """One pass over the messages. Neighbouring tool results become one message."""
    reader, read, results = _MessageReader(warnings), list[Message](), list[ToolResult]()
    for index, message in enumerate(messages):
        role = message.role
        if role in _TOOL_ROLES:
            results.append(reader.read_result(message, index))
            continue
        if results:
            read.append(Message("tool", tuple(results)))
            results = []
        if content_role := _CONTENT_ROLES.get(role):
            read.append(Message(content_role, reader.read_content(message, index), message.name))
        elif role == "assistant":
            read.append(Message("assistant", reader.read_assistant(message, index), message.name))
        else:
            path = f"messages[{index}].role"
            raise InvalidRequest(f"{path}: unknown role {role!r}; the roles are {_ROLES}", param=path)
    if results:
        read.append(Message("tool", tuple(results)))
    return tuple(read)


class _MessageReader:
    """Reads the parts of each message, and remembers what a later one refers to."""

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._custom_ids: set[str] = set()  # ids of custom calls: results do not say which kind they answer
        self._legacy_ids: dict[str, str] = {}  # function name → the id given to its last `function_call`

    def read_content(self, message: ChatMessage, index: int) -> tuple[ResultPart, ...]:
        content = message.content
        if not content:
            return ()
        if isinstance(content, str):
            return (Text(content),)
        parts = (self._read_part(p, f"messages[{index}].content[{i}]", message.role) for i, p in enumerate(content))
        return tuple(part for part in parts if part is not None)

    def _read_part(self, part: ChatContentPart | str, path: str, role: str) -> ResultPart | None:
        if isinstance(part, str):
            return Text(part)
        if part.type in _TEXT_TYPES:
            return Text(_string(part.text, f"{path}.text"))
        if part.type in _IMAGE_TYPES:
            return _read_image(part, path)
        if part.type in _MEDIA_TYPES and role != "assistant":
            try:
                return _read_media(part, path)
            except InvalidRequest:
                if role not in _TOOL_ROLES:
                    raise
        if part.type == "refusal":
            return Text(_string(part.refusal, f"{path}.refusal"))
        if role == "assistant":  # its own earlier reply, which may come from another provider
            self._warnings.append(f"content_part_dropped: {path} is of type {part.type!r}")
            return None
        if role in _TOOL_ROLES:  # a refusal would end an agent's session, because the part stays in its history
            self._warnings.append(f"content_part_replaced: {path} is of type {part.type!r}")
            return Text(f"[{part.type}: this model does not read it]")
        raise InvalidRequest(
            f"{path} is of type {part.type[:40]!r}, which no model reads here; send text, image_url, "
            "input_audio or file",
            param=f"{path}.type",
            code="modality_unsupported",
        )

    def read_result(self, message: ChatMessage, index: int) -> ToolResult:
        call_id = message.tool_call_id
        if message.role == "function":
            name = message.name or ""
            call_id = call_id or self._legacy_ids.get(name) or f"call_{name}"
        if not call_id:
            path = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{path} is required: it names the call that this message answers", param=path)
        return ToolResult(call_id, self.read_content(message, index), custom=call_id in self._custom_ids)

    def read_assistant(self, message: ChatMessage, index: int) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = self.read_content(message, index)
        if message.refusal and not parts:
            parts = (Text(message.refusal),)
        reasoning = message.reasoning_content or message.reasoning
        if isinstance(reasoning, str) and reasoning:
            parts = (Thinking(reasoning), *parts)
        if message.tool_calls:
            calls = (self._read_call(call, index, i) for i, call in enumerate(message.tool_calls))
            parts += tuple(call for call in calls if call is not None)
        if legacy := message.function_call:
            # A legacy call has no id. Its place in the conversation gives one that is the same on every turn.
            self._legacy_ids[legacy.name] = f"call_{index}"
            parts += (ToolCall(f"call_{index}", legacy.name, read_arguments(legacy.arguments)),)
        return parts

    def _read_call(self, body: ChatToolCall, index: int, call_index: int) -> ToolCall | None:
        path = f"messages[{index}].tool_calls[{call_index}]"
        call = read_call(body, f"call_{index}_{call_index}")
        if call is None and body.type == "function":
            raise InvalidRequest(f"{path}.function is required", param=f"{path}.function")
        if call is None:
            self._warnings.append(f"tool_call_dropped: {path} is of type {body.type!r}")
        elif call.custom:
            self._custom_ids.add(call.id)
        return call


def read_call(call: ChatToolCall, fallback_id: str) -> ToolCall | None:
    """None for a call that is neither a function call nor a custom call."""
    call_id = call.id or fallback_id
    if call.custom is not None:
        return ToolCall(call_id, call.custom.name, call.custom.input, custom=True)
    if call.function is not None:
        return ToolCall(call_id, call.function.name, read_arguments(call.function.arguments))
    return None


def read_arguments(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else dumps(value)


def _string(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    raise InvalidRequest(f"{path} must be a string", param=path)


def _read_media(part: ChatContentPart, path: str) -> Audio | Document:
    if part.type == "input_audio":
        return read_audio(part.input_audio, f"{path}.input_audio")
    return read_file(part.file, f"{path}.file") if part.type == "file" else _read_audio_url(part, path)


def _read_audio_url(part: ChatContentPart, path: str) -> Audio:
    url: Any = part.audio_url.get("url") if isinstance(part.audio_url, dict) else part.audio_url
    if not isinstance(url, str) or not url.startswith("data:"):
        raise InvalidRequest(f"{path}.audio_url needs a data: URL", param=f"{path}.audio_url", code="invalid_audio")
    return Audio(url)


def _read_image(part: ChatContentPart, path: str) -> Image:
    url: Any = part.image_url
    detail: Any = part.detail
    if isinstance(url, dict):
        url, detail = url.get("url"), url.get("detail", detail)
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{path}.image_url needs a url", param=f"{path}.image_url")
    return Image(url, detail if isinstance(detail, str) else None)
