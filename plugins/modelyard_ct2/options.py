"""The CTranslate2 engine's options, and a job's sampling as the arguments of `generate_batch`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from modelyard.core.engine import Capabilities, Prompt
from modelyard.core.request import Sampling
from modelyard.library import cores

_SUPPORTED = ("temperature", "top_p", "top_k", "repetition_penalty", "beam_size", "min_tokens", "ignore_eos")
IGNORED = tuple(name for name in Sampling.__struct_fields__ if name not in _SUPPORTED)
CAPABILITIES = Capabilities(logprobs=True, ignored=IGNORED)

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
# Option → type and range: what a single load may override through the admin API.
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
        default="auto", description="Where to compute; auto uses a GPU if CTranslate2 finds one."
    )
    device_index: int | list[int] = Field(default=0, description="Which GPU, or several that each hold a copy.")
    compute_type: ComputeType = Field(
        default="int8", description="Number format for computing; weights in another format are converted on load."
    )
    inter_threads: int | None = Field(
        default=None,
        gt=0,
        description="Batches computed in parallel. Unset: as many as the caches hold conversations, at most one per "
        "logical core, so that few requests wait for the end of another answer. Fewer give each stream more cores.",
    )
    intra_threads: int | None = Field(
        default=None,
        gt=0,
        description="CPU threads per batch, at most one per logical core; unset shares the physical cores between the "
        "batches.",
    )
    batch_window: float = Field(
        default=0.005, ge=0, le=1, description="Seconds that a request waits for others to share its batch."
    )
    min_length: int = Field(default=0, ge=0, description="Minimum number of tokens in an answer.")
    no_repeat_ngram_size: int = Field(
        default=0, ge=0, description="Sequences of this many tokens never repeat; 0 allows repetition."
    )
    length_penalty: float = Field(default=1.0, description="Beam search: values above 1 prefer longer answers.")
    patience: float = Field(default=1.0, gt=0, description="Beam search: how long to look for better answers.")
    flash_attention: bool = Field(default=False, description="Use flash attention on GPUs that support it.")

    def batch_workers(self, capacity: int) -> int:
        if self.inter_threads is not None:
            return cores.bounded(self.inter_threads, "inter_threads")
        return max(1, min(capacity, cores.logical()))

    def threads_per_batch(self, capacity: int) -> int:
        if self.intra_threads is not None:
            return cores.bounded(self.intra_threads, "intra_threads")
        return max(1, cores.physical() // self.batch_workers(capacity))


def is_beam_search(sampling: Sampling) -> bool:
    return (sampling.beam_size or 1) > 1


def generate_arguments(prompt: Prompt, max_output: int, options: Ct2Options) -> dict[str, Any]:
    """Arguments apply to a whole batch: jobs share one only if theirs are equal. Stop tokens are among them only for
    beam search and with a minimum length; otherwise the callback ends each job by its own stop tokens."""
    min_length = max(min(options.min_length, max_output), prompt.sampling.min_output(max_output))
    arguments: dict[str, Any] = {
        "repetition_penalty": prompt.sampling.repetition_penalty or 1.0,
        "no_repeat_ngram_size": options.no_repeat_ngram_size,
        "min_length": min_length,
    }
    if min_length:  # CTranslate2 must know the tokens that it may not generate before the minimum length
        arguments["end_token"] = tuple(prompt.stop_ids)
    if is_beam_search(prompt.sampling):
        return arguments | {
            "beam_size": prompt.sampling.beam_size,
            "length_penalty": options.length_penalty,
            "patience": options.patience,
            "max_length": max_output,
            "end_token": tuple(prompt.stop_ids),
            "return_end_token": True,
        }
    return arguments | _sampling_arguments(prompt.sampling)


def _sampling_arguments(s: Sampling) -> dict[str, Any]:
    temperature = 1.0 if s.temperature is None else s.temperature
    if temperature <= 0 or s.top_k == 1:
        return {"sampling_topk": 1}
    return {
        "sampling_topk": max(0, s.top_k or 0),  # 0: all tokens
        "sampling_topp": 1.0 if s.top_p is None or s.top_p <= 0 else min(1.0, s.top_p),
        "sampling_temperature": temperature,
    }
