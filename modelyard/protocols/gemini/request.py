"""Reads a `generateContent` body into a core request.

Unknown fields are never an error. What changes the answer if it is ignored is refused: a part that no model reads here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw, Struct, field

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import (
    FILE_ID,
    Audio,
    Constraint,
    Document,
    Image,
    Message,
    Part,
    Reasoning,
    Request,
    ResultPart,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from modelyard.protocols.common.call_arguments import CallNumbers, read_arguments
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    Ignored,
    check_positive,
    ignored_fields,
    read_constraint,
    read_priority,
    read_sampling,
    read_whole,
)
from modelyard.protocols.common.json import dumps
from modelyard.protocols.common.openai_fields import MAX_N, check_range, read_session, read_stop
from modelyard.protocols.common.reasoning_signature import unpack_reasoning
from modelyard.protocols.gemini.files import file_of_uri
from modelyard.protocols.gemini.schema import decode_proto, read_schema

PATH, QUERY = ":path", ":query"  # the pseudo-headers that have the path and the query of a request

# --- the body -------------------------------------------------------------------------------------------------------


class GeminiBlob(Struct, rename="camel"):
    mime_type: limits.Word = ""
    data: limits.Text = ""


class GeminiFile(Struct, rename="camel"):
    file_uri: limits.Text = ""
    mime_type: limits.Word = ""


class GeminiCall(Struct, rename="camel"):
    name: limits.Name = ""
    id: limits.Id | None = None
    args: Raw = field(default_factory=Raw)


class GeminiResultPart(Struct, rename="camel"):
    inline_data: GeminiBlob | None = None
    file_data: GeminiFile | None = None


class GeminiResult(Struct, rename="camel"):
    name: limits.Name = ""
    id: limits.Id | None = None
    response: Any = None
    parts: Annotated[list[GeminiResultPart], limits.Parts] | None = None


class GeminiPart(Struct, rename="camel", gc=False):
    text: limits.Text | None = None
    thought: bool | None = None
    thought_signature: limits.Text | None = None
    inline_data: GeminiBlob | None = None
    file_data: GeminiFile | None = None
    function_call: GeminiCall | None = None
    function_response: GeminiResult | None = None
    executable_code: Any = None
    code_execution_result: Any = None


class GeminiContent(Struct, rename="camel", gc=False):
    role: limits.Word | None = None
    parts: Annotated[list[GeminiPart], limits.Parts] | None = None


class GeminiFunction(Struct, rename="camel"):
    name: limits.Name
    description: limits.Text | None = None
    parameters: limits.JsonObject | None = None
    parameters_json_schema: limits.JsonObject | None = None


class GeminiTool(Struct, rename="camel"):
    """A tool of Google's servers, such as `googleSearch`, is a field of its own."""

    function_declarations: Annotated[list[GeminiFunction], limits.Tools] | None = None
    code_execution: Any = None
    computer_use: Any = None
    enterprise_web_search: Any = None
    exa_ai_search: Any = None
    file_search: Any = None
    google_maps: Any = None
    google_search: Any = None
    google_search_retrieval: Any = None
    mcp_servers: Any = None
    parallel_ai_search: Any = None
    retrieval: Any = None
    url_context: Any = None


class GeminiCallingConfig(Struct, rename="camel"):
    mode: limits.Word | None = None
    allowed_function_names: Annotated[list[limits.Name], limits.Tools] | None = None


class GeminiToolConfig(Struct, rename="camel"):
    function_calling_config: GeminiCallingConfig | None = None


