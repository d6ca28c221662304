"""GGUF headers of well-known models in their real widths, written once into the user's cache folder.

    python -m tests.engines.llama_cpp.wide_models    writes those that are missing

They have fewer layers and experts, and no weights: the files are sparse. llama.cpp reads such a file with
`no_alloc`, and says how much memory each context would take. Matrices are Q4_K, or Q8_0 where
the width is no multiple of 256.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import rmtree

from modelyard.library.cache_dir import cache_dir, file_lock
from tests.engines.llama_cpp.architectures import Facts, Value, tensor_shapes


def _attention(heads: int, kv_heads: int | list[int], size: int) -> dict[str, Value]:
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
    }


def _size(layers: int, width: int, feed: int, vocabulary: int) -> dict[str, Value]:
    return {
        "block_count": layers,
        "embedding_length": width,
        "feed_forward_length": feed,
        "vocab_size": vocabulary,
        "context_length": 131072,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }


def _experts(count: int, used: int, feed: int) -> dict[str, Value]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": feed}


def _latent(heads: int) -> dict[str, Value]:
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "rope.dimension_count": 64,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    }


def _states(inner: int, state: int, heads: int, groups: int) -> dict[str, Value]:
    return {
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
        "ssm.conv_kernel": 4,
    }


_GATED_DELTA = _states(4096, 128, 32, 16) | {"full_attention_interval": 4}

# name → architecture and hyperparameters
MODELS: dict[str, tuple[str, Facts]] = {
    # dense
    "Llama 3.1 8B": ("llama", _size(8, 4096, 14336, 128256) | _attention(32, 8, 128)),
    "Qwen3 0.6B": ("qwen3", _size(28, 1024, 3072, 151936) | _attention(16, 8, 128)),
    "GPT-2 XL": ("gpt2", _size(12, 1600, 6400, 50257) | _attention(25, 25, 64)),
    # sliding windows
    "Gemma 3 4B": (
        "gemma3",
        _size(12, 2560, 10240, 262144) | _attention(8, 4, 256) | {"attention.sliding_window": 1024},
    ),
    "gpt-oss 20B": (
        "gpt-oss",
        _size(4, 2880, 2880, 201088)
        | _attention(64, 8, 64)
        | _experts(16, 4, 2880)
        | {"attention.sliding_window": 128},
    ),
    # experts
    "Qwen3 30B A3B": ("qwen3moe", _size(6, 2048, 6144, 151936) | _attention(32, 4, 128) | _experts(64, 8, 768)),
    "Mixtral 8x7B": ("llama", _size(2, 4096, 14336, 32000) | _attention(32, 8, 128) | _experts(8, 2, 14336)),
    # latent attention
    "DeepSeek V3": (
        "deepseek2",
        _size(4, 7168, 18432, 129280) | _latent(128) | _experts(16, 8, 2048) | {"attention.q_lora_rank": 1536},
    ),
    "DeepSeek V2 Lite": (
        "deepseek2",
        _size(27, 2048, 10944, 102400) | _latent(16) | _experts(8, 6, 1408),
    ),
    # hybrid and recurrent
    "Qwen3 Next 80B A3B": (
        "qwen3next",
        _size(8, 2048, 5120, 151936)
        | _attention(16, 2, 256)
        | _experts(64, 10, 512)
        | _GATED_DELTA
        | {"expert_shared_feed_forward_length": 512},
    ),
    "Granite 4 H Tiny": (
        "granitehybrid",
        _size(10, 2048, 8192, 100352) | _attention(32, [0] * 5 + [8] + [0] * 4, 64) | _states(4096, 128, 64, 1),
    ),
    "LFM2 1.2B": (
        "lfm2",
        _size(16, 2048, 8192, 65536)
        | _attention(32, [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0], 64)
        | {"shortconv.l_cache": 3},
    ),
    "Mamba 2 2.7B": ("mamba2", _size(16, 2560, 0, 50288) | {"attention.head_count": 0} | _states(5120, 128, 80, 1)),
}


# Tensors that llama.cpp calls optional, and all files of such a model have; others that it calls so are left out.
_NEEDED: dict[str, dict[str, tuple[int, ...]]] = {
    "Mixtral 8x7B": {f"blk.{at}.ffn_gate_exps.weight": (8, 14336, 4096) for at in range(2)},
    "Qwen3 Next 80B A3B": {
        f"blk.{at}.attn_{name}.weight": (rows, 2048)
        for at in range(8)
        if (at + 1) % 4
        for name, rows in (("qkv", 8192), ("gate", 4096))
    },
    "Granite 4 H Tiny": {f"blk.{at}.ssm_conv1d.bias": (4352,) for at in range(10) if at != 5},
}
_OPTIONAL = re.compile(r"attn_[qkv]\.bias|exp_probs_b\.bias|(rope_freqs|cls\.\w+)\.weight|dense_2\.\w+|[\w.]+scale")
_OPTIONAL_HERE = {
    "llama": re.compile(r"(attn_output|ffn_\w+)\.bias"),
    "granitehybrid": re.compile(r"(attn_output|ffn_\w+)\.bias"),
    "qwen3next": re.compile(r"ssm_in\.weight"),
}


def _tensors(name: str, header: Facts) -> dict[str, tuple[int, ...]]:
    patterns = [_OPTIONAL, _OPTIONAL_HERE.get(str(header["general.architecture"]), _OPTIONAL)]
    found = {
        tensor: shape
        for tensor, shape in tensor_shapes(header).items()
        if not any(pattern.fullmatch(re.sub(r"^blk\.\d+\.", "", tensor)) for pattern in patterns)
    }
    for tensor, (experts, rows, columns) in [(t, s) for t, s in found.items() if t.endswith("ffn_gate_up_exps.weight")]:
        del found[tensor]
        for part in ("gate", "up"):
            found[tensor.replace("gate_up", part)] = (experts, rows // 2, columns)
    return found | {"output.weight": found["token_embd.weight"]} | _NEEDED.get(name, {})


@cache
def wide_model(name: str) -> Path:
    """The file; all that are missing are written by one child process: an assertion of llama.cpp would end it."""
    if not _path(name).is_file():
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_suffix(".lock")):
            env = os.environ | {"GGML_NO_BACKTRACE": "1"}
            subprocess.run([sys.executable, "-m", __name__], check=True, env=env)
    return _path(name)


def _folder() -> Path:
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return cache_dir() / "test-models" / f"wide-{version}"


def _path(name: str) -> Path:
    return _folder() / f"{name.replace(' ', '-')}.gguf"


def _write(path: Path, name: str, architecture: str, facts: Facts) -> None:
    import gguf
    import numpy as np

    keys = {f"{architecture}.{key}": value for key, value in facts.items()}
    header: dict[str, Value] = {"general.architecture": architecture, **keys, "tokenizer.ggml.model": "none"}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in header.items():
        if key == "general.architecture":
            continue
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    total = 0
    for tensor, shape in sorted(_tensors(name, header).items()):
        kind = gguf.GGMLQuantizationType.F32
        if len(shape) > 1 and tensor.endswith("weight") and "conv1d" not in tensor and "norm" not in tensor:
            if shape[-1] % 256 == 0:
                kind = gguf.GGMLQuantizationType.Q4_K
            elif shape[-1] % 32 == 0:
                kind = gguf.GGMLQuantizationType.Q8_0
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = math.prod(shape) // block * size
        is_plain = kind == gguf.GGMLQuantizationType.F32
        rows = shape if is_plain else (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor_info(tensor, rows, np.dtype(np.float32 if is_plain else np.uint8), data, raw_dtype=kind)
        total += gguf.GGUFWriter.ggml_pad(data, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, gguf.GGUFWriter.ggml_pad(path.stat().st_size, 32) + total)


def main() -> int:
    from modelyard import libllama

    libllama.load().llama_backend_init()
    _folder().mkdir(parents=True, exist_ok=True)
    for old in _folder().parent.glob("wide-*/"):
        if old != _folder():
            rmtree(old, ignore_errors=True)
    for name, (architecture, facts) in MODELS.items():
        if not _path(name).is_file():
            print(name, file=sys.stderr)
            partial = _path(name).with_suffix(".partial")
            _write(partial, name, architecture, facts)
            partial.rename(_path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
