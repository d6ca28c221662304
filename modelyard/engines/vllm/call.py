"""A job's sampling settings as the arguments of vLLM's `SamplingParams`. Pure."""

from __future__ import annotations

from typing import Any

from modelyard.core.engine import Prompt
from modelyard.core.request import Sampling

IGNORED = (
    "typical_p",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "beam_size",
)
PRIORITIES = {"main": 0, "background": 1}  # vLLM takes the smallest number first

Call = dict[str, Any]


def arguments(prompt: Prompt, most: int, n_vocab: int) -> Call:
    """`most`: how many tokens the job may say. Its text is nobody's business here: vLLM does not detokenize."""
    return {
        **_sampling(prompt.sampling, n_vocab),
        "max_tokens": most,
        "stop_token_ids": list(prompt.stop_ids),
        # What ends an answer is the gateway's word. But a grammar that is complete allows nothing else than vLLM's own.
        "ignore_eos": prompt.constraint is None,
        "logprobs": prompt.logprobs,
        "detokenize": False,
    }


def _sampling(s: Sampling, n_vocab: int) -> Call:
    told: Call = {
        "temperature": 1.0 if s.temperature is None else max(0.0, s.temperature),
        "top_p": 1.0 if s.top_p is None or s.top_p <= 0 else min(1.0, s.top_p),
        "top_k": max(0, s.top_k or 0),  # 0: all of them
        "min_p": s.min_p or 0.0,
        "repetition_penalty": s.repetition_penalty or 1.0,
        "presence_penalty": s.presence_penalty or 0.0,
        "frequency_penalty": s.frequency_penalty or 0.0,
    }
    if s.seed is not None:
        told["seed"] = s.seed % (1 << 63)  # -1 would mean none, and torch takes no more bits
    if s.logit_bias and (known := {id: bias for id, bias in s.logit_bias.items() if 0 <= id < n_vocab}):
        told["logit_bias"] = known
    return told
