"""Names of methods, number formats, kernels and parsers that vLLM 0.32 knows. Other versions know others, and plug-ins
add some: an unknown name is a warning, because most are misspelt, and no error."""

from __future__ import annotations

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
