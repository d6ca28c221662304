"""The Responses request read: the body and a few headers to a core Request."""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Constraint, Message, Reasoning, Request, Text
from modelyard.protocols.common.extensions import check_positive, read_constraint, read_priority, read_sampling
from modelyard.protocols.common.json import dumps
from modelyard.protocols.openai_responses.body import Format, ResponsesBody
from modelyard.protocols.openai_responses.items import read_items
from modelyard.protocols.openai_responses.tools import read_choice, read_tools

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
MOST_LOGPROBS = 20
# A Codex sub-agent is a thread of its own in its parent's session: the thread is the conversation.
SESSION_HEADERS = ("thread-id", "session-id", "x-session-id", "x-session-affinity")


def read_asked(asked: ResponsesBody, headers: Mapping[str, str]) -> Request:
    model = _check(asked)
    warnings: list[str] = []
    choice, tools = read_choice(asked.tool_choice, read_tools(asked.tools or []), warnings)
    return Request(
        model=model,
        messages=_read_messages(asked, warnings),
        instructions=asked.instructions is not None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        sampling=read_sampling(asked),
        max_tokens=asked.max_output_tokens,
        stop=_read_stop(asked.stop),
        logprobs=_read_logprobs(asked),
        constraint=_read_format(asked, warnings) or read_constraint(asked),
        reasoning=_read_reasoning(asked),
        stream=bool(asked.stream),
        lora_adapter=asked.lora_adapter,
        chat_template_kwargs=asked.chat_template_kwargs or {},
        documents=asked.documents or (),
        priority=read_priority(asked),
        session=_read_session(asked, headers),
        user=asked.safety_identifier if asked.user is None else asked.user,
        metadata=asked.metadata,
        previous=asked.previous_response_id,
        store=asked.store,
        encrypted_reasoning=ENCRYPTED in (asked.include or ()),
        warnings=tuple(warnings),
    )


def _check(asked: ResponsesBody) -> str:
    """What no later step could put into words; the model's name, because it is the one field that must be there."""
    if not asked.model:
        raise InvalidRequest("model is missing: name the model that shall answer", param="model")
    if not asked.input and not asked.previous_response_id:
        raise InvalidRequest("input is empty: give a text or a list of items", param="input")
    if asked.background:
        raise Unsupported(
            "background must be false: stream the answer instead of asking for it later", param="background"
        )
    check_positive("max_output_tokens", asked.max_output_tokens)
    if asked.top_logprobs is not None and not 0 <= asked.top_logprobs <= MOST_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must lie between 0 and {MOST_LOGPROBS}, got {asked.top_logprobs}", param="top_logprobs"
        )
    return asked.model


def _read_messages(asked: ResponsesBody, warnings: list[str]) -> tuple[Message, ...]:
    warnings += [
        f"{name} is not kept here: it is left out" for name in ("conversation", "prompt") if getattr(asked, name)
    ]
    lead = [] if asked.instructions is None else [Message("system", (Text(asked.instructions),))]
    if isinstance(asked.input, str):
        return (*lead, Message("user", (Text(asked.input),)))
    return (*lead, *read_items(asked.input or [], warnings))


def _read_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _read_logprobs(asked: ResponsesBody) -> int | None:
    return (asked.top_logprobs or 0) if LOGPROBS in (asked.include or ()) else None


def _read_format(asked: ResponsesBody, warnings: list[str]) -> Constraint | None:
    shape = asked.text.format if asked.text else None
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return Constraint("json_object")
    if shape.type == "json_schema":
        return _read_schema(shape)
    warnings.append(f"text.format of type {shape.type!r} is left out")
    return None


def _read_schema(shape: Format) -> Constraint:
    if shape.schema is None:
        raise InvalidRequest("text.format.schema is missing: json_schema needs one", param="text.format.schema")
    return Constraint("json_schema", dumps(shape.schema), shape.name, shape.description, shape.strict)


def _read_reasoning(asked: ResponsesBody) -> Reasoning:
    if asked.reasoning is None:
        return Reasoning()
    effort, told = asked.reasoning.effort, asked.reasoning
    return Reasoning(
        enabled=False if effort == "none" else None, effort=effort, summary=told.summary or told.generate_summary
    )


def _read_session(asked: ResponsesBody, headers: Mapping[str, str]) -> str | None:
    return next((value for name in SESSION_HEADERS if (value := headers.get(name))), asked.prompt_cache_key)
