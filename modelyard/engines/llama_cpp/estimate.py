"""How much memory a model needs, from its file's header, before anything is loaded.

    weights   the files, all parts of a split model, with repacked tensors in their new size
    KV        layers × window × parallel × (key + value of one token), by the cache's types; without `swa_full` layers
              with a sliding window keep that and one micro-batch
    states    of recurrent layers, one per sequence
    compute   the largest step of one micro-batch: a layer, its attention over the window, or the logits

`test_estimate.py` compares the sums with those of llama.cpp for models of each kind, in their real widths. A model that
generates and embeds creates its context for embeddings on first use, and checks it then; one that only embeds or ranks
has no other context.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.core.units import format_size as format_size
from modelyard.engines.llama_cpp.library import cpu_features, has_amx_kernels
from modelyard.engines.llama_cpp.model_shape import (
    FEATURE_ARCHITECTURES,
    HEAD_FILES,
    ROLLBACK_ARCHITECTURES,
    ModelShape,
    read_model_shape,
)
from modelyard.engines.llama_cpp.options import (
    LOGIT_ROWS,
    Options,
    context_layouts,
    flash_attention_mode,
    kv_type_bytes,
)
from modelyard.library import architectures, variants
from modelyard.library.gguf import TensorInfo
from modelyard.library.llama_cpp_package import library_folder
from modelyard.library.model_files import find_model_file, locate_model_file
from modelyard.plugins import MissingLibrary

_WINDOW_MULTIPLE = 256  # llama.cpp rounds windows up to it


def require_supported(file: Path, architecture: str) -> None:
    """Raises for an architecture for which llama.cpp would end the process."""
    if (reason := architectures.refusal(architecture)) is not None:
        raise InvalidRequest(
            f"{file} cannot be loaded: the architecture {architecture!r} {reason}", code="architecture_unsupported"
        )


def require_mtp_layers(model: ModelShape) -> None:
    """Raises for a file that cannot draft with its own layers."""
    if not model.mtp_layers:
        unused = f"the MTP layers of {model.architecture} are not run by this engine"
        reason = unused if model.unused_mtp_layers else "the file has no MTP layers"
        raise InvalidRequest(f"speculation = mtp is not possible: {reason}", code="mtp_unavailable")


def draft_kinds(model: ModelShape) -> list[str]:
    """The kinds of speculation that a model can do, where the library can."""
    if model.purpose.task != "chat" or not model.purpose.causal:
        return []
    if model.state and model.architecture not in ROLLBACK_ARCHITECTURES:
        return []
    layers = model.mtp_layers
    own = [f"mtp ({layers} layer{'s' * (layers > 1)} of its own)"] if layers else []
    own += ["mtp (with an assistant's file)"] * (model.architecture == "gemma4")
    return ["ngram", "draft", *own, *["eagle3 (with a file for it)"] * (model.architecture in FEATURE_ARCHITECTURES)]


# --- the sums ---------------------------------------------------------------------------------------------------------


def with_heads(options: Options, model: ModelShape, *, gpu: bool) -> Options:
    """What `auto` means for a model that has its own heads, and for a file that drafts for it. On a GPU heads made
    decoding slower wherever they were measured (docs/gpu-performance.md): there `mtp` has to be asked for."""
    if options.speculation == "auto" and options.draft_model_path is None and model.mtp_layers and not gpu:
        return options.model_copy(update={"speculation": "mtp"})
    if not options.uses_draft_model or (draft := draft_shape(options, model)) is None:
        return options
    if draft.architecture not in HEAD_FILES:
        return options
    return options.model_copy(update={"speculation": "draft", "draft_n_max": options.draft_n_max or 3})


def draft_shape(options: Options, model: ModelShape) -> ModelShape | None:
    """What drafts: the model's own heads, or a draft model. The weights of the heads are in the model's file."""
    if options.speculation == "mtp" and options.draft_model_path is None:
        return model.head_shape()
    if not options.uses_draft_model or options.draft_model_path is None:
        return None
    return read_model_shape(locate_model_file(options.draft_model_path))


def estimate_memory(
    model: ModelShape,
    options: Options,
    caches: Mapping[str, CacheInfo],
    machine: AvailableMemory,
    draft: ModelShape | None = None,
    buffers: Sequence[ExtraBuffer] | None = None,
) -> MemoryEstimate:
    """A draft model has a context per cache, too. `buffers` defaults to those of the installed library. With a GPU
    llama.cpp repacks nothing, because the GPU's host buffers come first."""
    models = [model] if draft is None else [model, draft]
    if model.purpose.task != "chat":
        caches = {"embeddings": embedding_cache(model, options, caches)}
    if machine.gpus:
        buffers = ()
    elif buffers is None:
        buffers = installed_extra_buffers()
    weights = [
        weights_memory(each.files, buffers, mmap=options.use_mmap) if each.files else WeightsMemory(each.weights)
        for each in models
    ]
    gpu_layers = offloaded_layers(model, options, caches, machine, draft)
    return MemoryEstimate(
        sum(each.needed for each in weights) + projector_bytes(options),
        sum(kv_bytes(each, info, options.for_cache(info)) for each in models for info in caches.values()),
        sum(contexts_bytes(each, caches, options) for each in models),
        "gpu" if gpu_layers else "cpu",
        sum(each.page_cache for each in weights),
        gpu_layers,
        model.layers + 1,
        sum(layer_weights(model, Options(path=""))) - sum(layer_weights(model, options)) if gpu_layers else 0,
    )