class GeminiThinkingConfig(Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: limits.Word | None = None


class GeminiGenerationConfig(ExtensionFields, rename="camel"):
    """The first four are in ExtensionFields too; here they get Google's names."""

    top_p: float | None = None
    top_k: Any = None  # a whole number, which its SDKs write as 5.0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: limits.StopStrings | None = None
    candidate_count: int | None = None
    response_mime_type: limits.Word | None = None
    response_schema: limits.JsonObject | None = None
    response_json_schema: Raw = field(default_factory=Raw)
    response_modalities: limits.Words | None = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    thinking_config: GeminiThinkingConfig | None = None
    # Without effect: sound, pictures, and choices of Google's services.
    audio_timestamp: Ignored = None
    audio_transcription_config: Ignored = None
    enable_affective_dialog: Ignored = None
    enable_enhanced_civic_answers: Ignored = None
    image_config: Ignored = None
    media_resolution: Ignored = None
    model_selection_config: Ignored = None
    response_format: Ignored = None
    routing_config: Ignored = None
    speech_config: Ignored = None
    translation_config: Ignored = None


class GeminiBody(Struct, rename="camel"):
    """The path names the model; `model` repeats it."""

    model: limits.Name | None = None
    contents: Annotated[list[GeminiContent], limits.Messages] | None = None
    system_instruction: GeminiContent | limits.Text | None = None
    tools: Annotated[list[GeminiTool], limits.Tools] | None = None
    tool_config: GeminiToolConfig | None = None
    generation_config: GeminiGenerationConfig | None = None
    cached_content: limits.Name | None = None
    continuation_token: limits.Text | None = None
    generation_output_config: Ignored = None
    labels: Ignored = None  # this and the next are without effect
    model_armor_config: Ignored = None
    safety_settings: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None


class GeminiCountBody(GeminiBody, rename="camel"):
    """`countTokens` takes contents, or a whole request."""

    generate_content_request: GeminiBody | None = None


# --- the request ----------------------------------------------------------------------------------------------------

_decoder = msgspec.json.Decoder(GeminiBody)
_count_decoder = msgspec.json.Decoder(GeminiCountBody)
_METHOD = re.compile(r"(?:/v\w+)?/(?:models|tunedModels)/(?P<model>.+):(?P<method>\w+)")
_NO_CONFIG = GeminiGenerationConfig()
MAX_TEMPERATURE = 2.0
_MAX_LOGPROBS = 20


def read_path(headers: Mapping[str, str]) -> tuple[str, str, str]:
    """The model, the method, and the form of a stream: "sse" or empty."""
    found = _METHOD.fullmatch(headers.get(PATH, ""))
    if found is None:
        raise InvalidRequest("the path must end in models/{model}:{method}", param="model")
    query = parse_qs(headers.get(QUERY, ""))
    return found["model"], found["method"], query.get("alt", [""])[-1]


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    model, method, alt = read_path(headers)
    stream = method == "streamGenerateContent"
    request = _read_body(decode_proto(_decoder, GeminiBody, body), model, headers)
    return msgspec.structs.replace(request, stream=stream, dialect="sse" if stream and alt == "sse" else "")


def read_count_request(body: bytes, headers: Mapping[str, str]) -> Request:
    parsed = decode_proto(_count_decoder, GeminiCountBody, body)
    return _read_body(parsed.generate_content_request or parsed, read_path(headers)[0], headers)


def _read_body(body: GeminiBody, model: str, headers: Mapping[str, str]) -> Request:
    config = body.generation_config or _NO_CONFIG
    warnings = [*ignored_fields(body), *ignored_fields(config)]
    if body.cached_content or body.continuation_token:
        name = "cachedContent" if body.cached_content else "continuationToken"
        raise Unsupported(f"{name}: contents are not stored here; send them whole", param=name)
    if not body.contents:
        raise InvalidRequest("contents: at least one content is required", param="contents")
    config.top_k = read_whole("generationConfig.topK", config.top_k)
    check_positive("maxOutputTokens", config.max_output_tokens)
    check_range("candidateCount", config.candidate_count, 1, MAX_N)
    modalities = [modality.lower() for modality in config.response_modalities or ()]
    if modalities and "text" not in modalities:
        raise Unsupported('responseModalities: models write text here; send ["TEXT"]', param="responseModalities")
    tools = tuple(_read_tools(body.tools or []))
    choice, tools = _read_tool_choice(body.tool_config, tools)
    return Request(
        model=model,
        messages=_read_messages(body, warnings),
        tools=tools,
        tool_choice=choice,
        sampling=read_sampling(config, MAX_TEMPERATURE),
        max_tokens=config.max_output_tokens,
        stop=read_stop(config.stop_sequences, warnings),
        n=config.candidate_count or 1,
        logprobs=_read_logprobs(config),
        constraint=read_constraint(config, ("responseSchema", _read_constraint(config))),
        reasoning=_read_thinking(config.thinking_config),
        lora_adapter=config.lora_adapter,
        chat_template_kwargs=config.chat_template_kwargs or {},
        documents=config.documents or (),
        priority=read_priority(config),
        session=read_session(headers, None),
        warnings=tuple(warnings),
    )


def _read_logprobs(config: GeminiGenerationConfig) -> int | None:
    check_range("logprobs", config.logprobs, 0, _MAX_LOGPROBS)
    return (config.logprobs or 0) if config.response_logprobs else None


def _read_thinking(config: GeminiThinkingConfig | None) -> Reasoning:
    """Without `includeThoughts` the client gets no text of the reasoning; its signature carries it."""
    if config is None:
        return Reasoning(summary="omitted")
    summary = None if config.include_thoughts else "omitted"
    budget, effort = config.thinking_budget, (config.thinking_level or "").lower() or None
    if effort == "thinking_level_unspecified":
        effort = None
    if budget == 0:
        return Reasoning(enabled=False, summary=summary)
    enabled = True if budget is not None or effort or config.include_thoughts else None
    return Reasoning(enabled=enabled, effort=effort, budget=budget if budget and budget > 0 else None, summary=summary)


# --- schemas and tools ------------------------------------------------------------------------------------------------

_METACHARACTER = re.compile(r"[\\.^$*+?()\[\]{}|]")


def _read_constraint(config: GeminiGenerationConfig) -> Constraint | None:
    kind, own = config.response_mime_type, bytes(config.response_json_schema).decode()
    if own not in ("", "null"):
        if not own.startswith("{"):
            raise InvalidRequest("responseJsonSchema must be an object", param="responseJsonSchema")
        return _schema("responseJsonSchema", own)
    if config.response_schema is not None:
        schema = read_schema(config.response_schema)
        if kind == "text/x.enum":
            return _enum(schema)
        return _schema("responseSchema", dumps(schema))
    if kind in (None, "", "text/plain"):
        return None
    if kind == "application/json":
        return Constraint("json_object")
    raise InvalidRequest(
        f"responseMimeType {kind[:40]!r} is unknown; send text/plain, application/json or text/x.enum with a schema",
        param="responseMimeType",
    )


def _schema(path: str, text: str) -> Constraint:
    return Constraint("json_schema", limits.check_length(path, text, limits.MAX_SCHEMA))


def _enum(schema: Mapping[str, Any]) -> Constraint:
    texts = schema.get("enum")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest("responseSchema.enum must list the texts that the answer may be", param="responseSchema")
    pattern = "|".join(_METACHARACTER.sub(lambda found: "\\" + found.group(), text) for text in texts)
    return Constraint("regex", limits.check_length("responseSchema.enum", f"({pattern})", limits.MAX_GRAMMAR))


_SERVER_TOOLS = tuple(name for name in GeminiTool.__struct_fields__ if name != "function_declarations")


def _read_tools(tools: list[GeminiTool]) -> list[Tool]:
    found: list[Tool] = []
    for tool in tools:
        for function in tool.function_declarations or ():
            schema = function.parameters_json_schema or read_schema(function.parameters) or {}
            found.append(Tool(function.name, function.description or "", schema))
        found += [Tool(name, kind="server", type=name) for name in _SERVER_TOOLS if getattr(tool, name) is not None]
    return found


def _read_tool_choice(config: GeminiToolConfig | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that it leaves."""
    calling = config.function_calling_config if config is not None else None
    mode = (calling.mode or "").upper() if calling is not None else ""
    if calling is None or mode in ("", "AUTO", "VALIDATED", "MODE_UNSPECIFIED"):
        return ToolChoice(), tools
    if mode == "NONE":
        return ToolChoice("none"), tools
    if mode != "ANY":
        path = "toolConfig.functionCallingConfig.mode"
        raise InvalidRequest(f"{path} {mode[:40]!r} is unknown; send AUTO, ANY, NONE or VALIDATED", param=path)
    allowed = calling.allowed_function_names or []
    if len(allowed) == 1:
        return ToolChoice("named", allowed[0]), tools
    return ToolChoice("required"), tuple(tool for tool in tools if not allowed or tool.name in allowed)


# --- contents -------------------------------------------------------------------------------------------------------


def _read_messages(body: GeminiBody, warnings: list[str]) -> tuple[Message, ...]:
    found: list[Message] = []
    if body.system_instruction is not None:
        found += _read_system(body.system_instruction)
    numbers = CallNumbers()
    for at, content in enumerate(body.contents or ()):
        path, parts = f"contents[{at}]", content.parts or []
        if content.role == "model":
            found.append(Message("assistant", tuple(_read_model_parts(parts, path, numbers, warnings))))
        elif content.role in (None, "", "user", "function", "tool"):
            found += _read_user(parts, path, numbers)
        else:
            raise InvalidRequest(
                f"{path}.role: unknown role {content.role!r}; the roles are user and model", param=f"{path}.role"
            )
    return tuple(found)


def _read_system(instruction: GeminiContent | str) -> list[Message]:
    if isinstance(instruction, str):
        parts: tuple[Part, ...] = (Text(instruction),)
    else:
        parts = tuple(Text(part.text) for part in instruction.parts or () if part.text)
    return [Message("system", parts)] if parts else []


def _read_user(parts: list[GeminiPart], path: str, numbers: CallNumbers) -> list[Message]:
    """Results of tools first, as their own message; then what the user says."""
    results = tuple(_read_result(part.function_response, numbers) for part in parts if part.function_response)
    said: list[Part] = []
    for at, part in enumerate(parts):
        if part.function_response is None:
            said.append(_read_part(part, f"{path}.parts[{at}]"))
    messages = [Message("tool", results)] if results else []
    return [*messages, Message("user", tuple(said))] if said or not results else messages


def _read_part(part: GeminiPart, path: str) -> Text | Image | Audio | Document:
    if part.text is not None:
        return Text(part.text)
    if part.inline_data is not None:
        return _read_blob(part.inline_data, f"{path}.inlineData")
    if part.file_data is not None:
        return _read_file(part.file_data, f"{path}.fileData")
    raise InvalidRequest(
        f"{path} has nothing that a model reads here; send text, inlineData or fileData",
        param=path,
        code="modality_unsupported",
    )


_PDF = "application/pdf"


def _read_blob(blob: GeminiBlob, path: str) -> Text | Image | Audio | Document:
    kind = blob.mime_type.partition(";")[0].strip().lower()
    if kind.startswith("image/"):
        return Image(f"data:{kind};base64,{_standard_base64(blob.data)}")
    if kind.startswith("audio/"):
        return Audio(f"data:{kind};base64,{_standard_base64(blob.data)}")
    if kind == _PDF:
        return Document(f"data:{kind};base64,{_standard_base64(blob.data)}")
    if kind.startswith("text/") or kind == "application/json":
        return Text(_decoded(blob.data, path).decode("utf-8", "replace"))
    raise _unreadable(path, kind)


def _read_file(file: GeminiFile, path: str) -> Image | Document:
    """A file that was uploaded here is what its content says, whatever its type."""
    if (id := file_of_uri(file.file_uri)) is not None:
        return Document(FILE_ID + id)
    kind = file.mime_type.lower()
    if kind == _PDF:
        return Document(file.file_uri)
    if kind and not kind.startswith("image/"):
        raise _unreadable(path, kind)
    return Image(file.file_uri)


def _unreadable(path: str, kind: str) -> InvalidRequest:
    message = f"{path} is of type {kind[:40]!r}, which no model reads here; send an image or text"
    return InvalidRequest(message, param=f"{path}.mimeType", code="modality_unsupported")


def _standard_base64(data: str) -> str:
    """Python's SDK sends the URL-safe alphabet."""
    return data.replace("-", "+").replace("_", "/")


def _decoded(data: str, path: str) -> bytes:
    try:
        return base64.b64decode(_standard_base64(data) + "=" * (-len(data) % 4))
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{path}.data is not base64", param=f"{path}.data") from None


def _read_result(result: GeminiResult, numbers: CallNumbers) -> ToolResult:
    """`output` (or `result`) and `error` hold the text where the client has only one to send."""
    response, is_error = result.response, False
    if isinstance(response, dict) and len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "result", "error"):
            response, is_error = value, name == "error"
    text = response if isinstance(response, str) else "" if response is None else dumps(response)
    content: list[ResultPart] = [Text(text)] if text else []
    for part in result.parts or ():
        if part.inline_data is not None:
            content.append(_read_blob(part.inline_data, "functionResponse.parts.inlineData"))
        elif part.file_data is not None:
            content.append(_read_file(part.file_data, "functionResponse.parts.fileData"))
    return ToolResult(numbers.result(result.name, result.id), tuple(content), is_error)


def _read_model_parts(parts: list[GeminiPart], path: str, numbers: CallNumbers, warnings: list[str]) -> list[Part]:
    """Reasoning that the client left out returns from the signature of the part behind it."""
    found: list[Part] = []
    has_thinking = False
    for at, part in enumerate(parts):
        if part.thought and part.text is not None:
            found.append(Thinking(part.text, part.thought_signature or ""))
            has_thinking = True
            continue
        if part.thought_signature and not has_thinking and (text := read_signature(part.thought_signature)) is not None:
            found.append(Thinking(text, part.thought_signature))
        has_thinking = False
        if part.function_call is not None:
            call = part.function_call
            found.append(ToolCall(numbers.call(call.name, call.id), call.name, read_arguments(call.args)))
        elif part.text is not None:
            if part.text:
                found.append(Text(part.text))
        elif part.inline_data is not None and part.inline_data.mime_type.startswith("image/"):
            found.append(_read_blob(part.inline_data, f"{path}.parts[{at}].inlineData"))
        else:  # its own earlier reply, which may come from another model
            warnings.append(f"content_part_dropped: {path}.parts[{at}]")
    return found


def read_signature(signature: str) -> str | None:
    """The reasoning in a signature of ours; None for a foreign one."""
    try:
        packed = base64.b64decode(_standard_base64(signature) + "=" * (-len(signature) % 4))
        return unpack_reasoning(packed.decode("ascii"))
    except (binascii.Error, ValueError):
        return None
