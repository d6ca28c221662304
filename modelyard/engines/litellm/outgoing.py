"""A request as `litellm.acompletion` takes it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from modelyard.core.errors import Unsupported
from modelyard.core.request import Reasoning, Request, Sampling
from modelyard.engines.litellm.options import Options
from modelyard.protocols import openai_chat

PASSED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
_GRAMMARS = frozenset({"gbnf", "regex", "lark"})


def arguments(request: Request, options: Options, key: str | None) -> dict[str, Any]:
    """What `litellm.acompletion` is called with: an OpenAI request, and where it goes."""
    if request.prompts:
        raise Unsupported("this model takes conversations only: send messages", code="completions_unsupported")
    if request.constraint is not None and request.constraint.kind in _GRAMMARS:
        told = f"this model takes JSON schemas, not a {request.constraint.kind} grammar"
        raise Unsupported(told, code="structured_unsupported")
    asked = Request(
        model=options.litellm_model,
        messages=request.messages,
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=Sampling(**{name: getattr(request.sampling, name) for name in PASSED}),
        max_tokens=request.max_tokens,
        stop=request.stop,
        logprobs=request.logprobs,
        constraint=request.constraint,
        reasoning=Reasoning(effort=request.reasoning.effort),
        stream=True,
        include_usage=True,
        user=request.user,
    )
    body: dict[str, Any] = msgspec.json.decode(openai_chat.write_request(asked))
    where = {"api_key": key, "api_base": options.litellm_api_base, "timeout": options.litellm_timeout_s}
    ours = {name: value for name, value in where.items() if value is not None}
    return body | ours | {"drop_params": True, "num_retries": 0, "max_retries": 0} | options.litellm_params