def projector_bytes(options: Options) -> int:
    """The encoder of images and audio: its file, and a quarter of it to compute with."""
    model = find_model_file(options.path) if options.path and options.mmproj is not False else None
    projector = variants.locate_projector(options.mmproj, model) if model is not None else None
    return 5 * projector.stat().st_size // 4 if projector is not None else 0


def embedding_cache(model: ModelShape, options: Options, caches: Mapping[str, CacheInfo]) -> CacheInfo:
    """The only context of a model that embeds or ranks. It reads a text that is not causal in one micro-batch."""
    window = max((info.window for info in caches.values()), default=options.n_ubatch)
    window = min(window, model.positions or window)
    return CacheInfo(window, n_ubatch=options.n_ubatch if model.purpose.causal else max(window, options.n_ubatch))


def kv_bytes(model: ModelShape, info: CacheInfo, options: Options) -> int:
    key, value = kv_type_bytes(info.type_k), kv_type_bytes(info.type_v)
    is_padded = flash_attention_mode(options, gpu=False) == "off" and model.padded_value is not None
    width = model.key * key + ((model.padded_value or 0) if is_padded else model.value) * value
    sliding_width = model.sliding_key * key + model.sliding_value * value
    cells, sliding_cells = _cells(info), _sliding_cells(model, info, options)
    states = 1 + (options.rollback if model.architecture in ROLLBACK_ARCHITECTURES else 0)
    return int(info.parallel * (cells * width + sliding_cells * sliding_width + 4 * model.state * states))


def max_outputs(info: CacheInfo, options: Options) -> int:
    """The rows of a decode that have logits, at most: those of a stream with its draft, or those of a prompt whose log
    probabilities are wanted."""
    return info.parallel * max(rows_per_stream(options), LOGIT_ROWS)


def rows_per_stream(options: Options) -> int:
    """Of a step, at most: its token and its draft."""
    return 1 if options.speculation == "off" else 1 + options.max_draft


def contexts_bytes(model: ModelShape, caches: Mapping[str, CacheInfo], options: Options) -> int:
    """The compute buffers of all contexts; caches of one layout share one."""
    infos = [layout.info for layout in context_layouts(caches, options)]
    return sum(compute_bytes(model, info, options.for_cache(info)) for info in infos)


