"""The folder of a model that vLLM runs: where it is, whether its weights are complete, and the memory that they will
take.

The estimate:

    weights   the files in the number format of the computation, and the draft checkpoint
    KV        vllm_kv_cache_memory_bytes; else the windows of all conversations
    share     on a GPU, without that option, vLLM fills its share of the memory with KV cache, needed or not
    compute   a rule of thumb: the largest layer's activations of one step, and the libraries' own memory
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.core.errors import NotFound
from modelyard.engines import option_faults
from modelyard.engines.hf_folder import CONFIG, read_config, read_tensors
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.library.model_files import candidate_paths, pull_hint
from modelyard_vllm.options import VllmOptions, max_model_len, max_num_seqs

__all__ = ["check_weights", "find_folder", "read_config", "require_folder", "resolve_companions", "resolve_model"]

OptionsT = TypeVar("OptionsT", bound=VllmOptions)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_COMPANIONS = ("vllm_tokenizer", "vllm_speculative_model")


def find_folder(name: str) -> Path | None:
    """A path, a name in the library, or a model in the Hugging Face hub's cache."""
    for place in candidate_paths(name):
        if (place / CONFIG).is_file():
            return place.absolute()
    return _find_in_hub_cache(name)


def require_folder(name: str) -> Path:
    if (folder := find_folder(name)) is not None:
        return folder
    raise NotFound(
        f"the model {name!r} is not on this machine{pull_hint(name)}",
        code="model_file_missing",
    )


def resolve_model(options: VllmOptions) -> str:
    """The folder if the model is here; else its name, which vLLM looks up on the hub."""
    folder = find_folder(options.model_name)
    return str(folder) if folder is not None else options.model_name


def resolve_companions(options: OptionsT) -> OptionsT:
    """The options with the folders of the tokenizer and of the speculative model, if they are here."""
    names = {field: getattr(options, field) for field in _COMPANIONS}
    folders = {field: find_folder(name) for field, name in names.items() if name is not None}
    return options.model_copy(update={field: str(folder) for field, folder in folders.items() if folder is not None})


def folder_faults(options: VllmOptions) -> Iterator[OptionFault]:
    """Paths that lead nowhere. A name of the hub may still be downloaded."""
    named = {"vllm_model" if options.vllm_model else "path": options.model_name}
    named |= {field: name for field in _COMPANIONS if (name := getattr(options, field)) is not None}
    yield from try_options(*((field, require_folder, name) for field, name in named.items() if _is_path(name)))
    adapters = {name: path for name, path in options.lora.items() if _is_path(path)}
    yield from try_options(*((f"lora.{name}", option_faults.require_folder, path) for name, path in adapters.items()))


def _is_path(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is None


def check_weights(folder: Path) -> None:
    """Raises if a safetensors file is incomplete: vLLM notices it late, in another process. Other formats do not hold
    their own size."""
    for file in sorted(folder.glob("*.safetensors")):
        read_tensors(file)


def _find_in_hub_cache(name: str) -> Path | None:
    """Of several snapshots the newest."""
    if name.count("/") != 1 or name.startswith(("/", "~", ".")):
        return None
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [folder for folder in snapshots.glob("*") if (folder / CONFIG).is_file()]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


# --- the memory estimate ----------------------------------------------------------------------------------------------

_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# vLLM's defaults
_BATCHED_TOKENS = 2048
_LOGITS_ROWS = 256
_GPU_SHARE = 0.9
# On a CPU measured: torch in three processes. On a GPU the CUDA context.
_RUNTIME = {"cpu": 9 << 28, "gpu": 1 << 29}

Config = Mapping[str, Any]


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    options: VllmOptions = spec.options
    folder = require_folder(options.model_name)
    config, device = read_config(folder), "gpu" if machine.gpus else "cpu"
    weights = _weights(folder, options, config)
    compute = _compute(options, config) + _RUNTIME[device]
    kv = _kv(options, spec.caches, config)
    if options.vllm_kv_cache_memory_bytes is None and machine.gpus:
        share = int(max(machine.gpus.values()) * (options.vllm_gpu_memory_utilization or _GPU_SHARE))
        kv = max(kv, share - weights - compute)
    return MemoryEstimate(weights, kv, compute, device)


def _weights(folder: Path, options: VllmOptions, config: Config) -> int:
    size = _file_size(folder)
    stored, computed = _BYTES.get(_stored_dtype(config)), _BYTES.get(options.vllm_dtype)
    if stored and computed and not (config.get("quantization_config") or options.vllm_quantization):
        size = size * computed // stored
    if options.speculates and options.vllm_speculative_model is not None:
        draft = find_folder(options.vllm_speculative_model)
        size += _file_size(draft) if draft is not None else 0
    return size


def _file_size(folder: Path) -> int:
    """Of one format only: some folders hold the same weights in several."""
    for pattern in _WEIGHT_FILES:
        if total := sum(file.stat().st_size for file in folder.glob(pattern)):
            return total
    return 0


def _kv(options: VllmOptions, caches: Mapping[str, CacheInfo], config: Config) -> int:
    if options.vllm_kv_cache_memory_bytes is not None:
        return options.vllm_kv_cache_memory_bytes
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // (heads or 1))
    dtype = options.vllm_kv_cache_dtype or "auto"
    size = 1 if dtype.startswith(("fp8", "int8")) else _BYTES.get(dtype) or _activation_bytes(options, config)
    token = 2 * int(config.get("num_hidden_layers") or 0) * kv_heads * head_dim * size
    return token * max_model_len(caches) * max_num_seqs(options, caches)


def _compute(options: VllmOptions, config: Config) -> int:
    tokens = options.vllm_max_num_batched_tokens or _BATCHED_TOKENS
    width = max(int(config.get("intermediate_size") or 0), int(config.get("hidden_size") or 0))
    logits = _LOGITS_ROWS * 4 * int(config.get("vocab_size") or 0)
    return 2 * tokens * width * _activation_bytes(options, config) + logits


def _activation_bytes(options: VllmOptions, config: Config) -> int:
    return _BYTES.get(options.vllm_dtype) or min(2, _BYTES.get(_stored_dtype(config), 2))


def _stored_dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")
