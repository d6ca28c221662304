"""What a model will take of memory, worked out from its file's head before anything is loaded.

    weights   the files, all parts of a split model, with repacked tensors in their new size (`repack.py`)
    KV        layers × window × parallel × (key + value of one token), by the cache's number formats
    states    of recurrent layers, one a sequence
    compute   what the largest step needs: either the logits of one micro-batch or its attention over the window

Where a file does not tell enough the estimate is on the high side: layers with a sliding window and layers that share
their KV count in full, which is also how llama.cpp keeps the former unless told otherwise. The embedding context, made
on its first use, is held against free memory then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import repack
from modelyard.engines.llama_cpp.library import visible_memory
from modelyard.engines.llama_cpp.options import Options, flash_attention_mode
from modelyard.engines.llama_cpp.repack import ExtraBuffer, Weights
from modelyard.library.gguf import TensorInfo, read_contents
from modelyard.library.model_files import locate_model_file, split_parts

# bytes of one number, by its format
_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
}
_PAD = 256  # llama.cpp rounds windows up to it


class ModelShape(Struct, frozen=True):
    """What of a model decides its memory. `key` and `value` are the widths of one token's KV, summed over layers;
    `state` the numbers that a sequence's recurrent layers keep; `head` the width of one head's values."""

    weights: int
    trained: int
    layers: int
    width: int
    heads: int
    vocab: int
    key: int
    value: int
    state: int = 0
    head: int = 0
    files: tuple[tuple[int, list[TensorInfo]], ...] = ()  # size and tensors of each


def read_model_shape(file: Path) -> ModelShape:
    try:
        parts = split_parts(file)
        heads = [read_contents(part, lists="short") for part in parts]
        sizes = [part.stat().st_size for part in parts]
        return _shape(heads[0][0], tuple((size, tensors) for size, (_, tensors) in zip(sizes, heads, strict=True)))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{file} says odd things of itself: {error}", code="model_unreadable") from error


def _shape(about: Mapping[str, Any], files: tuple[tuple[int, list[TensorInfo]], ...]) -> ModelShape:
    family = about.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        held = about.get(f"{family}.{name}", default)
        return int(max(held, default=default) if isinstance(held, list) else held)

    layers, heads, width = number("block_count"), number("attention.head_count"), number("embedding_length")
    of_head = width // heads if heads else 0
    kv_heads = _kv_heads(about.get(f"{family}.attention.head_count_kv", heads), layers)
    inner, inside = number("ssm.inner_size"), number("ssm.state_size")
    state = inner * inside + max(0, number("ssm.conv_kernel") - 1) * (inner + 2 * number("ssm.group_count") * inside)
    recurrent = layers if not heads else sum(not count for count in kv_heads)
    return ModelShape(
        weights=sum(size for size, _ in files),
        trained=number("context_length"),
        layers=layers,
        width=width,
        heads=heads,
        vocab=number("vocab_size") or _count(about.get("tokenizer.ggml.tokens", 0)),
        key=sum(kv_heads) * number("attention.key_length", of_head),
        value=sum(kv_heads) * number("attention.value_length", of_head),
        state=state * recurrent,
        head=number("attention.value_length", of_head),
        files=files,
    )


def _kv_heads(told: Any, layers: int) -> list[int]:
    """One number a layer; a file may tell one for all."""
    return [int(count) for count in told] if isinstance(told, list) else [int(told)] * layers


def _count(told: Any) -> int:
    return len(told) if isinstance(told, list) else int(told)


# --- the sums ---------------------------------------------------------------------------------------------------------


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    model = read_model_shape(locate_model_file(spec.options.path))
    return estimate_memory(model, spec.options, spec.caches, visible_memory(machine), draft_shape(spec.options))


def draft_shape(options: Options) -> ModelShape | None:
    return (
        read_model_shape(locate_model_file(options.draft_model_path))
        if options.drafts and options.draft_model_path
        else None
    )


def estimate_memory(
    model: ModelShape,
    options: Options,
    caches: Mapping[str, CacheInfo],
    machine: AvailableMemory,
    draft: ModelShape | None = None,
    extra_buffers: Sequence[ExtraBuffer] | None = None,
) -> MemoryEstimate:
    """A draft model has a context for each cache, too. `extra_buffers`: of the library; None means the installed one.
    Where there is a GPU llama.cpp repacks nothing: the GPU's host buffers come first."""
    models = [model] if draft is None else [model, draft]
    if machine.gpus:
        extra_buffers = ()
    elif extra_buffers is None:
        extra_buffers = repack.available()
    weights = [model_weights(each, extra_buffers, options) for each in models]
    return MemoryEstimate(
        sum(each.needed for each in weights),
        sum(kv_bytes(each, info) for each in models for info in caches.values()),
        sum(compute_bytes(each, info, options.of(info)) for each in models for info in caches.values()),
        "gpu" if gpu_share(model, options, machine) else "cpu",
        sum(each.page_cache for each in weights),
    )