def compute_bytes(model: ModelShape, info: CacheInfo, options: Options) -> int:
    """Attention and logits share their memory, so the larger of them counts."""
    rows = min(_micro_batch(info, options), _cells(info) * info.parallel)
    kv = model.key + model.value + model.sliding_key + model.sliding_value
    cells = _cells(info) if kv else 0
    sliding_cells = _sliding_cells(model, info, options) if model.sliding_key else 0
    row = model.activations or 12 * model.width
    copied = info.parallel * model.state // max(1, model.layers)  # the states of one layer
    # Without flash attention the scores of all heads are held at once, and the masks; with it only the masks, in fp16.
    if flash_attention_mode(options, gpu=False) == "off":
        scores = cells * (model.heads + 1) + sliding_cells
        attention = model.attention_activations or 5 * model.width + kv // max(1, model.layers)
        row = max(row + cells, scores + attention)
        if model.attention_activations:  # the latent vectors are transposed
            copied += info.parallel * cells * model.head_size // 2
    else:
        row += (cells + sliding_cells) // 2
    logits = model.vocab + 3 * model.width
    outputs = min(max_outputs(info, options), rows)
    held = info.parallel * rows_per_stream(options)  # the logits of a step
    return int(4 * max(rows * row + copied, outputs * logits)) + 4 * model.vocab * min(held, outputs)


def _cells(info: CacheInfo) -> int:
    return _round_up(info.window)


def _sliding_cells(model: ModelShape, info: CacheInfo, options: Options) -> int:
    if options.swa_full:
        return _cells(info)
    return min(_cells(info), _round_up(model.sliding_window + _micro_batch(info, options)))


