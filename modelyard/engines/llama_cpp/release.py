"""What the pinned release of llama-cpp-python looks like: the sizes of its structs and what its C code fills in."""

from __future__ import annotations

from typing import Any

RELEASE = "0.3.36"  # as pyproject.toml pins it
SIZES = {"llama_context_params": 160, "llama_model_params": 80, "llama_batch": 56}
# Under another layout the values would stand in other fields.
CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "rope_scaling_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
    "ctx_other": None,
}
MODEL_DEFAULTS: dict[str, Any] = {
    "devices": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "main_gpu": 0,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_alloc": False,
}