def model_weights(model: ModelShape, extra_buffers: Sequence[ExtraBuffer], options: Options) -> Weights:
    if not model.files:
        return Weights(model.weights)
    return repack.weights(model.files, extra_buffers, options.use_mmap)


def kv_bytes(model: ModelShape, info: CacheInfo) -> int:
    token = model.key * _bytes(info.type_k) + model.value * _bytes(info.type_v)
    return int(_cells(info) * info.parallel * token) + 4 * model.state * info.parallel


def compute_bytes(model: ModelShape, info: CacheInfo, options: Options) -> int:
    """The two largest moments of a step share their memory, so the larger of them counts."""
    rows = min(max(options.n_ubatch, info.parallel), _cells(info) * info.parallel)
    # Without flash attention the scores of every head lie there at once, and the mask; with it only the mask, twice.
    a_cell = model.heads + 1 if flash_attention_mode(options, gpu=False) == "off" else 1.5
    attention = _cells(info) * a_cell + 5 * model.width + (model.key + model.value) // max(1, model.layers)
    logits = model.vocab + 3 * model.width
    outputs = info.parallel * (1 if options.speculation == "off" else 1 + options.draft_n_max)
    return int(4 * rows * max(attention, logits)) + 4 * model.vocab * min(outputs, rows)


def _cells(info: CacheInfo) -> int:
    return -(-info.window // _PAD) * _PAD


def _bytes(format_: str) -> float:
    return _BYTES.get(format_.lower(), 4.0)  # an unknown one is refused later, by its name


def gpu_share(model: ModelShape, options: Options, machine: AvailableMemory) -> float:
    """The share of the layers that goes to GPUs; the output counts as one."""
    if not machine.gpus:
        return 0.0
    wanted = options.n_gpu_layers
    return 1.0 if wanted < 0 else min(1.0, wanted / (model.layers + 1))


# --- the verdict ------------------------------------------------------------------------------------------------------


def check_fits(name: str, memory: MemoryEstimate, share: float, machine: AvailableMemory) -> None:
    """Raise, with the numbers, where it cannot fit. `share` of it goes to GPUs."""
    moving = memory.weights + memory.kv
    on_gpu = int(share * moving) + (memory.compute if share else 0)
    on_host = int((1 - share) * moving) + (memory.compute if share < 1 else 0)
    for place, need, free in (("GPU memory", on_gpu, sum(machine.gpus.values())), ("RAM", on_host, machine.ram_free)):
        if need > free:
            raise InvalidRequest(
                f"the model {name!r} needs about {format_size(need)} of {place} and {format_size(free)} are free: {_parts(memory)}. "
                "Take a smaller n_ctx, parallel or KV type, or set overcommit = true to load it all the same.",
                code="model_too_large",
            )


def _parts(memory: MemoryEstimate) -> str:
    return f"weights {format_size(memory.weights)}, KV caches {format_size(memory.kv)}, compute buffers {format_size(memory.compute)}"


def format_size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
