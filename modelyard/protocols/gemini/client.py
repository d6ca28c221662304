"""The client role: requests to an upstream that speaks Google's API, and its replies and streams to core values."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockKind,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    TokenLogprob,
    Usage,
    collect_reply,
)
from modelyard.core.request import (
    Audio,
    Constraint,
    Image,
    Message,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from modelyard.protocols.common.call_arguments import read_arguments, write_arguments
from modelyard.protocols.common.extensions import check_temperature, present, write_extensions
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_fields import MIN_LOGPROB
from modelyard.protocols.common.sse import SseParser
from modelyard.protocols.gemini.errors import read_error_field
from modelyard.protocols.gemini.reply import write_signature
from modelyard.protocols.gemini.request import MAX_TEMPERATURE, GeminiCall

# --- the outgoing request -------------------------------------------------------------------------------------------

_NAMES = {
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}


def write_request(request: Request) -> bytes:
    """The path has the model and says whether the reply is a stream."""
    check_temperature(request, MAX_TEMPERATURE, "Google")
    system = [message for message in request.messages[:1] if message.role in ("system", "developer")]
    names = {part.id: part.name for message in request.messages for part in message.parts if isinstance(part, ToolCall)}
    contents = [_write_content(message, names) for message in request.messages[len(system) :]]
    functions = [_write_tool(tool) for tool in request.tools if tool.kind != "server" and not tool.deferred]
    body: dict[str, Any] = {"contents": [content for content in contents if content["parts"]]}
    body |= present(
        systemInstruction={"parts": _write_parts(system[0], names)} if system else None,
        tools=[{"functionDeclarations": functions}] if functions else None,
        toolConfig=_write_tool_choice(request.tool_choice),
        generationConfig=_write_config(request) or None,
    )
    return encode(body)


def _write_config(request: Request) -> dict[str, Any]:
    config = {_NAMES.get(name, name): value for name, value in write_extensions(request).items()}
    return config | present(
        maxOutputTokens=request.max_tokens,
        stopSequences=request.stop or None,
        candidateCount=request.n if request.n != 1 else None,
        responseLogprobs=None if request.logprobs is None else True,
        logprobs=request.logprobs or None,
        thinkingConfig=_write_thinking(request.reasoning),
        **_write_format(request.constraint),
    )


def _write_format(constraint: Constraint | None) -> dict[str, Any]:
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return {}
    schema = Raw(constraint.text.encode()) if constraint.kind == "json_schema" else None
    return {"responseMimeType": "application/json"} | present(responseJsonSchema=schema)


def _write_thinking(reasoning: Reasoning) -> dict[str, Any] | None:
    if reasoning.enabled is False:
        return {"thinkingBudget": 0} | ({} if reasoning.summary == "omitted" else {"includeThoughts": True})
    config = present(thinkingBudget=reasoning.budget, thinkingLevel=reasoning.effort)
    shown = reasoning.summary != "omitted" and reasoning.visible is not False
    if reasoning.enabled and not config and not shown:
        config["thinkingBudget"] = -1
    return config | ({"includeThoughts": True} if shown else {}) or None


def _write_tool(tool: Tool) -> dict[str, Any]:
    body: dict[str, Any] = {"name": tool.name} | present(description=tool.description or None)
    return body | present(parametersJsonSchema=tool.parameters or None)


def _write_tool_choice(choice: ToolChoice) -> dict[str, Any] | None:
    if choice.mode == "auto":
        return None
    config: dict[str, Any] = {"mode": "NONE" if choice.mode == "none" else "ANY"}
    if choice.mode == "named":
        config["allowedFunctionNames"] = [choice.name]
    return {"functionCallingConfig": config}


def _write_content(message: Message, names: dict[str, str]) -> dict[str, Any]:
    role = "model" if message.role == "assistant" else "user"
    return {"role": role, "parts": _write_parts(message, names)}


def _write_parts(message: Message, names: dict[str, str]) -> list[dict[str, Any]]:
    """The signature of reasoning goes to the part behind it, which clients return."""
    out: list[dict[str, Any]] = []
    signature = ""
    for part in message.parts:
        if isinstance(part, Thinking):
            signature = write_signature(part)
            if part.text:
                out.append({"text": part.text, "thought": True} | present(thoughtSignature=part.signature or None))
            continue
        written: dict[str, Any] | None = None
        if isinstance(part, Text):
            written = {"text": part.text}
        elif isinstance(part, Image | Audio):
            written = _write_image(part)
        elif isinstance(part, ToolCall):
            call = {"id": part.id, "name": part.name, "args": write_arguments(part.arguments)}
            written = {"functionCall": call} | ({"thoughtSignature": signature} if signature else {})
            signature = ""
        elif isinstance(part, ToolResult):
            written = {"functionResponse": _write_result(part, names)}
        if written is not None:
            out.append(written)
    return out


def _write_image(image: Image | Audio) -> dict[str, Any]:
    if image.url.startswith("data:") and ";base64," in image.url:
        kind, _, data = image.url.removeprefix("data:").partition(";base64,")
        return {"inlineData": {"mimeType": kind, "data": data}}
    return {"fileData": {"fileUri": image.url}}


def _write_result(result: ToolResult, names: dict[str, str]) -> dict[str, Any]:
    text = "".join(part.text for part in result.content if isinstance(part, Text))
    images = [_write_image(part) for part in result.content if isinstance(part, Image)]
    response = {"error" if result.is_error else "output": text}
    body = {"id": result.call_id, "name": names.get(result.call_id, result.call_id), "response": response}
    return body | present(parts=images or None)


# --- replies ----------------------------------------------------------------------------------------------------------


class UpstreamPart(Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: GeminiCall | None = None


class UpstreamContent(Struct):
    parts: list[UpstreamPart] | None = None


class UpstreamTokenCandidate(Struct, rename="camel"):
    token: str = ""
    token_id: int | None = None
    log_probability: float | None = None

    def read(self) -> TokenLogprob:
        value = MIN_LOGPROB if self.log_probability is None else self.log_probability
        return TokenLogprob(self.token, value, self.token.encode(), id=self.token_id)


class UpstreamTopCandidates(Struct):
    candidates: list[UpstreamTokenCandidate] | None = None


class UpstreamLogprobsResult(Struct, rename="camel"):
    chosen_candidates: list[UpstreamTokenCandidate] | None = None
    top_candidates: list[UpstreamTopCandidates] | None = None

    def read(self) -> tuple[TokenLogprob, ...]:
        tops = self.top_candidates or []
        return tuple(
            msgspec.structs.replace(
                token.read(), top=tuple(other.read() for other in tops[at].candidates or ()) if at < len(tops) else ()
            )
            for at, token in enumerate(self.chosen_candidates or ())
        )


class UpstreamCandidate(Struct, rename="camel"):
    content: UpstreamContent | None = None
    finish_reason: str | None = None
    index: int = 0
    logprobs_result: UpstreamLogprobsResult | None = None


class UpstreamUsageMetadata(Struct, rename="camel"):
    prompt_token_count: int = 0
    cached_content_token_count: int = 0
    candidates_token_count: int = 0
    thoughts_token_count: int = 0

    def read(self) -> Usage:
        output = self.candidates_token_count + self.thoughts_token_count
        return Usage(self.prompt_token_count, self.cached_content_token_count, output, self.thoughts_token_count)


class UpstreamContentReply(Struct, rename="camel"):
    candidates: list[UpstreamCandidate] | None = None
    usage_metadata: UpstreamUsageMetadata | None = None
    model_version: str = ""
    response_id: str = ""
    prompt_feedback: Any = None
    error: Any = None


_STOP_REASONS: dict[str, StopReason] = {"MAX_TOKENS": "max_tokens", "STOP": "end"}
_FILTERS = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY")
_decoder = msgspec.json.Decoder(UpstreamContentReply)


def read_reply(body: bytes) -> Reply:
    """The first candidate of a reply: the collected events of a stream with one chunk."""
    reader = GeminiStreamReader()
    reader.read_chunk(body)
    return collect_reply(reader.finish())


def _stop_reason(name: str, has_calls: bool) -> StopReason:
    if name in _FILTERS:
        return "content_filter"
    reason = _STOP_REASONS.get(name, "end")
    return "tool_calls" if reason == "end" and has_calls else reason


class GeminiStreamReader:
    """Bytes of a stream of server-sent events to events. Ends with exactly one Finished or Failed.

    A call arrives whole. The signature of a part closes the reasoning before it, so a thinking block stays open until
    the next part has come.
    """

    def __init__(self) -> None:
        self._sse = SseParser()
        self._kind: BlockKind | None = None
        self._signature = ""
        self._blocks = self._calls = 0
        self._started = self._done = False
        self._stop: str | None = None
        self._usage = Usage()
        self._out: list[Event] = []

    def feed(self, data: bytes) -> list[Event]:
        for event in self._sse.feed(data):
            self.read_chunk(event.data)
        return self._take()

    def finish(self) -> list[Event]:
        for event in self._sse.finish():
            self.read_chunk(event.data)
        if self._stop is not None and not self._done:
            self._close()
            self._done = True
            self._out.append(Finished(_stop_reason(self._stop, self._calls > 0), self._usage))
        elif not self._done:
            self._fail(Incomplete("the upstream's stream ended before its answer did"))
        return self._take()

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def read_chunk(self, data: bytes) -> None:
        if self._done:
            return
        try:
            self._read(_decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(Incomplete(f"the upstream sent a chunk that cannot be read: {error}"))
        except ModelyardError as error:
            self._fail(error)

    def _read(self, chunk: UpstreamContentReply) -> None:
        if chunk.error:
            raise read_error_field(chunk.error)
        if not self._started:
            self._started = True
            self._out.append(Started(chunk.response_id, chunk.model_version, 0))
        if chunk.usage_metadata is not None:
            self._usage = chunk.usage_metadata.read()
        for candidate in chunk.candidates or ():
            if candidate.index != 0 or self._stop is not None:
                continue
            logprobs = candidate.logprobs_result.read() if candidate.logprobs_result is not None else ()
            for part in (candidate.content.parts or ()) if candidate.content is not None else ():
                self._read_part(part, logprobs)
                logprobs = () if part.text else logprobs
            self._stop = candidate.finish_reason
        if (
            not chunk.candidates
            and isinstance(chunk.prompt_feedback, dict)
            and chunk.prompt_feedback.get("blockReason")
        ):
            self._stop = "SAFETY"

    def _read_part(self, part: UpstreamPart, logprobs: tuple[TokenLogprob, ...]) -> None:
        if part.thought_signature and self._kind == "thinking":
            self._signature = part.thought_signature
        if part.function_call is not None:
            self._add_call(part.function_call)
        elif part.thought and part.text:
            self._add("thinking", part.text, ())
            self._signature = part.thought_signature or self._signature
        elif part.text or logprobs:
            self._add("text", part.text or "", logprobs)

    def _add(self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if self._kind != kind:
            self._close()
            self._kind = kind
            self._out.append(BlockStart(self._blocks, kind))
        self._out.append(BlockDelta(self._blocks, text, logprobs))

    def _add_call(self, body: GeminiCall) -> None:
        self._close()
        self._calls += 1
        self._out.append(BlockStart(self._blocks, "tool_call", body.id or f"call_{self._calls}", body.name))
        if arguments := read_arguments(body.args):
            self._out.append(BlockDelta(self._blocks, arguments))
        self._kind = "tool_call"
        self._close()

    def _close(self) -> None:
        if self._kind is None:
            return
        signature, self._signature = (self._signature, "") if self._kind == "thinking" else ("", self._signature)
        self._out.append(BlockEnd(self._blocks, signature))
        self._blocks += 1
        self._kind = None

    def _fail(self, error: ModelyardError) -> None:
        self._done = True
        self._out.append(Failed(error))
