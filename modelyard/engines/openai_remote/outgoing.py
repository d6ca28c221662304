"""A request as it may leave this machine: under the upstream's name for the model, and only with what it takes. Pure.

An API's own maker refuses fields that he does not know, and reasoning that he has not signed. A server that takes our
extensions is given the request as it is.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from modelyard.core.errors import Unsupported
from modelyard.core.request import Message, Reasoning, Request, Sampling, Text, Thinking
from modelyard.engines.openai_remote.kinds import Kind
from modelyard.engines.openai_remote.options import Options
from modelyard.engines.upstream.client import with_fields
from modelyard.protocols.common.reasoning_signature import unpack_reasoning

_MAX_TOKENS = 8192
_GRAMMARS = frozenset({"gbnf", "regex", "lark"})


def body(request: Request, options: Options, kind: Kind) -> bytes:
    """The whole request, always as a stream that tells its usage."""
    if request.prompts:
        raise Unsupported(
            "this model takes conversations only: send messages, not a bare prompt", code="completions_unsupported"
        )
    asked = replace(
        _fitting(request, options, kind),
        model=options.remote_model,
        max_tokens=_max_tokens(request, options, kind),
        n=1,
        stream=True,
        include_usage=True,
        previous=None,  # the conversation is complete: what was stored here is no name there
        store=False if kind.name == "responses" else None,
    )
    return with_fields(kind.wire.write_request(asked), _thinking_field(request, options, kind))


def counting(request: Request, options: Options, kind: Kind) -> bytes:
    """The part of a request that has tokens."""
    asked = _fitting(request, options, kind)
    bare = Request(
        model=options.remote_model,
        messages=asked.messages,
        instructions=asked.instructions,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        reasoning=asked.reasoning,
    )
    return kind.wire.write_request(bare)


def _max_tokens(request: Request, options: Options, kind: Kind) -> int | None:
    asked = request.max_tokens or options.remote_max_tokens
    return asked or (_MAX_TOKENS if kind.needs_max_tokens else None)


def _fitting(request: Request, options: Options, kind: Kind) -> Request:
    reasoning = _reasoning(request, options)
    if options.remote_extensions:
        return replace(request, reasoning=reasoning)
    if request.constraint is not None and request.constraint.kind in _GRAMMARS:
        raise Unsupported(
            f"the upstream of this model takes JSON schemas, not a {request.constraint.kind} grammar",
            code="structured_unsupported",
        )
    return replace(
        request,
        messages=tuple(_signed(message, options, kind) for message in request.messages),
        sampling=_sampling(request.sampling, kind),
        stop=request.stop if kind.stops else (),
        logprobs=request.logprobs if kind.logprobs else None,
        reasoning=_plain(reasoning) if kind.name == "chat_completions" else reasoning,
        lora_adapter=None,
        chat_template_kwargs={},
        documents=(),
        priority=None,
        session=request.session if kind.name == "responses" else None,
        metadata=None,
    )


def _sampling(asked: Sampling, kind: Kind) -> Sampling:
    return Sampling(**{name: getattr(asked, name) for name in kind.sampling})


# --- thinking ---------------------------------------------------------------------------------------------------------


def _reasoning(request: Request, options: Options) -> Reasoning:
    asked = request.reasoning
    if asked.enabled is not None or options.remote_thinking == "default":
        return asked
    return replace(asked, enabled=options.remote_thinking == "enabled")


def _plain(asked: Reasoning) -> Reasoning:
    """Chat's maker knows an effort and nothing else."""
    return Reasoning(effort=asked.effort)


def _thinking_field(request: Request, options: Options, kind: Kind) -> dict[str, Any]:
    """Chat providers who can switch thinking agree on this field; who sets `remote_thinking` has such a one."""
    if kind.name != "chat_completions" or options.remote_thinking == "default":
        return {}
    return {"thinking": {"type": "enabled" if _reasoning(request, options).enabled else "disabled"}}


def _signed(message: Message, options: Options, kind: Kind) -> Message:
    """Without reasoning that the upstream would refuse: unsigned, or under our own seal. A turn never becomes empty."""
    if not any(isinstance(part, Thinking) for part in message.parts):
        return message
    keeps_plain = kind.name == "chat_completions" and options.remote_thinking != "default"
    kept = tuple(p for p in message.parts if not isinstance(p, Thinking) or keeps_plain or _foreign(p, kind))
    return replace(message, parts=kept or (Text(""),))


def _foreign(part: Thinking, kind: Kind) -> bool:
    return kind.thinks_in_history and bool(part.signature) and unpack_reasoning(part.signature) is None
