"""A job's sampling settings as the arguments of CTranslate2's `generate_batch`. Pure.

Arguments hold for a whole batch: jobs share one only where theirs are equal. What ends a job is not among them, unless
it is a beam search or answers have a least length: every other job is ended by the callback, each for itself.
"""

from __future__ import annotations

from typing import Any

from modelyard.core.engine import Capabilities, Prompt
from modelyard.core.request import Sampling
from modelyard.engines.ct2.options import Options

IGNORED = (
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
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
    "seed",
    "logit_bias",
)
CAPABILITIES = Capabilities(logprobs=True, ignored=IGNORED)

Call = dict[str, Any]


def is_beam(sampling: Sampling) -> bool:
    return (sampling.beam_size or 1) > 1


def arguments(prompt: Prompt, most: int, options: Options) -> Call:
    """`most`: how many tokens the job may say."""
    common: Call = {
        "repetition_penalty": prompt.sampling.repetition_penalty or 1.0,
        "no_repeat_ngram_size": options.no_repeat_ngram_size,
        "min_length": min(options.min_length, most),
    }
    if options.min_length:  # what must not come before its time has to be known to CTranslate2
        common["end_token"] = tuple(prompt.stop_ids)
    if is_beam(prompt.sampling):
        return common | _beam(prompt, most, options)
    return common | _random(prompt.sampling)


def _beam(prompt: Prompt, most: int, options: Options) -> Call:
    return {
        "beam_size": prompt.sampling.beam_size,
        "length_penalty": options.length_penalty,
        "patience": options.patience,
        "max_length": most,
        "end_token": tuple(prompt.stop_ids),
        "return_end_token": True,
    }


def _random(s: Sampling) -> Call:
    temperature = 1.0 if s.temperature is None else s.temperature
    if temperature <= 0 or s.top_k == 1:
        return {"sampling_topk": 1}
    return {
        "sampling_topk": max(0, s.top_k or 0),  # 0: all of them
        "sampling_topp": 1.0 if s.top_p is None or s.top_p <= 0 else min(1.0, s.top_p),
        "sampling_temperature": temperature,
    }
