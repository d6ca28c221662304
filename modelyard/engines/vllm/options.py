"""The fields of a model that vLLM runs, in process or served: both engines have these, and say them in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelyard.core.engine import CacheInfo

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
# Paths of their own, each with checkpoints of its own; «off» lets a definition keep its fields and one load go without.
Method = Literal["draft_model", "mlp_speculator", "mtp", "eagle", "eagle3", "medusa", "ngram", "suffix", "off"]
_NEEDS_MODEL = frozenset({"draft_model", "mlp_speculator", "eagle", "eagle3", "medusa"})
_WITHOUT_MODEL = frozenset({"ngram", "suffix"})
_NEEDS_COUNT = frozenset({"draft_model", "ngram"})

Window = Annotated[int, Field(ge=1, le=1 << 24)]
Bytes = Annotated[int, Field(ge=1 << 20, le=1 << 50)]
Pixels = Annotated[int, Field(ge=1, le=1 << 32)]
KernelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # of a kernel or a number format, as vLLM calls it
ModelReference = Annotated[str, Field(min_length=1, pattern=r"^[^-\s]")]  # a path or a hub's name, never an option
Guesses = Annotated[int, Field(ge=1, le=64)]

# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "vllm_max_model_len": Window,
    "vllm_kv_cache_dtype": KernelName,
    "vllm_kv_cache_memory_bytes": Bytes,
    "vllm_max_pixels": Pixels,
    "vllm_speculative_method": Method,
    "vllm_speculative_model": ModelReference,
    "vllm_speculative_moe_backend": KernelName,
    "vllm_speculative_attention_backend": KernelName,
    "vllm_num_speculative_tokens": Guesses,
}

# Arguments of vLLM that fields of ours set: a second word for them would make the settings lie.
RESERVED_ARGUMENTS = {
    "model": "vllm_model",
    "model_weights": "vllm_model",
    "max_model_len": "vllm_max_model_len",
    "served_model_name": "nothing: it is the model's own name here",
    "speculative_config": "vllm_speculative_method and the fields beside it",
    "enable_lora": "lora",
    "lora_modules": "lora",
}


class VllmOptions(BaseModel):
    """`vllm_max_model_len` is not here: it is the window of any model, by vLLM's name for it."""

    model_config = ConfigDict(extra="forbid")

    path: str | None = Field(
        default=None, description="The model's folder, or its name in the library; vllm_model goes before it."
    )
    vllm_model: ModelReference | None = Field(
        default=None, description="The model: its folder, its name in the library, or a name of the Hugging Face hub."
    )
    vllm_tokenizer: ModelReference | None = Field(
        default=None, description="The tokenizer, where it is not the model's own: a folder or a name of the hub."
    )
    vllm_revision: str | None = Field(default=None, description="Branch, tag or commit of a model of the hub.")
    vllm_trust_remote_code: bool = Field(
        default=False, description="Whether Python code that comes with the model may run on this machine."
    )
    vllm_dtype: Dtype = Field(default="auto", description="Number format that is computed in.")
    vllm_quantization: KernelName | None = Field(
        default=None, description="How the weights are quantized, where their folder does not say."
    )
    vllm_gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that is taken whatever is needed. Keep it very low (0.01) and set "
        "vllm_kv_cache_memory_bytes.",
    )
    vllm_kv_cache_memory_bytes: Bytes | None = Field(
        default=None, description="Memory of the KV cache; goes before what the share above would leave for it."
    )
    vllm_kv_cache_dtype: KernelName | None = Field(
        default=None, description="Number format of the KV cache, such as auto or fp8."
    )
    vllm_tensor_parallel_size: int | None = Field(default=None, ge=1, description="GPUs that share each layer.")
    vllm_pipeline_parallel_size: int | None = Field(default=None, ge=1, description="GPUs that share out the layers.")
    vllm_max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Requests computed at a time; unset: as many as the model's caches hold. Few keep the memory small "
        "that CUDA graphs take.",
    )
    vllm_max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Tokens computed in one step, prompts and answers together."
    )
    vllm_enable_prefix_caching: bool | None = Field(
        default=None, description="Whether what one prompt has read is kept for the next; unset: vLLM's own default."
    )
    vllm_enforce_eager: bool = Field(
        default=False, description="No CUDA graphs and no compilation: a faster start, slower steps."
    )
    vllm_seed: int | None = Field(default=None, description="Seed of sampling for requests that name none.")
    vllm_limit_mm_per_prompt: dict[str, int | dict[str, int]] = Field(
        default_factory=dict, description="Most images, videos or sounds of one request, such as { image = 1 }."
    )
    vllm_mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the model's image processor, such as { max_pixels = 4014080 }."
    )
    vllm_max_pixels: Pixels | None = Field(
        default=None, description="Most pixels of an image: max_pixels of the image processor."
    )
    vllm_speculative_method: Method | None = Field(
        default=None,
        description="Kind of speculative decoding. draft_model, mlp_speculator and mtp are different things with "
        "different checkpoints; off: none, whatever else is set.",
    )
    vllm_speculative_model: ModelReference | None = Field(
        default=None, description="The checkpoint that guesses; mtp takes one only where the model has an assistant."
    )
    vllm_speculative_moe_backend: KernelName | None = Field(
        default=None, description="Kernels for the experts of what guesses, such as triton."
    )
    vllm_speculative_attention_backend: KernelName | None = Field(
        default=None, description="Kernels for the attention of what guesses, such as triton_attn."
    )
    vllm_num_speculative_tokens: Guesses | None = Field(
        default=None, description="Tokens guessed at a time. Start with 1 for mtp and measure."
    )
    lora: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapters by the name that requests ask for: their folders."
    )
    vllm_max_loras: int | None = Field(default=None, ge=1, description="Adapters that one step may mix.")
    vllm_max_lora_rank: int | None = Field(default=None, ge=1, description="Highest rank of an adapter.")
    vllm_engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further engine arguments by vLLM's own names, such as { block_size = 32 }."
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.vllm_model is None and self.path is None:
            raise ValueError("vllm_model is needed: the model's folder, or its name on the hub")
        return self

    @model_validator(mode="after")
    def _speculates_in_one_way(self) -> Self:
        if fault := _speculation_fault(self):
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _engine_args_are_not_ours(self) -> Self:
        for name in self.vllm_engine_args:
            field = RESERVED_ARGUMENTS.get(name) or (
                f"vllm_{name}" if f"vllm_{name}" in type(self).model_fields else None
            )
            if field is not None:
                raise ValueError(f"vllm_engine_args: {name} is set by {field}; leave it out there")
        return self

    @property
    def model_name(self) -> str:
        """As it is written; `folder.find` says where it lies."""
        return self.vllm_model or self.path or ""

    @property
    def speculates(self) -> bool:
        return self.vllm_speculative_method not in (None, "off")


