"""The CTranslate2 engine's own fields of a model definition."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from modelyard.core.engine import Capabilities, Prompt
from modelyard.core.request import Sampling

ComputeType = Literal[
    "default",
    "auto",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
]

_Threads = Annotated[int, Field(ge=1, le=1024)]
# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "compute_type": ComputeType,
    "inter_threads": _Threads,
    "intra_threads": _Threads,
    "flash_attention": bool,
}


class Ct2Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="The folder of the converted model, or its name in the library.")
    device: Literal["cpu", "cuda", "auto"] = Field(
        default="auto", description="Where it computes; auto takes a GPU where CTranslate2 sees one."
    )
    device_index: int | list[int] = Field(default=0, description="Which GPU, or several that each hold a copy.")
    compute_type: ComputeType = Field(
        default="int8", description="Number format of the weights while computing; other than the file's is converted."
    )
    inter_threads: int | None = Field(
        default=None,
        gt=0,
        description="Batches computed at a time; unset means as many as the caches hold conversations, so that nobody "
        "waits for another's answer to end. Fewer give each stream more cores.",
    )
    intra_threads: int | None = Field(
        default=None, gt=0, description="CPU threads of one batch; unset shares the physical cores between batches."
    )
    batch_window: float = Field(
        default=0.005, ge=0, le=1, description="Seconds that a job waits for others to share its batch with."
    )
    batch_slack: int = Field(
        default=16,
        ge=0,
        description="How many tokens the prompts of one batch may differ in length: what one is longer than the "
        "shortest is read token by token.",
    )
    min_length: int = Field(default=0, ge=0, description="Tokens that an answer has at least.")
    no_repeat_ngram_size: int = Field(default=0, ge=0, description="Runs of so many tokens never repeat; 0: they may.")
    length_penalty: float = Field(default=1.0, description="Beam search: above 1 prefers longer answers.")
    patience: float = Field(default=1.0, gt=0, description="Beam search: how long it looks for better answers.")
    flash_attention: bool = Field(default=False, description="Flash attention, on GPUs that have it.")

    def workers(self, capacity: int) -> int:
        return self.inter_threads or max(1, capacity)

    def threads(self, capacity: int) -> int:
        return self.intra_threads or max(1, _cores() // self.workers(capacity))


def _cores() -> int:
    """The physical ones, as far as this process may use them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


# A job's sampling settings as the arguments of CTranslate2's `generate_batch`. Pure.
#
# Arguments hold for a whole batch: jobs share one only where theirs are equal. What ends a job is not among them, unless
# it is a beam search or answers have a least length: every other job is ended by the callback, each for itself.

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


def generate_arguments(prompt: Prompt, most: int, options: Ct2Options) -> Call:
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


def _beam(prompt: Prompt, most: int, options: Ct2Options) -> Call:
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
