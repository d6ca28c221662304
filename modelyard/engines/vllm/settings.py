"""The fields of a model that vLLM runs, in process or served: both engines have these, and say them in vLLM's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
# Paths of their own, each with checkpoints of its own; «off» lets a definition keep its fields and one load go without.
Method = Literal["draft_model", "mlp_speculator", "mtp", "eagle", "eagle3", "medusa", "ngram", "suffix", "off"]
_NEEDS_MODEL = frozenset({"draft_model", "mlp_speculator", "eagle", "eagle3", "medusa"})
_WITHOUT_MODEL = frozenset({"ngram", "suffix"})
_NEEDS_COUNT = frozenset({"draft_model", "ngram"})

Window = Annotated[int, Field(ge=1, le=1 << 24)]
Bytes = Annotated[int, Field(ge=1 << 20, le=1 << 50)]
Pixels = Annotated[int, Field(ge=1, le=1 << 32)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # of a kernel or a number format, as vLLM calls it
Checkpoint = Annotated[str, Field(min_length=1, pattern=r"^[^-\s]")]  # a path or a hub's name, never an option
Guesses = Annotated[int, Field(ge=1, le=64)]

# field → its type with its range: what one load may set for itself, through the admin API
LIVE_OVERRIDES: dict[str, Any] = {
    "vllm_max_model_len": Window,
    "vllm_kv_cache_dtype": Name,
    "vllm_kv_cache_memory_bytes": Bytes,
    "vllm_max_pixels": Pixels,
    "vllm_speculative_method": Method,
    "vllm_speculative_model": Checkpoint,
    "vllm_speculative_moe_backend": Name,
    "vllm_speculative_attention_backend": Name,
    "vllm_num_speculative_tokens": Guesses,
}

# Arguments of vLLM that fields of ours set: a second word for them would make the settings lie.
OURS = {
    "model": "vllm_model",
    "model_weights": "vllm_model",
    "max_model_len": "vllm_max_model_len",
    "served_model_name": "nothing: it is the model's own name here",
    "speculative_config": "vllm_speculative_method and the fields beside it",
    "enable_lora": "lora",
    "lora_modules": "lora",
}


class VllmSettings(BaseModel):
    """`vllm_max_model_len` is not here: it is the window of any model, by vLLM's name for it."""

    model_config = ConfigDict(extra="forbid")

    path: str | None = Field(
        default=None, description="The model's folder, or its name in the library; vllm_model goes before it."
    )
    vllm_model: Checkpoint | None = Field(
        default=None, description="The model: its folder, its name in the library, or a name of the Hugging Face hub."
    )
    vllm_tokenizer: Checkpoint | None = Field(
        default=None, description="The tokenizer, where it is not the model's own: a folder or a name of the hub."
    )
    vllm_revision: str | None = Field(default=None, description="Branch, tag or commit of a model of the hub.")
    vllm_trust_remote_code: bool = Field(
        default=False, description="Whether Python code that comes with the model may run on this machine."
    )
    vllm_dtype: Dtype = Field(default="auto", description="Number format that is computed in.")
    vllm_quantization: Name | None = Field(
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
    vllm_kv_cache_dtype: Name | None = Field(
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
    vllm_speculative_model: Checkpoint | None = Field(
        default=None, description="The checkpoint that guesses; mtp takes one only where the model has an assistant."
    )
    vllm_speculative_moe_backend: Name | None = Field(
        default=None, description="Kernels for the experts of what guesses, such as triton."
    )
    vllm_speculative_attention_backend: Name | None = Field(
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
            field = OURS.get(name) or (f"vllm_{name}" if f"vllm_{name}" in type(self).model_fields else None)
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


def _speculation_fault(told: VllmSettings) -> str | None:
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


def _set_beside_the_method(told: VllmSettings) -> list[str]:
    names = ("model", "moe_backend", "attention_backend")
    fields = [*(f"vllm_speculative_{name}" for name in names), "vllm_num_speculative_tokens"]
    return [field for field in fields if getattr(told, field) is not None]