def _speculation_fault(told: VllmOptions) -> str | None:
    method, model = told.vllm_speculative_method, told.vllm_speculative_model
    beside = _set_beside_the_method(told)
    if method is None:
        return f"{beside[0]} needs vllm_speculative_method, which says how to guess" if beside else None
    if method in _NEEDS_MODEL and model is None:
        return f"vllm_speculative_method = {method} needs vllm_speculative_model, the checkpoint that guesses"
    if method in _WITHOUT_MODEL and (runs := [name for name in beside if name != "vllm_num_speculative_tokens"]):
        return f"vllm_speculative_method = {method} guesses without a model: leave {runs[0]} out"
    if method in _NEEDS_COUNT and told.vllm_num_speculative_tokens is None:
        return f"vllm_speculative_method = {method} needs vllm_num_speculative_tokens"
    return None


def _set_beside_the_method(told: VllmOptions) -> list[str]:
    names = ("model", "moe_backend", "attention_backend")
    fields = [*(f"vllm_speculative_{name}" for name in names), "vllm_num_speculative_tokens"]
    return [field for field in fields if getattr(told, field) is not None]


# A model's fields as vLLM's own engine arguments, by the names that `EngineArgs` and the command line share. Pure.

# fields that are vLLM's arguments with `vllm_` before them, in the order in which they are told
_PLAIN = (
    "dtype",
    "quantization",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "seed",
    "revision",
)


def engine_arguments(
    settings: VllmOptions, caches: Mapping[str, CacheInfo], model: str | None = None
) -> dict[str, Any]:
    """Only what is set: the rest is vLLM's own default. `model` is where the model was found; unset: as written."""
    told = dict(_arguments(settings, caches, model or settings.model_name))
    return {name: value for name, value in told.items() if value is not None} | settings.vllm_engine_args


def max_model_len(caches: Mapping[str, CacheInfo]) -> int:
    """All caches of a model are one KV cache in vLLM: every request may have the widest window of them."""
    return max(cache.window for cache in caches.values())


def max_num_seqs(settings: VllmOptions, caches: Mapping[str, CacheInfo]) -> int:
    return settings.vllm_max_num_seqs or sum(cache.parallel for cache in caches.values())


def _arguments(settings: VllmOptions, caches: Mapping[str, CacheInfo], model: str) -> Iterator[tuple[str, Any]]:
    yield "model", model
    yield "tokenizer", settings.vllm_tokenizer
    yield "max_model_len", max_model_len(caches)
    yield "max_num_seqs", max_num_seqs(settings, caches)
    for name in _PLAIN:
        yield name, getattr(settings, f"vllm_{name}")
    yield "trust_remote_code", settings.vllm_trust_remote_code or None
    yield "enforce_eager", settings.vllm_enforce_eager or None
    yield "limit_mm_per_prompt", settings.vllm_limit_mm_per_prompt or None
    yield "mm_processor_kwargs", _processor(settings) or None
    yield "speculative_config", speculative_config(settings)
    yield from _lora(settings)


def _processor(settings: VllmOptions) -> dict[str, Any]:
    pixels = settings.vllm_max_pixels
    return settings.vllm_mm_processor_kwargs | ({} if pixels is None else {"max_pixels": pixels})


def speculative_config(settings: VllmOptions) -> dict[str, Any] | None:
    """The `speculative_config`. With mtp, `model` is the assistant that belongs to the model, never a draft model of
    its own: the method is always told, so that vLLM does not guess one from the checkpoint."""
    if not settings.speculates:
        return None
    told = {
        "method": settings.vllm_speculative_method,
        "model": settings.vllm_speculative_model,
        "num_speculative_tokens": settings.vllm_num_speculative_tokens,
        "moe_backend": settings.vllm_speculative_moe_backend,
        "attention_backend": settings.vllm_speculative_attention_backend,
    }
    return {name: value for name, value in told.items() if value is not None}


def _lora(settings: VllmOptions) -> Iterator[tuple[str, Any]]:
    if settings.lora:
        yield "enable_lora", True
        yield "max_loras", settings.vllm_max_loras or min(len(settings.lora), 8)
        yield "max_lora_rank", settings.vllm_max_lora_rank
