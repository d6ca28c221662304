"""The options of a model that vLLM runs, in process or as a server, and vLLM's engine arguments made from them.

Methods, number formats, kernels and parsers are checked against the names that vLLM 0.32 knows. Other versions know
others, and plug-ins add some: an unknown name is a warning, because most are misspelt, and no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelyard.core.engine import CacheInfo

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
# Each method has its own checkpoints. "off" disables speculation for one load without removing the other fields.
SpeculativeMethod = Literal[
    "draft_model", "mlp_speculator", "mtp", "eagle", "eagle3", "medusa", "ngram", "suffix", "off"
]
_NEED_MODEL = frozenset({"draft_model", "mlp_speculator", "eagle", "eagle3", "medusa"})
_WITHOUT_MODEL = frozenset({"ngram", "suffix"})
_NEED_COUNT = frozenset({"draft_model", "ngram"})
_SPECULATIVE_FIELDS = (
    "vllm_speculative_model",
    "vllm_speculative_moe_backend",
    "vllm_speculative_attention_backend",
    "vllm_num_speculative_tokens",
)

Window = Annotated[int, Field(ge=1, le=1 << 24)]
Bytes = Annotated[int, Field(ge=1 << 20, le=1 << 50)]
Pixels = Annotated[int, Field(ge=1, le=1 << 32)]
KernelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # vLLM's name of a kernel or number format
ModelReference = Annotated[str, Field(min_length=1, pattern=r"^[^-\s]")]  # a path or a hub name, never an option
DraftTokens = Annotated[int, Field(ge=1, le=64)]

# Option → type and range: what a single load may override through the admin API.
LIVE_OVERRIDES: dict[str, Any] = {
    "vllm_max_model_len": Window,
    "vllm_kv_cache_dtype": KernelName,
    "vllm_kv_cache_memory_bytes": Bytes,
    "vllm_max_pixels": Pixels,
    "vllm_speculative_method": SpeculativeMethod,
    "vllm_speculative_model": ModelReference,
    "vllm_speculative_moe_backend": KernelName,
    "vllm_speculative_attention_backend": KernelName,
    "vllm_num_speculative_tokens": DraftTokens,
}
LOCAL_OPTIONS = frozenset({"vllm_speculative_model"})

# vLLM's arguments that our options set. `vllm_engine_args` may not set them a second time.
RESERVED_ARGUMENTS = {
    "model": "vllm_model",
    "model_weights": "vllm_model",
    "max_model_len": "vllm_max_model_len",
    "served_model_name": "nothing: it is the model's name in the configuration",
    "speculative_config": "vllm_speculative_method and the options beside it",
    "enable_lora": "lora",
    "lora_modules": "lora",
}


class VllmOptions(BaseModel):
    """`vllm_max_model_len` is not here: it is an alias of the window, which every model has."""

    model_config = ConfigDict(extra="forbid", defer_build=True)  # most servers have no model for it

    path: str | None = Field(
        default=None, description="The model's folder, or its name in the library; vllm_model takes precedence."
    )
    vllm_model: ModelReference | None = Field(
        default=None, description="The model: its folder, its name in the library, or a name on the Hugging Face hub."
    )
    vllm_tokenizer: ModelReference | None = Field(
        default=None, description="The tokenizer, if it is not the model's own: a folder or a name on the hub."
    )
    vllm_revision: str | None = Field(default=None, description="Branch, tag or commit of a model on the hub.")
    vllm_trust_remote_code: bool = Field(
        default=False, description="Allow Python code that comes with the model to run on this machine."
    )
    vllm_dtype: Dtype = Field(default="auto", description="Number format for computing.")
    vllm_quantization: KernelName | None = Field(
        default=None, description="Quantization method of the weights, if their folder does not say."
    )
    vllm_gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that vLLM takes, needed or not. Keep it very low (0.01) and set "
        "vllm_kv_cache_memory_bytes.",
    )
    vllm_kv_cache_memory_bytes: Bytes | None = Field(
        default=None, description="Memory of the KV cache; overrides what the share above would leave for it."
    )
    vllm_kv_cache_dtype: KernelName | None = Field(
        default=None, description="Number format of the KV cache, such as auto or fp8."
    )
    vllm_tensor_parallel_size: int | None = Field(default=None, ge=1, description="GPUs that share each layer.")
    vllm_pipeline_parallel_size: int | None = Field(
        default=None, ge=1, description="GPUs among which the layers are distributed."
    )
    vllm_max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Requests computed at a time; unset: as many as the model's caches hold. Fewer save memory "
        "for CUDA graphs.",
    )
    vllm_max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Tokens computed in one step, of prompts and answers together."
    )
    vllm_enable_prefix_caching: bool | None = Field(
        default=None, description="Reuse the KV of earlier prompts; unset: vLLM's default."
    )
    vllm_enforce_eager: bool = Field(
        default=False, description="No CUDA graphs and no compilation: a faster start, slower steps."
    )
    vllm_seed: int | None = Field(default=None, description="Sampling seed for requests that set none.")
    vllm_limit_mm_per_prompt: dict[str, int | dict[str, int]] = Field(
        default_factory=dict, description="Maximum of images, videos or sounds in one request, such as { image = 1 }."
    )
    vllm_mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the model's image processor, such as { max_pixels = 4014080 }."
    )
    vllm_max_pixels: Pixels | None = Field(
        default=None, description="Maximum pixels of an image: max_pixels of the image processor."
    )
    vllm_speculative_method: SpeculativeMethod | None = Field(
        default=None,
        description="Method of speculative decoding. draft_model, mlp_speculator and mtp need different checkpoints; "
        "off disables it, whatever else is set.",
    )
    vllm_speculative_model: ModelReference | None = Field(
        default=None, description="The draft checkpoint; mtp takes one only if the model has an assistant."
    )
    vllm_speculative_moe_backend: KernelName | None = Field(
        default=None, description="Kernels for the experts of the draft model, such as triton."
    )
    vllm_speculative_attention_backend: KernelName | None = Field(
        default=None, description="Kernels for the attention of the draft model, such as triton_attn."
    )
    vllm_num_speculative_tokens: DraftTokens | None = Field(
        default=None, description="Draft tokens per step. Start with 1 for mtp and measure."
    )
    lora: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapters: the name that requests use, and the adapter's folder."
    )
    vllm_max_loras: int | None = Field(default=None, ge=1, description="Different adapters in one step.")
    vllm_max_lora_rank: int | None = Field(default=None, ge=1, description="Highest rank of an adapter.")
    vllm_engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further engine arguments by vLLM's names, such as { block_size = 32 }."
    )

    @model_validator(mode="after")
    def _require_model(self) -> Self:
        if self.vllm_model is None and self.path is None:
            raise ValueError("vllm_model is needed: the model's folder, or its name on the hub")
        return self

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        if problem := _speculation_problem(self):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_engine_args(self) -> Self:
        for name in self.vllm_engine_args:
            field = RESERVED_ARGUMENTS.get(name)
            field = field or (f"vllm_{name}" if f"vllm_{name}" in type(self).model_fields else None)
            if field is not None:
                raise ValueError(f"vllm_engine_args: {name} is set by {field}; remove it there")
        return self

    @property
    def model_name(self) -> str:
        """As configured; `model_folder.find_folder` finds its folder."""
        return self.vllm_model or self.path or ""

    @property
    def speculates(self) -> bool:
        return self.vllm_speculative_method not in (None, "off")


def _speculation_problem(options: VllmOptions) -> str | None:
    method = options.vllm_speculative_method
    fields = [field for field in _SPECULATIVE_FIELDS if getattr(options, field) is not None]
    if method is None:
        return f"{fields[0]} needs vllm_speculative_method" if fields else None
    if method in _NEED_MODEL and options.vllm_speculative_model is None:
        return f"vllm_speculative_method = {method} needs vllm_speculative_model, the draft checkpoint"
    if method in _WITHOUT_MODEL and fields and fields[0] != "vllm_num_speculative_tokens":
        return f"vllm_speculative_method = {method} uses no model: remove {fields[0]}"
    if method in _NEED_COUNT and options.vllm_num_speculative_tokens is None:
        return f"vllm_speculative_method = {method} needs vllm_num_speculative_tokens"
    return None


# --- engine arguments -----------------------------------------------------------------------------------------------

# Options that are vLLM's arguments with the prefix `vllm_`, in the order of the command line.
_SAME_NAME = (
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


def engine_arguments(options: VllmOptions, caches: Mapping[str, CacheInfo], model: str | None = None) -> dict[str, Any]:
    """By the names that `EngineArgs` and the command line share. Only what is set: the rest is vLLM's default.

    `model` is the folder in which the model was found; unset: as configured.
    """
    arguments = dict(_arguments(options, caches, model or options.model_name))
    return {name: value for name, value in arguments.items() if value is not None} | options.vllm_engine_args


def max_model_len(caches: Mapping[str, CacheInfo]) -> int:
    """vLLM has one KV cache for all named caches, so every request gets the widest window."""
    return max(cache.window for cache in caches.values())


def max_num_seqs(options: VllmOptions, caches: Mapping[str, CacheInfo]) -> int:
    return options.vllm_max_num_seqs or sum(cache.parallel for cache in caches.values())


def processor_settings(options: VllmOptions) -> dict[str, Any]:
    """Of the model's image processor."""
    pixels = {} if options.vllm_max_pixels is None else {"max_pixels": options.vllm_max_pixels}
    return options.vllm_mm_processor_kwargs | pixels


