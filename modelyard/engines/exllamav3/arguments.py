"""A model's settings and a job's sampling as the arguments of ExLlamaV3's calls. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from modelyard.core.engine import CacheInfo, Capabilities, Prompt
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling
from modelyard.engines.exllamav3.options import PAGE, CacheBits, ExllamaOptions

IGNORED = ("typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "beam_size")
CAPABILITIES = Capabilities(structured=True, logprobs=True, ignored=IGNORED)

Call = dict[str, Any]
SamplerStep = tuple[str, Call]  # a sampling step's class in ExLlamaV3, and what it is made with


# --- the model ------------------------------------------------------------------------------------------------------


def load_arguments(options: ExllamaOptions, most: int, tokens: Iterable[int]) -> Call:
    """`most`: jobs in one step; `tokens`: what each cache holds."""
    called: Call = {
        "use_per_device": options.exllama_gpu_split,
        "max_chunk_size": chunk(options, tokens),
        "max_batch_size": most,
    }
    if options.exllama_tensor_parallel:
        called |= {"tensor_p": True, "tp_backend": options.exllama_tp_backend}
    return called


def chunk(options: ExllamaOptions, tokens: Iterable[int]) -> int:
    """Tokens of a prompt read at a time: loading and warming up read so many into a cache, so each must have room."""
    return min([options.exllama_max_chunk_size, *tokens])


def cache_tokens(options: ExllamaOptions, caches: Mapping[str, CacheInfo]) -> dict[str, int]:
    """What each cache holds, in whole pages: by its windows, or its share of `exllama_cache_size`."""
    wanted = {name: _paged(info.window + 1) * info.parallel for name, info in caches.items()}
    if options.exllama_cache_size is None:
        return wanted
    budget, whole = options.exllama_cache_size, sum(wanted.values())
    shares = {name: _paged(budget * tokens // whole) for name, tokens in wanted.items()}
    for name, tokens in shares.items():
        if tokens < (need := _paged(caches[name].window + 1)):
            raise InvalidRequest(
                f"exllama_cache_size = {budget} leaves the cache {name!r} {tokens} tokens, and one conversation of its "
                f"window of {caches[name].window} needs {need}: raise it, or lower n_ctx",
                code="cache_unusable",
            )
    return shares


def _paged(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


def quant_of(name: str, info: CacheInfo, options: ExllamaOptions) -> CacheBits | None:
    """A cache's own number formats, where it has others than 16 bits, go before the model's."""
    own = _bits_of(name, info.type_k), _bits_of(name, info.type_v)
    if own == (16, 16):
        return options.exllama_cache_quant
    if 16 in own:
        raise InvalidRequest(
            f"the cache {name!r} has keys of {own[0]} bits and values of {own[1]}: ExLlamaV3 quantizes both or neither",
            code="cache_unusable",
        )
    return own


def _bits_of(name: str, format_: str) -> int:
    found = re.fullmatch(r"(?:b?f(16)|q([2-8])(?:_\w)?)", format_.lower())
    if found is None:
        raise InvalidRequest(
            f"{format_!r} is no number format of ExLlamaV3's caches; {name!r} may have f16, q8, q7 … q2",
            code="cache_unusable",
        )
    return int(found[1] or found[2])


def batch(options: ExllamaOptions, info: CacheInfo) -> int:
    return options.exllama_max_batch_size or info.parallel


def generator_arguments(options: ExllamaOptions, info: CacheInfo, tokens: int) -> Call:
    return {
        "max_batch_size": batch(options, info),
        "max_chunk_size": chunk(options, [tokens]),
        "max_q_size": options.exllama_max_q_size,
    }


# --- a job ----------------------------------------------------------------------------------------------------------


def job_arguments(prompt: Prompt, most: int, options: ExllamaOptions, ends: tuple[int, ...] = ()) -> Call:
    """`most`: how many tokens the job may say; `ends`: what ends it besides its own stop ids."""
    called: Call = {
        "max_new_tokens": most,
        "stop_conditions": list(dict.fromkeys((*prompt.stop_ids, *ends))),
        "seed": prompt.sampling.seed,
        "max_rq_tokens": options.exllama_max_rq_tokens,
    }
    if prompt.logprobs is not None:
        called |= {"return_probs": True, "return_top_tokens": prompt.logprobs}
    return called


def sampler_steps(s: Sampling) -> list[SamplerStep]:
    """In this order ExLlamaV3 does the truncations, the temperature and the choice in one kernel (XTC is apart)."""
    steps = [*_penalties(s), *_dry(s)]
    if is_greedy(s):
        return [*steps, ("SS_Argmax", {})]
    steps += _truncations(s)
    if s.temperature is not None and s.temperature != 1:
        steps.append(("SS_Temperature", {"temperature": s.temperature}))
    return [*steps, ("SS_Sample", {})]


def is_greedy(s: Sampling) -> bool:
    return s.top_k == 1 or (s.temperature is not None and s.temperature <= 0) or s.top_p == 0


def _penalties(s: Sampling) -> list[SamplerStep]:
    steps: list[SamplerStep] = []
    if s.logit_bias:
        steps.append(("SS_LogitBias", {"logit_bias": s.logit_bias}))
    if s.repetition_penalty not in (None, 1):
        steps.append(("SS_RepP", {"rep_p": s.repetition_penalty}))
    if s.presence_penalty or s.frequency_penalty:
        steps.append(("SS_PresFreqP", {"pres_p": s.presence_penalty or 0.0, "freq_p": s.frequency_penalty or 0.0}))
    return steps


def _dry(s: Sampling) -> list[SamplerStep]:
    if not s.dry_multiplier or s.dry_penalty_last_n == 0:
        return []
    called: Call = {
        "dry_multiplier": s.dry_multiplier,
        "dry_base": 1.75 if s.dry_base is None else s.dry_base,
        "dry_allowed_length": 2 if s.dry_allowed_length is None else s.dry_allowed_length,
        "dry_range": max(0, s.dry_penalty_last_n or 0),  # 0: all there is
    }
    if s.dry_sequence_breakers is not None:
        called["dry_sequence_breakers"] = s.dry_sequence_breakers  # words: token ids only where they are known
    return [("SS_DRY", called)]


def _truncations(s: Sampling) -> list[SamplerStep]:
    steps: list[SamplerStep] = []
    if s.min_p:
        steps.append(("SS_MinP", {"min_p": min(1.0, s.min_p)}))
    if s.top_k is not None and s.top_k > 0:
        steps.append(("SS_TopK", {"top_k": s.top_k}))
    if s.top_p is not None and 0 < s.top_p < 1:
        steps.append(("SS_TopP", {"top_p": s.top_p}))
    if s.xtc_probability:
        threshold = 0.1 if s.xtc_threshold is None else s.xtc_threshold
        steps.append(("SS_XTC", {"probability": min(1.0, s.xtc_probability), "threshold": min(1.0, threshold)}))
    return steps
