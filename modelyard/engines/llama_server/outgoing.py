"""A request in llama-server's own words: OpenAI Chat and its extension fields, some by other names. Pure."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from modelyard.core.errors import Unsupported
from modelyard.core.request import Request, Sampling
from modelyard.engines.llama_server.options import Options
from modelyard.engines.upstream.client import with_fields
from modelyard.protocols import openai_chat

IGNORED = ("beam_size",)
_UNKNOWN_GRAMMARS = frozenset({"regex", "lark"})


def body(request: Request, options: Options) -> bytes:
    """Always a stream with usage, that also tells how far the prompt is read: a long one is not taken for silence."""
    if request.prompts:
        raise Unsupported(
            "this model takes conversations only: send messages, not a bare prompt", code="completions_unsupported"
        )
    if request.constraint is not None and request.constraint.kind in _UNKNOWN_GRAMMARS:
        raise Unsupported(
            f"llama-server takes JSON schemas and GBNF grammars, not {request.constraint.kind}",
            code="structured_unsupported",
        )
    asked = replace(written(request, options), n=1, stream=True, include_usage=True)
    return with_fields(openai_chat.write_request(asked), _own(request.sampling))


def written(request: Request, options: Options) -> Request:
    """Without what is another server's, and with the model's own wish where the client has none about thinking."""
    reasoning = request.reasoning
    if reasoning.enabled is None and options.enable_thinking is not None:
        reasoning = replace(reasoning, enabled=options.enable_thinking)
    return replace(
        request,
        reasoning=reasoning,
        sampling=replace(request.sampling, repetition_penalty=None, beam_size=None),
        lora_adapter=None,
        priority=None,
        session=None,
        user=None,
        metadata=None,
        store=None,
        previous=None,
    )


def _own(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {"return_progress": True}
    if sampling.repetition_penalty is not None:
        fields["repeat_penalty"] = sampling.repetition_penalty
    return fields