def _arguments(options: VllmOptions, caches: Mapping[str, CacheInfo], model: str) -> Iterator[tuple[str, Any]]:
    yield "model", model
    yield "tokenizer", options.vllm_tokenizer
    yield "max_model_len", max_model_len(caches)
    yield "max_num_seqs", max_num_seqs(options, caches)
    for name in _SAME_NAME:
        yield name, getattr(options, f"vllm_{name}")
    yield "trust_remote_code", options.vllm_trust_remote_code or None
    yield "enforce_eager", options.vllm_enforce_eager or None
    yield "limit_mm_per_prompt", options.vllm_limit_mm_per_prompt or None
    yield "mm_processor_kwargs", processor_settings(options) or None
    yield "speculative_config", _speculative_config(options)
    if options.lora:
        yield "enable_lora", True
        yield "max_loras", options.vllm_max_loras or min(len(options.lora), 8)
        yield "max_lora_rank", options.vllm_max_lora_rank


def _speculative_config(options: VllmOptions) -> dict[str, Any] | None:
    """With mtp, `model` is the model's own assistant, never a separate draft model. The method is always given, so that
    vLLM does not infer one from the checkpoint."""
    if not options.speculates:
        return None
    config = {
        "method": options.vllm_speculative_method,
        "model": options.vllm_speculative_model,
        "num_speculative_tokens": options.vllm_num_speculative_tokens,
        "moe_backend": options.vllm_speculative_moe_backend,
        "attention_backend": options.vllm_speculative_attention_backend,
    }
    return {name: value for name, value in config.items() if value is not None}


