"""Gemini's Interactions as a client protocol: `POST /v1beta/interactions`, on the stored responses of the gateway.

An interaction is a list of steps: user_input, thought, model_output, function_call, function_result. Its id
is that of the stored response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Struct, field

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    Usage,
)
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
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from modelyard.protocols.common.extensions import Ignored, ignored_fields
from modelyard.protocols.common.json import JsonObject, decode, dumps, encode
from modelyard.protocols.common.sse import frame
from modelyard.protocols.gemini import write_error

NAME = "gemini_interactions"
PATHS = ("/v1beta/interactions", "/v1/interactions", "/v1alpha/interactions")
_CUT: tuple[StopReason, ...] = ("max_tokens", "window", "repetition", "content_filter")
_CHOICES = {"auto": "auto", "validated": "auto", "any": "required", "none": "none"}

__all__ = ["NAME", "PATHS", "read_request", "write_error", "write_reply", "writer"]


class GenerationSettings(Struct):
    max_output_tokens: int | None = None
    seed: int | None = None
    stop_sequences: limits.StopStrings | None = None
    temperature: float | None = None
    top_p: float | None = None
    thinking_level: limits.Word | None = None
    thinking_summaries: limits.Word | None = None
    tool_choice: Any = None


class InteractionBody(Struct):
    model: limits.Name = ""
    agent: Any = None
    input: limits.Text | limits.JsonObject | Annotated[list[limits.JsonObject], limits.Messages] | None = None
    previous_interaction_id: limits.Id | None = None
    system_instruction: limits.Text | None = None
    generation_config: GenerationSettings = field(default_factory=GenerationSettings)
    tools: Annotated[list[limits.JsonObject], limits.Tools] | None = None
    response_format: Any = None
    response_mime_type: limits.Word | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    labels: Ignored = None
    safety_settings: Ignored = None
    service_tier: Ignored = None
    webhook_config: Ignored = None
    cached_content: Ignored = None
    environment: Ignored = None


_decoder = msgspec.json.Decoder(InteractionBody)


# --- the request ------------------------------------------------------------------------------------------------------


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    del headers
    parsed = decode(_decoder, body)
    if parsed.agent is not None:
        raise Unsupported("agent: agents run at Google; name a model", param="agent")
    if not parsed.model:
        raise InvalidRequest("model: the name of a model is required", param="model")
    if parsed.background and parsed.stream:
        raise Unsupported("background: an interaction in the background is read with GET, not streamed", param="stream")
    if parsed.background and parsed.store is False:
        raise InvalidRequest("background needs store: its result is fetched later", param="background")
    config, instruction = parsed.generation_config, parsed.system_instruction
    system = [Message("system", (Text(instruction),))] if instruction else []
    messages = (*system, *_read_input(parsed.input))
    if len(messages) == len(system):
        raise InvalidRequest("input is empty: send a text, contents or steps", param="input")
    return Request(
        model=parsed.model.removeprefix("models/"),
        messages=messages,
        instructions=bool(system),
        tools=tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(parsed.tools or [])),
        tool_choice=_read_choice(config.tool_choice),
        sampling=Sampling(temperature=config.temperature, top_p=config.top_p, seed=config.seed),
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        constraint=_read_format(parsed),
        reasoning=Reasoning(effort=config.thinking_level, summary=config.thinking_summaries),
        stream=bool(parsed.stream),
        previous=parsed.previous_interaction_id,
        store=parsed.store,
        background=bool(parsed.background),
        warnings=tuple(ignored_fields(parsed)),
    )


def _read_input(value: Any) -> list[Message]:
    if value is None:
        return []
    entries: list[Any] = value if isinstance(value, list) else [{"type": "text", "text": value}]
    if isinstance(value, dict):
        entries = [value]
    turns: list[tuple[Role, list[Part]]] = []
    for index, entry in enumerate(entries):
        role, parts = _read_step(entry, f"input[{index}]")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(parts)
        else:
            turns.append((role, list(parts)))
    return [Message(role, tuple(parts)) for role, parts in turns]


def _read_step(entry: JsonObject, path: str) -> tuple[Role, Iterable[Part]]:
    kind = entry.get("type")
    if kind == "user_input":
        return "user", _read_contents(entry.get("content"), path)
    if kind == "model_output":
        return "assistant", _read_contents(entry.get("content"), path)
    if kind == "thought":
        texts = [part.text for part in _read_contents(entry.get("summary"), path) if isinstance(part, Text)]
        return "assistant", [Thinking("\n".join(texts))]
    if kind == "function_call":
        id, name = _string(entry, "id", path), _string(entry, "name", path)
        return "assistant", [ToolCall(id, name, dumps(entry.get("arguments") or {}))]
    if kind == "function_result":
        result = entry.get("result")
        content = _read_contents(result, path) if isinstance(result, list) else [_result_text(result)]
        id = _string(entry, "call_id", path)
        return "tool", [ToolResult(id, tuple(content), is_error=entry.get("is_error") is True)]
    return "user", [_read_content(entry, path)]


def _result_text(result: Any) -> Text:
    return Text(result if isinstance(result, str) else dumps(result))


def _read_contents(value: Any, path: str) -> list[ResultPart]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise InvalidRequest(f"{path}.content must be a list of contents", param=path)
    return [_read_content(one, f"{path}.content[{index}]") for index, one in enumerate(value)]


def _read_content(entry: JsonObject, path: str) -> ResultPart:
    kind = entry.get("type")
    if kind == "text":
        return Text(_string(entry, "text", path))
    if kind in ("image", "audio", "document"):
        data, uri = entry.get("data"), entry.get("uri")
        if isinstance(data, str):
            uri = f"data:{_string(entry, 'mime_type', path)};base64,{data}"
        if not isinstance(uri, str):
            raise InvalidRequest(f"{path}: {kind} needs data or uri", param=path)
        return Image(uri) if kind == "image" else Audio(uri) if kind == "audio" else Document(uri)
    raise Unsupported(f"{path} is of type {str(kind)[:40]!r}, which no model reads here", param=path)


def _string(entry: JsonObject, name: str, path: str) -> str:
    if not isinstance(value := entry.get(name), str):
        raise InvalidRequest(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return value


def _read_tool(entry: JsonObject, path: str) -> Tool:
    kind = entry.get("type")
    if kind != "function":
        return Tool(str(kind), parameters=entry, kind="server", type=str(kind))
    name, parameters = _string(entry, "name", path), entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{path}.parameters must be a JSON schema", param=path)
    return Tool(name, str(entry.get("description") or ""), parameters)


def _read_choice(value: Any) -> ToolChoice:
    mode = value
    if isinstance(value, dict) and isinstance(allowed := value.get("allowed_tools"), dict):
        names = allowed.get("tools")
        if isinstance(names, list) and len(names) == 1 and allowed.get("mode") == "any":
            return ToolChoice("named", str(names[0]))
        mode = allowed.get("mode")
    if mode is None:
        return ToolChoice()
    if mode not in _CHOICES:
        raise InvalidRequest(f"tool_choice must be one of {', '.join(_CHOICES)}", param="generation_config.tool_choice")
    return ToolChoice(_CHOICES[mode])  # type: ignore[arg-type]


def _read_format(body: InteractionBody) -> Constraint | None:
    wanted = body.response_format
    if isinstance(wanted, list):
        wanted = next((one for one in wanted if isinstance(one, dict) and one.get("type") == "text"), None)
    if isinstance(wanted, dict):
        schema = wanted.get("schema", None if "type" in wanted and wanted["type"] == "text" else wanted)
        if isinstance(schema, dict):
            text = limits.check_length("response_format", dumps(schema), limits.MAX_SCHEMA)
            return Constraint("json_schema", text)
        if wanted.get("mime_type") == "application/json":
            return Constraint("json_object")
    return Constraint("json_object") if body.response_mime_type == "application/json" else None


# --- the reply --------------------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:
    reply = replies[0]
    parts = [block.part for block in reply.blocks if block.complete]
    state = {"previous_interaction_id": request.previous} if request.previous else {}
    written = write_interaction(
        f"resp_{reply.started.id}", reply.started.model, reply.started.created, status(reply.finished, parts)
    )
    steps = list(map(write_step, parts))
    return encode(written | state | {"steps": steps, "usage": write_usage(reply.finished.usage)})


def status(finished: Finished, parts: Iterable[object] = ()) -> str:
    if finished.reason in _CUT:
        return "incomplete"
    waits = finished.reason == "tool_calls" or any(isinstance(part, ToolCall) and not part.server for part in parts)
    return "requires_action" if waits else "completed"


def write_interaction(id: str, model: str, created: int, status: str) -> JsonObject:
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"id": id, "object": "interaction", "model": model, "created": moment, "updated": moment, "status": status}


def write_step(part: Part) -> JsonObject:
    if isinstance(part, ToolCall):
        return {"type": "function_call", "id": part.id, "name": part.name, "arguments": _arguments(part.arguments)}
    if isinstance(part, ToolResult):
        texts = [one.text for one in part.content if isinstance(one, Text)]
        return {"type": "function_result", "call_id": part.call_id, "result": "\n".join(texts)}
    text = part.text if isinstance(part, Text | Thinking) else ""
    if isinstance(part, Thinking):
        return {"type": "thought", "summary": [{"type": "text", "text": text}]}
    return {"type": "model_output", "content": [{"type": "text", "text": text}]}


def _arguments(text: str) -> JsonObject:
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {"input": text}
    return found if isinstance(found, dict) else {"input": found}


def write_usage(usage: Usage) -> JsonObject:
    return {
        "total_input_tokens": usage.prompt,
        "total_cached_tokens": usage.cached,
        "total_output_tokens": usage.output - usage.reasoning,
        "total_thought_tokens": usage.reasoning,
        "total_tokens": usage.prompt + usage.output,
    }


# --- the stream -------------------------------------------------------------------------------------------------------


class InteractionWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._request, self._trace = request, trace
        self._started = Started(trace, request.model, 0)
        self._start = BlockStart(0, "text")
        self._calls = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        del choice
        return b"".join(frame(encode(body), body["event_type"]) for body in self._events(event))

    def _events(self, event: Event) -> Iterator[JsonObject]:
        if isinstance(event, Started):
            self._started = event
            yield {"event_type": "interaction.created", "interaction": self._interaction("in_progress")}
        elif isinstance(event, BlockStart) and event.kind != "tool_result":
            self._start = event
            self._calls |= event.kind == "tool_call" and event.server is None
            yield {"event_type": "step.start", "index": event.index, "step": self._empty(event)}
        elif isinstance(event, BlockDelta):
            yield {"event_type": "step.delta", "index": event.index, "delta": self._delta(event.text)}
        elif isinstance(event, BlockEnd):
            if event.result is not None:
                step = write_step(event.result)
                yield {"event_type": "step.start", "index": event.index, "step": step}
            yield {"event_type": "step.stop", "index": event.index}
        elif isinstance(event, Finished):
            state = "requires_action" if self._calls and event.reason not in _CUT else status(event)
            usage = {"usage": write_usage(event.usage)}
            yield {"event_type": "interaction.completed", "interaction": self._interaction(state) | usage}
        elif isinstance(event, Failed):
            yield {"event_type": "error", "error": {"code": event.error.code, "message": event.error.message}}

    def _interaction(self, state: str) -> JsonObject:
        return write_interaction(f"resp_{self._trace}", self._started.model, self._started.created, state)

    def _empty(self, start: BlockStart) -> JsonObject:
        if start.kind == "tool_call":
            return {"type": "function_call", "id": start.call_id, "name": start.name, "arguments": {}}
        return {"type": "thought"} if start.kind == "thinking" else {"type": "model_output"}

    def _delta(self, text: str) -> JsonObject:
        if self._start.kind == "tool_call":
            return {"type": "arguments_delta", "arguments": text}
        if self._start.kind == "thinking":
            return {"type": "thought_summary", "content": {"type": "text", "text": text}}
        return {"type": "text", "text": text}

    def keepalive(self) -> bytes:
        return b": waiting\n\n"

    def end(self) -> bytes:
        return frame(b"[DONE]", "done")


def writer(request: Request, trace: str) -> InteractionWriter:
    return InteractionWriter(request, trace)
