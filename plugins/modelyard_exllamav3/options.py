"""The ExLlamaV3 engine's options; and options and a job's sampling as the arguments of ExLlamaV3's calls. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from modelyard.core.engine import CacheInfo, Capabilities, Prompt
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling

PAGE = 256  # tokens per page: ExLlamaV3 has no other size

_Bits = Annotated[int, Field(ge=2, le=8)]
CacheBits = tuple[_Bits, _Bits]  # of keys and of values
_CacheTokens = Annotated[int, Field(ge=PAGE, le=1 << 24)]
_ChunkTokens = Annotated[int, Field(ge=PAGE, le=1 << 16, multiple_of=PAGE)]


def _parse_bits(value: Any) -> Any:
    """Accepts 4, "4", "8,4" and [8, 4]: bits of keys and of values, or of both."""
    if value is None or isinstance(value, bool):
        return value
    bits = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(bits) * 2 if len(bits) == 1 else tuple(bits)


def _parse_sizes(value: Any) -> Any:
    """Accepts auto, "20,24", 20 and [20, 24]."""
    if value is None or isinstance(value, bool):
        return value
    if value in ("auto", ""):
        return None
    sizes = value.split(",") if isinstance(value, str) else value
    return sizes if isinstance(sizes, list | tuple) else [sizes]


CacheQuant = Annotated[
    CacheBits | None,
    BeforeValidator(_parse_bits),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 2, "maximum": 8}, {"type": "string"}, {"type": "null"}]}),
]
GpuSplit = Annotated[
    list[Annotated[float, Field(ge=0)]] | None,
    BeforeValidator(_parse_sizes),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}, {"type": "null"}]}),
]

# Option → type and range: what a single load may override through the admin API.
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "exllama_cache_size": _CacheTokens,
    "exllama_cache_quant": CacheQuant,
    "exllama_gpu_split": GpuSplit,
    "exllama_tensor_parallel": bool,
    "exllama_max_chunk_size": _ChunkTokens,
}


class ExllamaOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The folder of the quantized model, or its name in the library.")
    exllama_cache_size: _CacheTokens | None = Field(
        default=None,
        description="Tokens that all caches of the model hold together; unset: the windows of all conversations. More "
        "keeps old conversations longer; with less, conversations wait for each other's pages.",
    )
    exllama_cache_quant: CacheQuant = Field(
        default=None, description="Bits of cached keys and values, 2 to 8: one number, or two as in 8,4. Unset: 16."
    )
    exllama_gpu_split: GpuSplit = Field(
        default=None,
        description="GiB to use of each GPU, as in 20,24. Unset or auto: the free memory, one GPU after another.",
    )
    exllama_tensor_parallel: bool = Field(default=False, description="Every GPU computes a part of each layer.")
    exllama_tp_backend: Literal["native", "nccl"] = Field(
        default="native", description="How the GPUs of a tensor-parallel model communicate."
    )
    exllama_max_batch_size: int | None = Field(
        default=None, gt=0, le=1024, description="Jobs computed together; unset: as many as a cache holds."
    )
    exllama_max_chunk_size: _ChunkTokens = Field(
        default=2048,
        description="Tokens of a prompt read in one step, a multiple of 256: the longest time that other streams wait.",
    )
    exllama_max_q_size: int = Field(default=8, gt=0, le=256, description="Tokens computed at a time for one stream.")
    exllama_max_rq_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens after which a long answer releases its pages and queues for new ones; unset: never.",
    )
    exllama_warmup: bool = Field(
        default=True, description="Run every kind of step while loading, so that the first requests are not slower."
    )


IGNORED = (
    *("typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "beam_size", "top_n_sigma", "dynatemp_range"),
    *("dynatemp_exponent", "adaptive_target", "adaptive_decay", "repeat_last_n", "samplers"),
)
CAPABILITIES = Capabilities(structured=True, logprobs=True, ignored=IGNORED)

Arguments = dict[str, Any]
SamplerStep = tuple[str, Arguments]  # the name of a sampling class in ExLlamaV3, and its arguments


# --- the model ------------------------------------------------------------------------------------------------------


def load_arguments(options: ExllamaOptions, batch_size: int, cache_sizes: Iterable[int]) -> Arguments:
    """`cache_sizes`: tokens of each cache. Loading and warming up read a whole chunk into the smallest."""
    arguments: Arguments = {
        "use_per_device": options.exllama_gpu_split,
        "max_chunk_size": min([options.exllama_max_chunk_size, *cache_sizes]),
        "max_batch_size": batch_size,
    }
    if options.exllama_tensor_parallel:
        arguments |= {"tensor_p": True, "tp_backend": options.exllama_tp_backend}
    return arguments


def cache_tokens(options: ExllamaOptions, caches: Mapping[str, CacheInfo]) -> dict[str, int]:
    """Tokens of each cache in whole pages: the windows of its conversations, or its share of `exllama_cache_size`."""
    wanted = {name: _whole_pages(info.window + 1) * info.parallel for name, info in caches.items()}
    if options.exllama_cache_size is None:
        return wanted
    budget, total = options.exllama_cache_size, sum(wanted.values())
    shares = {name: _whole_pages(budget * tokens // total) for name, tokens in wanted.items()}
    for name, tokens in shares.items():
        if tokens < (needed := _whole_pages(caches[name].window + 1)):
            raise InvalidRequest(
                f"exllama_cache_size = {budget} gives the cache {name!r} {tokens} tokens, but one conversation with a "
                f"window of {caches[name].window} needs {needed}: raise it, or lower n_ctx",
                code="cache_unusable",
            )
    return shares


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


def cache_bits(name: str, info: CacheInfo, options: ExllamaOptions) -> CacheBits | None:
    """Bits of keys and values; None means 16. A cache's own types, if not 16 bits, override the model's."""
    keys, values = _type_bits(name, info.type_k), _type_bits(name, info.type_v)
    if (keys, values) == (16, 16):
        return options.exllama_cache_quant
    if 16 in (keys, values):
        raise InvalidRequest(
            f"the cache {name!r} has keys of {keys} bits and values of {values}: ExLlamaV3 quantizes both or neither",
            code="cache_unusable",
        )
    return keys, values


def _type_bits(name: str, cache_type: str) -> int:
    found = re.fullmatch(r"(?:b?f(16)|q([2-8])(?:_\w)?)", cache_type.lower())
    if found is None:
        raise InvalidRequest(
            f"ExLlamaV3 has no cache type {cache_type!r}; the cache {name!r} may have f16, q8, q7 … q2",
            code="cache_unusable",
        )
    return int(found[1] or found[2])


def batch_size(options: ExllamaOptions, info: CacheInfo) -> int:
    return options.exllama_max_batch_size or info.parallel


def generator_arguments(options: ExllamaOptions, info: CacheInfo, tokens: int) -> Arguments:
    return {
        "max_batch_size": batch_size(options, info),
        "max_chunk_size": min(options.exllama_max_chunk_size, tokens),
        "max_q_size": options.exllama_max_q_size,
    }


# --- a job ----------------------------------------------------------------------------------------------------------


def job_arguments(
    prompt: Prompt, max_output: int, options: ExllamaOptions, more_stop_ids: tuple[int, ...] = ()
) -> Arguments:
    arguments: Arguments = {
        "max_new_tokens": max_output,
        "stop_conditions": list(dict.fromkeys((*prompt.stop_ids, *more_stop_ids))),
        "seed": prompt.sampling.seed,
        "max_rq_tokens": options.exllama_max_rq_tokens,
    }
    if least := prompt.sampling.min_output(max_output):
        arguments["min_new_tokens"] = least
    if prompt.logprobs is not None:
        arguments |= {"return_probs": True, "return_top_tokens": prompt.logprobs}
    return arguments


def sampler_steps(s: Sampling) -> Iterator[SamplerStep]:
    """In this order ExLlamaV3 runs truncation, temperature and selection in one kernel (XTC is separate)."""
    if s.logit_bias:
        yield "SS_LogitBias", {"logit_bias": s.logit_bias}
    if s.repetition_penalty not in (None, 1):
        yield "SS_RepP", {"rep_p": s.repetition_penalty}
    if s.presence_penalty or s.frequency_penalty:
        yield "SS_PresFreqP", {"pres_p": s.presence_penalty or 0.0, "freq_p": s.frequency_penalty or 0.0}
    if s.dry_multiplier and s.dry_penalty_last_n != 0:
        yield "SS_DRY", _dry_arguments(s)
    if s.top_k == 1 or (s.temperature is not None and s.temperature <= 0) or s.top_p == 0:
        yield "SS_Argmax", {}
        return
    if s.min_p:
        yield "SS_MinP", {"min_p": min(1.0, s.min_p)}
    if s.top_k is not None and s.top_k > 0:
        yield "SS_TopK", {"top_k": s.top_k}
    if s.top_p is not None and 0 < s.top_p < 1:
        yield "SS_TopP", {"top_p": s.top_p}
    if s.xtc_probability:
        threshold = 0.1 if s.xtc_threshold is None else s.xtc_threshold
        yield "SS_XTC", {"probability": min(1.0, s.xtc_probability), "threshold": min(1.0, threshold)}
    if s.temperature is not None and s.temperature != 1:
        yield "SS_Temperature", {"temperature": s.temperature}
    yield "SS_Sample", {}


def _dry_arguments(s: Sampling) -> Arguments:
    arguments: Arguments = {
        "dry_multiplier": s.dry_multiplier,
        "dry_base": 1.75 if s.dry_base is None else s.dry_base,
        "dry_allowed_length": 2 if s.dry_allowed_length is None else s.dry_allowed_length,
        "dry_range": max(0, s.dry_penalty_last_n or 0),  # 0: no limit
    }
    if s.dry_sequence_breakers is not None:
        arguments["dry_sequence_breakers"] = s.dry_sequence_breakers  # text; the model turns it into token ids
    return arguments