_QUANTIZATION = (
    "awq auto_awq fp8 fbgemm_fp8 fp_quant modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed auto_gptq gptq "
    "gptq_marlin awq_marlin humming compressed-tensors experts_int8 quark moe_wna16 torchao inc mxfp4 gpt_oss_mxfp4 "
    "deepseek_v4_fp8 online fp8_per_tensor fp8_per_block fp8_per_channel int8_per_channel_weight_only nvfp4_per_token "
    "mxfp8"
)
_KV_CACHE_DTYPES = (
    "auto float16 bfloat16 fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4_ds_mla turboquant_k8v4 turboquant_4bit_nc "
    "turboquant_k3v4_nc turboquant_3bit_nc ultraquant_4bit int4_per_token_head int8_per_token_head fp8_per_token_head "
    "nvfp4 nvfp4_4over6"
)
_MOE_BACKENDS = (
    "auto triton batched_triton deep_gemm deep_gemm_mega_moe cutlass flashinfer_trtllm flashinfer_cutlass "
    "flashinfer_cutedsl flashinfer_moe_ep_cutedsl flashinfer_b12x b12x flashinfer_moe_ep_mega_deep_gemm marlin "
    "humming triton_unfused aiter aiter_mega_moe aiter_triton_mxfp4_bf16 flydsl hpc emulation rdna3"
)
_ATTENTION_BACKENDS = (
    "flash_attn flash_attn_diffkv triton_attn triton_attn_diffkv triton_flash_attn rocm_attn rocm_segmented_attn "
    "rocm_aiter_mla rocm_aiter_triton_mla rocm_aiter_fa rocm_aiter_mla_sparse rocm_aiter_unified_attn xpu_mla_sparse "
    "torch_sdpa flashinfer triton_flashinfer flashinfer_mla tokenspeed_mla flashinfer_mla_sparse triton_mla "
    "cutlass_mla flashmla flashmla_sparse b12x flash_attn_mla flash_attn_mla_sparse minimax_m3_sparse cutlass_msa "
    "triton_msa no_attention flex_attention hpc_attn cpu_attn cpu_mla amx_mla turboquant ultraquant custom"
)
_TOOL_PARSERS = (
    "none dots deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 cohere_command3 cohere_command4 ernie45 "
    "glm45 glm47 ling3 granite-20b-fc granite granite4 hermes hf poolside_v1 hunyuan_a13b hy_v3 hy_v4 internlm jamba "
    "lfm2 kimi_k2 kimi_k3 k2_horizon llama3_json llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 "
    "minicpm5 mistral olmo3 plamo3 muse_glimmer openai phi4_mini_json pythonic qwen3_coder qwen3_json qwen3_xml "
    "seed_oss step3 step3p5 inkling xlam gigachat3 functiongemma gemma4 apertus"
)
_REASONING_PARSERS = (
    "none deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 "
    "glm45 glm47 ling3 openai_gptoss granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 kimi_k2 "
    "kimi_k3 k2_horizon mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron_v3 olmo3 plamo3 "
    "muse_glimmer qwen3 seed_oss step3 step3p5 inkling"
)

KNOWN_NAMES = {
    "vllm_quantization": _QUANTIZATION.split(),
    "vllm_kv_cache_dtype": _KV_CACHE_DTYPES.split(),
    "vllm_speculative_moe_backend": _MOE_BACKENDS.split(),
    "vllm_speculative_attention_backend": _ATTENTION_BACKENDS.split(),
    "vllm_serve_tool_parser": _TOOL_PARSERS.split(),
    "vllm_serve_reasoning_parser": _REASONING_PARSERS.split(),
}
