"""Writes chat replies, whole and as chunks, and OpenAI's list of models.

A delta is the hottest path of the program: constant bytes around one JSON string.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Reply,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Request, Text, ToolCall
from modelyard.protocols.common.dialects import INFER_SERVER
from modelyard.protocols.common.json import encode, is_json_object
from modelyard.protocols.common.llama_reply import write_progress, write_timings
from modelyard.protocols.common.openai_errors import error_body
from modelyard.protocols.common.openai_fields import (
    DONE,
    FINGERPRINT,
    FINISH_REASONS,
    MIN_LOGPROB,
    OpenAIUsage,
    PromptLogprobs,
    write_prompt_logprobs,
    write_usage,
)
from modelyard.protocols.common.sse import comment, frame

ID_PREFIX = "chatcmpl-"
REPETITION = "repetition_detected"


# Structs, not dictionaries: they are built and encoded in half the time.
class CompletionMessage(Struct, gc=False):
    """`content` is null only beside calls: an empty answer is an empty string."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    annotations: tuple[()] = ()


class CompletionChoice(Struct, gc=False):
    index: int
    message: CompletionMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | UnsetType = UNSET


class ChatCompletion(Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage
    system_fingerprint: str = FINGERPRINT
    timings: dict[str, Any] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


def write_reply(replies: list[Reply], request: Request) -> bytes:
    started = replies[0].started
    choices = [_write_choice(index, reply, request) for index, reply in enumerate(replies)]
    usages = [reply.finished.usage for reply in replies]
    usage = write_usage(usages[:1], usages)
    whole = ChatCompletion(ID_PREFIX + started.id, "chat.completion", started.created, started.model, choices, usage)
    if request.timings is not None:
        whole.timings = write_timings(usages[0], replies[0].finished.timings)
    if request.prompt_logprobs is not None:
        whole.prompt_logprobs = write_prompt_logprobs(started.prompt_logprobs, request.prompt_logprobs)
    return encode(whole)


THINK, THINK_END = "<think>\n", "\n</think>\n\n"  # around the reasoning in a text


def _write_choice(index: int, reply: Reply, request: Request) -> CompletionChoice:
    finished, (text, thinking, calls) = reply.finished, reply.contents()
    if thinking and (where := request.reasoning.in_text) is not None:
        text, thinking = f"{THINK}{thinking}{THINK_END}{text}", thinking if where == "too" else ""
    message = CompletionMessage(
        "assistant",
        text if text or not calls else None,
        reasoning_content=thinking or UNSET,
        reasoning=(request.reasoning.both_names and thinking) or UNSET,
        tool_calls=[write_call(call) for call in calls] if calls else UNSET,
    )
    logprobs = None
    if request.logprobs is not None:
        logprobs = write_logprobs(t for b in reply.blocks if isinstance(b.part, Text) for t in b.logprobs)
    stop = _stop_reason(finished) or UNSET
    return CompletionChoice(index, message, logprobs, FINISH_REASONS[finished.reason], stop)


def _stop_reason(finished: Finished) -> str | None:
    """An extension that vLLM and others write too: the stop string, or why the reply was cut."""
    return REPETITION if finished.reason == "repetition" else finished.stop_string


def write_call(call: ToolCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def write_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [_write_logprob(t) | {"top_logprobs": [_write_logprob(other) for other in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def _write_logprob(token: TokenLogprob) -> dict[str, Any]:
    logprob = max(token.logprob, MIN_LOGPROB)
    return {"token": token.token, "logprob": logprob, "bytes": list(token.bytes) if token.bytes else None}


# --- models ---------------------------------------------------------------------------------------------------------


def write_models(cards: Iterable[ModelCard], *, for_mistral: bool = False) -> bytes:
    return encode({"object": "list", "data": [_model(card, for_mistral) for card in cards]})


def write_model(card: ModelCard, *, for_mistral: bool = False) -> bytes:
    return encode(_model(card, for_mistral))


# Mistral's word for what a model can do → ours
_MISTRAL = {
    "completion_chat": "completion",
    "completion_fim": "insert",
    "function_calling": "tools",
    "reasoning": "thinking",
    "vision": "vision",
}


def _model(card: ModelCard, for_mistral: bool) -> dict[str, Any]:
    """OpenAI's fields, plus the context length, the state and what the model can do. Mistral's SDKs require a type, and
    an object of what it can do."""
    mistral: dict[str, Any] = {}
    if for_mistral:
        able = {theirs: ours in card.capabilities for theirs, ours in _MISTRAL.items()}
        mistral = {"type": "base", "capabilities": able} | (
            {"max_context_length": card.context} if card.context else {}
        )
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.root or card.id,
        **({"route": card.route} if card.route else {}),
        "name": card.display_name or card.id,
        "context_length": card.context,
        "max_model_len": card.context,
        "max_output_tokens": card.max_output,
        "state": card.state,
        "aliases": card.aliases,
        "modalities": card.modalities,
        "capabilities": card.capabilities,
        **mistral,
    }


_KEEPALIVE = comment()
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'

# block kind → the bytes before the text inside `delta`
_TEXT_FIELDS = {"text": b'{"content":', "thinking": b'{"reasoning_content":'}


class _Choice:
    """One choice: the bytes around the text of its open block, its calls so far, and its usage once it has ended.

    `repeat` is between the two times that the text of reasoning is written, if it has two names. `arguments` are those
    of the open call. `held` is an open call of a custom tool: free text that was cut off looks complete, so it is
    written only when it is. `block_end` is written when the block ends.
    """

    __slots__ = (
        *("arguments", "block_end", "calls", "delta_end", "delta_start", "held", "is_text", "repeat", "start", "usage"),
    )

    def __init__(self, start: bytes) -> None:
        self.start = start
        self.delta_start = self.delta_end = self.repeat = self.block_end = b""
        self.calls = 0
        self.is_text = False
        self.arguments: list[str] | None = None
        self.held: list[bytes] | None = None
        self.usage: Usage | None = None


class ChatStreamWriter:
    def __init__(self, request: Request, trace: str) -> None:
        self._trace = trace
        self._include_usage = request.include_usage
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._chunk_end = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._repeats_reasoning, self._reasoning_in_text = request.reasoning.both_names, request.reasoning.in_text
        self._has_timings = request.timings is not None
        self._timings: bytes | None = None  # of the last choice that has ended
        self._failed, self._has_error_reason = False, request.dialect == INFER_SERVER

    def write(self, event: Event, choice: int = 0) -> bytes:
        if self._failed:
            return b""
        if type(event) is BlockDelta:
            state = self._choices[choice]
            if event.logprobs and state.is_text:
                return self._delta_with_logprobs(state, event)
            if state.arguments is not None:
                return self._call_delta(state, event.text)
            if state.repeat and event.text:
                text = encode(event.text)
                return state.delta_start + text + state.repeat + text + state.delta_end
            return state.delta_start + encode(event.text) + state.delta_end if event.text else b""
        if isinstance(event, BlockStart):
            return self._start_block(event, self._choices[choice])
        if isinstance(event, BlockEnd):
            return self._end_block(event, self._choices[choice])
        if isinstance(event, Started):
            return self._start(event, choice)
        if isinstance(event, Finished):
            return self._finish(event, self._choices[choice])
        if isinstance(event, PromptRead):
            return self._write_progress(event, self._choices[choice])
        if isinstance(event, Measured):
            return self._measure(event, self._choices[choice])
        return self._fail(event.error) if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return _KEEPALIVE

    def end(self) -> bytes:
        """Usage and [DONE]. A stream with an unfinished choice must not look complete: it ends with an error chunk."""
        if self._failed:
            return b""
        usages = [self._choices[choice].usage for choice in sorted(self._choices)]
        finished = [usage for usage in usages if usage is not None]
        if not finished or len(finished) < len(usages):
            return self._fail(Incomplete("the answer ended before it was complete", id=self._trace))
        if not self._include_usage:
            return DONE
        fields = self._fields | {"choices": [], "usage": write_usage(finished[:1], finished)}
        if self._timings is not None:
            fields["timings"] = Raw(self._timings)
        return frame(encode(fields)) + DONE

    def _start(self, event: Started, choice: int) -> bytes:
        """The first choice to start gives the id, time and model of every chunk."""
        if not self._fields:
            self._fields = {
                "id": ID_PREFIX + event.id,
                "object": "chat.completion.chunk",
                "created": event.created,
                "model": event.model,
                "system_fingerprint": FINGERPRINT,
            }
        start = b"data: " + encode(self._fields)[:-1] + b',"choices":[{"index":%d,"delta":' % choice
        self._choices[choice] = _Choice(start)
        return self._chunk(start, b'{"role":"assistant","content":""}')

    def _chunk(self, start: bytes, delta: bytes) -> bytes:
        return start + delta + _NO_LOGPROBS + self._chunk_end

    def _write_progress(self, read: PromptRead, state: _Choice) -> bytes:
        """As llama-server does, in a chunk without text."""
        progress = b"," + encode(write_progress(read))[1:] + b"\n\n"
        return self._chunk(state.start, b'{"role":"assistant","content":null}')[: -len(b"}\n\n")] + progress

    def _measure(self, measured: Measured, state: _Choice) -> bytes:
        """The chunks from here on have these times."""
        before, self._chunk_end = self._chunk_end, self._end_with(measured.usage, measured.timings)
        state.delta_end = state.delta_end.removesuffix(before) + self._chunk_end if state.delta_end else b""
        return b""

    def _end_with(self, usage: Usage, timings: Timings) -> bytes:
        """The end of a chunk with these times."""
        usage_field = b'],"usage":null' if self._include_usage else b"]"
        return usage_field + b',"timings":' + encode(write_timings(usage, timings)) + b"}\n\n"

    def _start_block(self, event: BlockStart, state: _Choice) -> bytes:
        state.is_text, state.repeat = event.kind == "text", b""
        if event.kind != "tool_call":
            state.delta_start = state.start + _TEXT_FIELDS[event.kind]
            state.delta_end = b"}" + _NO_LOGPROBS + self._chunk_end
            if event.kind == "thinking" and self._reasoning_in_text is not None:
                return self._start_reasoning_in_text(state)
            if event.kind == "thinking" and self._repeats_reasoning:
                state.repeat = b',"reasoning":'
            return b""
        index, kind, field = state.calls, *(("custom", "input") if event.custom else ("function", "arguments"))
        state.calls += 1
        state.delta_start = state.start + f'{{"tool_calls":[{{"index":{index},"{kind}":{{"{field}":'.encode()
        state.delta_end = b"}}]}" + _NO_LOGPROBS + self._chunk_end
        # OpenAI's specification has no other type in a delta, and its SDK fails on one: `custom` itself tells.
        typed = {} if event.custom else {"type": kind}
        call = {"index": index, "id": event.call_id, **typed, kind: {"name": event.name, field: ""}}
        opening = self._chunk(state.start, encode({"tool_calls": [call]}))
        state.arguments, state.held = [], [opening] if event.custom else None
        return b"" if event.custom else opening

    def _start_reasoning_in_text(self, state: _Choice) -> bytes:
        text_start = state.start + _TEXT_FIELDS["text"]
        if self._reasoning_in_text == "too":
            state.repeat = b',"content":'
        else:
            state.delta_start = text_start
        state.block_end = text_start + encode(THINK_END) + state.delta_end
        return text_start + encode(THINK) + state.delta_end

    def _call_delta(self, state: _Choice, text: str) -> bytes:
        if not text or state.arguments is None:
            return b""
        delta = state.delta_start + encode(text) + state.delta_end
        if state.held is not None:
            state.held.append(delta)
            return b""
        state.arguments.append(text)
        return delta

    def _end_block(self, event: BlockEnd, state: _Choice) -> bytes:
        """The arguments of an incomplete call must not parse: a client would run them."""
        arguments, held, end = state.arguments, state.held, state.block_end
        state.arguments, state.held, state.block_end = None, None, b""
        if arguments is None:
            return end
        if held is not None:
            state.calls -= not event.complete
            return b"".join(held) if event.complete else b""
        text = "".join(arguments).strip()
        parses = not event.complete and (not text or is_json_object(text))
        return state.delta_start + b'"{"' + state.delta_end if parses else b""

    def _delta_with_logprobs(self, state: _Choice, event: BlockDelta) -> bytes:
        logprobs = encode(write_logprobs(event.logprobs))
        end = b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._chunk_end
        return state.delta_start + encode(event.text) + end

    def _finish(self, event: Finished, state: _Choice) -> bytes:
        state.usage = event.usage
        end = b'{},"logprobs":null,"finish_reason":"%s"' % FINISH_REASONS[event.reason].encode()
        if (stop := _stop_reason(event)) is not None:
            end += b',"stop_reason":' + encode(stop)
        if self._has_timings:
            self._timings = encode(write_timings(event.usage, event.timings))
            self._chunk_end = self._end_with(event.usage, event.timings)
        return state.start + end + b"}" + self._chunk_end

    def _fail(self, error: ModelyardError) -> bytes:
        self._failed = True
        reasons = b""
        if self._has_error_reason:
            unfinished = [choice for choice, state in sorted(self._choices.items()) if state.usage is None]
            choices = [{"index": choice, "delta": {}, "finish_reason": "error"} for choice in unfinished]
            reasons = frame(encode(self._fields | {"choices": choices})) if choices else b""
        return reasons + frame(encode({"error": error_body(error)}))
