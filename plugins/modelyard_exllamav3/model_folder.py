"""An EXL3 model's folder: its dimensions, its vocabulary, its weights' sizes, and the memory that it will take."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.engines.hf_folder import CONFIG, read_config, read_json, read_tensors
from modelyard.library.model_files import locate_model_folder
from modelyard_exllamav3.options import ExllamaOptions, cache_bits, cache_tokens

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class ExllamaModelInfo(Struct, frozen=True):
    """What determines a model's memory. `weights` and `embedding` are bytes; the embedding stays in RAM."""

    weights: int
    embedding: int
    layers: int
    hidden_size: int
    intermediate_size: int
    kv_width: int  # numbers per token in one layer's keys, and as many in its values
    n_vocab: int
    trained_length: int | None
    eos_ids: tuple[int, ...]


def find_folder(path: str) -> Path:
    return locate_model_folder(path, CONFIG)


def read_model_info(folder: Path) -> ExllamaModelInfo:
    """Raises if a file is broken: the library reports it later and less clearly."""
    config, sizes = read_config(folder), _tensor_sizes(folder)
    embedding = sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
    try:
        heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden_size // heads)
        return ExllamaModelInfo(
            weights=sum(sizes.values()) - embedding,
            embedding=embedding,
            layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(config.get("intermediate_size") or 4 * hidden_size),
            kv_width=int(config.get("num_key_value_heads") or heads) * head_dim,
            n_vocab=int(config["vocab_size"]),
            trained_length=config.get("max_position_embeddings"),
            eos_ids=_eos_ids(folder, config),
        )
    except (KeyError, TypeError, ValueError) as error:
        file = folder / CONFIG
        raise InvalidRequest(f"{file} lacks a usable value: {error}", code="model_unreadable") from error


def read_tokenizer(folder: Path) -> str:
    """tokenizer.json with every control token marked as special, also those that the file calls ordinary: a grammar's
    strings must match text only. Added tokens of white space, which some families have, stay ordinary."""
    tokenizer = read_json(folder / "tokenizer.json")
    for token in tokenizer.get("added_tokens", ()):
        token["special"] = token["special"] or bool(token["content"].strip())
    return msgspec.json.encode(tokenizer).decode()


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json takes precedence: it lists all tokens that end an answer."""
    file = folder / "generation_config.json"
    eos = (read_json(file) if file.is_file() else {}).get("eos_token_id", config.get("eos_token_id"))
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)


def _tensor_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor, from the headers of all weight files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{folder} holds no .safetensors file with weights", code="model_unreadable")
    return {
        name: int(prod(tensor["shape"])) * _BYTES.get(tensor["dtype"], 1)
        for file in files
        for name, tensor in read_tensors(file).items()
    }


# --- memory -----------------------------------------------------------------------------------------------------------

_CUDA_CONTEXT = 512 << 20  # with the kernels and workspaces of torch and ExLlamaV3


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """The GPU memory, before the model is loaded.

    weights   all tensors except the embedding, which stays in RAM
    KV        tokens of all caches × layers × bits of keys and values; quantized ones have a 16-bit scale per 32 numbers
    compute   the activations of one prompt chunk, a row of logits per job, and the CUDA context
    """
    del machine  # it runs on GPUs only
    options: ExllamaOptions = spec.options
    model = read_model_info(find_folder(options.path))
    tokens = cache_tokens(options, spec.caches)
    kv_bits = 0
    for name, info in spec.caches.items():
        bits = cache_bits(name, info, options)
        kv_bits += tokens[name] * model.layers * model.kv_width * (32 if bits is None else sum(bits) + 1)
    jobs_per_step = max((info.parallel for info in spec.caches.values()), default=1)  # caches take turns
    activations = 2 * options.exllama_max_chunk_size * (6 * model.hidden_size + 3 * model.intermediate_size)
    logits = 6 * model.n_vocab * jobs_per_step
    return MemoryEstimate(model.weights, kv_bits // 8, activations + logits + _CUDA_CONTEXT, "gpu")
