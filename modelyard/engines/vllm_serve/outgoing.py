"""A request in the words of vLLM's server: OpenAI Chat and its extension fields, some by other names. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core.errors import NotFound, Unsupported
from modelyard.core.request import Constraint, Request, Tool
from modelyard.engines.upstream.client import with_fields
from modelyard.engines.vllm_serve.options import Options
from modelyard.protocols import openai_chat

IGNORED = (
    *("typical_p", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "beam_size"),
)
_GRAMMARS = {"gbnf": "grammar", "lark": "grammar", "regex": "regex"}


def body(request: Request, options: Options, name: str, window: int) -> bytes:
    """Always a stream with usage. `name` is what the server calls the model. It ends an answer where the window ends,
    but refuses a longest answer that no window could hold."""
    if request.prompts:
        raise Unsupported(
            "this model takes conversations only: send messages, not a bare prompt", code="completions_unsupported"
        )
    longest = min(request.max_tokens, window) if request.max_tokens is not None else None
    asked = replace(written(request, options, name), max_tokens=longest, n=1, stream=True, include_usage=True)
    return with_fields(openai_chat.write_request(asked), _own(request))


def counting(request: Request, options: Options, name: str) -> bytes:
    """The part of a request that has tokens."""
    asked = written(request, options, name)
    bare = Request(
        model=asked.model,
        messages=asked.messages,
        tools=asked.tools,
        reasoning=replace(asked.reasoning, effort=None, budget=None, visible=None),
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return with_fields(openai_chat.write_request(bare), _continued(request))


def trial(name: str) -> bytes:
    """The shortest request that makes the model compute."""
    asked = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    return msgspec.json.encode(asked)


def written(request: Request, options: Options, name: str) -> Request:
    """Without what is another server's, and with the model's own wish where the client has none about thinking."""
    reasoning = request.reasoning
    if reasoning.enabled is None and options.enable_thinking is not None:
        reasoning = replace(reasoning, enabled=options.enable_thinking)
    return replace(
        request,
        model=_model(request, options, name),
        tools=_held(request),
        reasoning=reasoning,
        sampling=replace(request.sampling, **dict.fromkeys(IGNORED)),
        constraint=None if request.constraint and request.constraint.kind in _GRAMMARS else request.constraint,
        lora_adapter=None,
        priority=None,
        session=None,
        user=None,
        metadata=None,
        store=None,
        previous=None,
    )


def _held(request: Request) -> tuple[Tool, ...]:
    """A call that is demanded keeps to its schema, as everywhere here; vLLM sees to that for strict tools only."""
    if request.tool_choice.mode not in ("required", "named"):
        return request.tools
    return tuple(replace(tool, strict=True) if tool.strict is None else tool for tool in request.tools)


def _model(request: Request, options: Options, name: str) -> str:
    """An adapter is a model of its own to vLLM."""
    adapter = request.lora_adapter
    if adapter is None:
        return name
    if adapter not in options.lora:
        raise NotFound(f"the model {name!r} has no LoRA adapter {adapter!r}", code="adapter_not_found")
    return adapter


def _own(request: Request) -> dict[str, Any]:
    return _grammar(request.constraint) | _continued(request)


def _grammar(constraint: Constraint | None) -> dict[str, Any]:
    if constraint is None or constraint.kind not in _GRAMMARS:
        return {}
    return {"structured_outputs": {_GRAMMARS[constraint.kind]: constraint.text}}


def _continued(request: Request) -> dict[str, Any]:
    """A conversation that ends with the assistant's own words goes on from there."""
    if request.messages and request.messages[-1].role == "assistant":
        return {"continue_final_message": True, "add_generation_prompt": False}
    return {}
