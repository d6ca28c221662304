"""A job's prompt as it travels to a worker, and back into what an engine takes. Pure; a new field stands in both."""

from __future__ import annotations

from modelyard.core.engine import Prompt
from modelyard.workers.messages import InferRequest
from modelyard.workers.packing import flat, parts


def request_of(id: int, prompt: Prompt) -> InferRequest:
    tokens, media = flat(prompt)
    return InferRequest(
        request_id=id,
        tokens=tokens,
        sampling_params=prompt.sampling,
        lora_adapter=prompt.adapters,
        max_tokens=prompt.max_tokens,
        stop_ids=prompt.stop_ids,
        constraint=prompt.constraint,
        cache=prompt.cache,
        session=prompt.session,
        priority=prompt.priority,
        logprobs=prompt.logprobs,
        deadline=prompt.deadline,
        trace=prompt.trace,
        media=media,
        joint=prompt.dedup_key,
    )


def prompt_of(asked: InferRequest) -> Prompt:
    """Raises Malformed where its tokens are none."""
    return Prompt(
        parts=parts(asked.tokens, asked.media),
        sampling=asked.sampling_params,
        max_tokens=asked.max_tokens,
        stop_ids=asked.stop_ids,
        constraint=asked.constraint,
        cache=asked.cache,
        session=asked.session,
        priority=asked.priority,
        adapters=asked.lora_adapter,
        logprobs=asked.logprobs,
        deadline=asked.deadline,
        trace=asked.trace,
        joint=asked.joint,
    )