def _micro_batch(info: CacheInfo, options: Options) -> int:
    """As the context is created: each stream has as many rows."""
    return -(-options.for_cache(info).n_ubatch // info.parallel) * info.parallel


def _round_up(window: int) -> int:
    return -(-window // _WINDOW_MULTIPLE) * _WINDOW_MULTIPLE


# --- the layers on the GPU --------------------------------------------------------------------------------------------
#
# llama.cpp offloads the last layers of a model: first the output, which counts as a layer, then the last block and so
# on. The table of the input's embeddings stays in RAM. Several GPUs share the layers by their free memory.

_MAX_RESERVE = 1 << 30  # for the driver's own memory, and for what the estimate does not know
_BLOCK = re.compile(r"blk\.(\d+)\.")
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps")


def offloaded_layers(
    model: ModelShape,
    options: Options,
    caches: Mapping[str, CacheInfo],
    machine: AvailableMemory,
    draft: ModelShape | None = None,
) -> int:
    """The number of layers on GPUs, with the output as one of them."""
    if not machine.gpus:
        return 0
    if options.n_gpu_layers == "auto":
        return layers_that_fit(model, options, caches, tuple(machine.gpus.values()), draft)
    return model.layers + 1 if options.n_gpu_layers < 0 else min(model.layers + 1, options.n_gpu_layers)


def layers_that_fit(
    model: ModelShape,
    options: Options,
    caches: Mapping[str, CacheInfo],
    free: Sequence[int],
    draft: ModelShape | None = None,
) -> int:
    """As many layers as fit into the free bytes of the GPUs, each with its part of the KV caches. The compute buffers
    are on each GPU. A draft model is there as a whole, since it is small."""
    sizes = layer_weights(model, options)
    kv = sum(kv_bytes(model, info, options.for_cache(info)) for info in caches.values()) // max(1, model.layers)
    models = [model] if draft is None else [model, draft]
    compute = sum(contexts_bytes(each, caches, options) for each in models)
    room = sum(bytes_ - min(_MAX_RESERVE, bytes_ // 8) - compute for bytes_ in free)
    room -= (len(free) - 1) * (max(sizes) + kv)  # a layer is not divided
    if draft is not None:
        room -= draft.weights + sum(kv_bytes(draft, info, options.for_cache(info)) for info in caches.values())
    for count, size in enumerate(reversed(sizes)):
        room -= size + (kv if count else 0)  # the output has no KV
        if room < 0:
            return count
    return len(sizes)


def layer_weights(model: ModelShape, options: Options) -> list[int]:
    """The bytes of each block and of the output that can go to a GPU: without what the options keep in RAM."""
    if not model.files:
        return [model.weights // (model.layers + 1)] * (model.layers + 1)
    sizes = [0] * (model.layers + 1)
    table, has_output = 0, False
    for size, tensors in model.files:
        ordered = sorted(tensors, key=lambda tensor: tensor.offset)
        ends = [*(tensor.offset for tensor in ordered[1:]), size]
        for tensor, end in zip(ordered, ends, strict=True):
            bytes_ = max(0, end - tensor.offset)
            if stays_in_ram(tensor.name, options):
                continue
            if block := _BLOCK.match(tensor.name):
                sizes[min(int(block[1]), model.layers)] += bytes_
            elif tensor.name.startswith("output"):
                sizes[-1] += bytes_
                has_output |= tensor.name == "output.weight"
            elif tensor.name == "token_embd.weight":
                table = bytes_
    if not has_output:  # the table is the output matrix, too: the GPU gets a copy
        sizes[-1] += table
    return sizes


def stays_in_ram(tensor: str, options: Options) -> bool:
    """Whatever its layer. The first pattern that matches decides, and those of single tensors come first."""
    for pattern, device in options.tensor_overrides.items():
        if re.search(pattern, tensor):
            return device.upper() == "CPU"
    expert = EXPERTS.match(tensor)
    return expert is not None and (options.n_cpu_moe < 0 or int(expert[1]) < options.n_cpu_moe)


# --- the check --------------------------------------------------------------------------------------------------------


def memory_by_device(memory: MemoryEstimate) -> tuple[int, int]:
    """Bytes on the GPUs and in RAM."""
    share = memory.gpu_layers / memory.layers if memory.layers else 0.0
    movable = memory.weights - memory.ram_weights + memory.kv
    on_gpu = int(share * movable) + (memory.compute if share else 0)
    in_ram = int((1 - share) * movable) + memory.ram_weights + (memory.compute if share < 1 else 0)
    return on_gpu, in_ram


def check_fits(name: str, memory: MemoryEstimate, machine: AvailableMemory) -> None:
    """Raises, with the numbers, if the model cannot fit."""
    on_gpu, in_ram = memory_by_device(memory)
    for kind, need, free in (("GPU memory", on_gpu, sum(machine.gpus.values())), ("RAM", in_ram, machine.ram_free)):
        if need > free:
            parts = (
                f"weights {format_size(memory.weights)}, KV caches {format_size(memory.kv)}, "
                f"compute buffers {format_size(memory.compute)}"
            )
            raise InvalidRequest(
                f"the model {name!r} needs about {format_size(need)} of {kind} and {format_size(free)} are free: "
                f"{parts}. Use a smaller n_ctx, parallel or KV type, set fit = true to let the engine choose them, or "
                "overcommit = true to load it anyway.",
                code="model_too_large",
            )


# --- repacked weights -------------------------------------------------------------------------------------------------
#
# llama.cpp copies some weights into another memory layout when it loads a model on a CPU. ggml's CPU backend has extra
# buffer types whose kernels need the weights in their own order. A tensor goes to the first buffer type that takes it;
# otherwise it stays in the mapping of the file:
#
#     AMX          tiles for Intel's AMX; some types grow, because sums of blocks are stored with them
#     CPU_REPACK   interleaved rows for AVX2, AVX-512 or NEON; the size does not change
#
# The file stays mapped from the first to the last tensor that is not copied. The pages of copied tensors in between are
# clean and never read again: they are resident until the kernel needs their memory (`page_cache`).
# The rules are those of the pinned release: ggml-cpu/amx/amx.cpp, amx/mmq.cpp, repack.cpp, and llama-arch.cpp for the
# operation of each tensor.

_F16, _Q4_0, _Q4_1, _Q8_0, _Q2_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_NL, _IQ4_XS = 1, 2, 3, 8, 10, 12, 13, 14, 20, 23
_MXFP4, _Q1_0 = 39, 41

# ggml's type number → weights and bytes of one block
_BLOCKS = {
    _F16: (1, 2),
    _Q4_0: (32, 18),
    _Q4_1: (32, 20),
    _Q8_0: (32, 34),
    _Q2_K: (256, 84),
    _Q4_K: (256, 144),
    _Q5_K: (256, 176),
    _Q6_K: (256, 210),
    _IQ4_NL: (32, 18),
    _IQ4_XS: (256, 136),
    _MXFP4: (32, 17),
    _Q1_0: (128, 18),
}
_LOOKUP_TABLES = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")  # read by rows, not multiplied


class ExtraBuffer(Struct, frozen=True):
    """A buffer type. `row_multiples` maps the types of tensors that it takes to the number that their rows must be a
    multiple of; `growth` has the bytes by which a block grows; `dimensions` what a tensor of an operation may have."""

    name: str
    row_multiples: Mapping[int, int]
    dimensions: Mapping[str, range]
    growth: Mapping[int, int] = {}

    def takes(self, tensor: TensorInfo) -> bool:
        operation = "MUL_MAT_ID" if "exps" in tensor.name else "MUL_MAT"
        if len(tensor.shape) not in self.dimensions.get(operation, ()) or tensor.kind not in self.row_multiples:
            return False
        column_multiple = 16 if tensor.kind == _F16 else _BLOCKS[tensor.kind][0]
        return tensor.shape[-2] % self.row_multiples[tensor.kind] == 0 and tensor.shape[-1] % column_multiple == 0

    def size(self, tensor: TensorInfo) -> int:
        weights, size = _BLOCKS[tensor.kind]
        return math.prod(tensor.shape) // weights * (size + self.growth.get(tensor.kind, 0))


_AMX = ExtraBuffer(
    "AMX",
    dict.fromkeys((_F16, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS), 32),
    {"MUL_MAT": range(2, 5)},
    {_Q8_0: 4, _Q4_K: 4, _Q5_K: 4, _IQ4_XS: 2},
)
_AVX2 = dict.fromkeys((_Q4_0, _Q4_K, _IQ4_NL, _MXFP4), 8)
_AVX512 = _AVX2 | {_Q2_K: 8}
_NEON = dict.fromkeys((_Q4_K, _Q5_K, _Q6_K), 8) | dict.fromkeys((_Q4_0, _IQ4_NL, _MXFP4, _Q8_0, _Q1_0), 4)


def extra_buffers(features: frozenset[str], *, amx_kernels: bool) -> tuple[ExtraBuffer, ...]:
    """The buffer types on a CPU with these features (names of /proc/cpuinfo), in the order in which they are tried."""
    found = [_AMX] if amx_kernels and {"amx_int8", "avx512_vnni"} <= features else []
    rows = _NEON if "asimddp" in features else _AVX512 if "avx512f" in features else _AVX2 if "avx2" in features else {}
    if rows:
        found.append(ExtraBuffer("CPU_REPACK", rows, {"MUL_MAT": range(2, 3), "MUL_MAT_ID": range(3, 4)}))
    return tuple(found)


def installed_extra_buffers() -> tuple[ExtraBuffer, ...]:
    """The buffer types of the installed library on this CPU."""
    try:
        return extra_buffers(cpu_features(), amx_kernels=has_amx_kernels(library_folder()))
    except MissingLibrary:
        return ()


class WeightsMemory(Struct, frozen=True):
    """Bytes: what the model cannot run without, and the clean pages of copied tensors."""

    needed: int
    page_cache: int = 0


def weights_memory(
    files: Sequence[tuple[int, Sequence[TensorInfo]]], buffers: Sequence[ExtraBuffer], *, mmap: bool
) -> WeightsMemory:
    """For a model in these files, each with its size and its tensors."""
    has_output = any(tensor.name == "output.weight" for _, tensors in files for tensor in tensors)
    needed = page_cache = 0
    for size, tensors in files:
        needed += size
        mapped: list[int] = []  # offsets of tensors that stay in the file
        copied: list[tuple[int, int]] = []  # offset and bytes of those that do not
        for tensor in tensors:
            is_table = tensor.name.removesuffix(".weight") in _LOOKUP_TABLES
            is_tied = tensor.name == "token_embd.weight" and not has_output  # it is also the output matrix
            buffer = next((each for each in buffers if each.takes(tensor)), None)
            if buffer is None or (is_table and not is_tied):
                mapped.append(tensor.offset)
                continue
            needed += buffer.size(tensor)
            if is_tied:
                mapped.append(tensor.offset)
            else:
                weights, bytes_ = _BLOCKS[tensor.kind]
                copied.append((tensor.offset, math.prod(tensor.shape) // weights * bytes_))
        needed -= sum(bytes_ for _, bytes_ in copied)
        if mmap and mapped:
            page_cache += sum(bytes_ for offset, bytes_ in copied if min(mapped) < offset < max(mapped))
    return WeightsMemory(needed, page_cache)
