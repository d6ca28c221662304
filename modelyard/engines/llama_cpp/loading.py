"""Loads models and creates contexts. Errors carry the reason that llama.cpp logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.engines import cores
from modelyard.engines.in_process import warn_about_trained_length
from modelyard.engines.llama_cpp import file_check, library
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.estimate import (
    check_fits,
    draft_shape,
    estimate_memory,
    format_size,
    offloaded_layers,
    require_supported,
)
from modelyard.engines.llama_cpp.model_shape import ModelShape, read_model_shape
from modelyard.engines.llama_cpp.options import KV_TYPES, Options, flash_attention_mode
from modelyard.library.gguf import Pooling
from modelyard.library.llama_cpp_package import library_folder
from modelyard.telemetry import system
from modelyard.tokenizer import llama_log

log = logging.getLogger(__name__)

_FLASH_ATTENTION_TYPES = {"on": 1, "off": 0, "auto": -1}
_ROPE_SCALING_TYPES = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
ROPE_OPTIONS = (
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
_POOLING_TYPES: dict[Pooling, int] = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}

lib.llama_backend_init()


# --- before loading ---------------------------------------------------------------------------------------------------


def check_before_loading(path: Path, spec: EngineSpec) -> ModelShape | None:
    """Refuses a model that cannot fit, warns about a window beyond the trained length. Returns None for a file that
    cannot be read: llama.cpp explains best what is wrong with it."""
    try:
        model = read_model_shape(path)
    except InvalidRequest:
        return None
    require_supported(path, model.architecture)
    spec = limit_windows(spec, model)
    if not spec.options.scales_positions:
        warn_about_trained_length(spec, model.trained, "; rope_scaling and rope_freq_scale can help")
    check_memory(model, spec.model, spec.options, spec.caches, draft_shape(spec.options))
    return model


def check_memory(
    model: ModelShape, name: str, options: Options, caches: Mapping[str, CacheInfo], draft: ModelShape | None = None
) -> None:
    if options.overcommit:
        return
    free = free_memory(options)
    memory = estimate_memory(model, options, caches, free, draft)
    share = memory.gpu_layers / memory.layers
    if options.n_gpu_layers == "auto":  # these layers fit: only the rest needs RAM
        free = structs.replace(free, gpus={"auto": sys.maxsize})
    check_fits(name, memory, share, free)


def free_memory(options: Options) -> AvailableMemory:
    """RAM and the GPUs that the library uses: some are hidden by variables, others only the library can see."""
    free = system.free_memory(with_gpus=False)
    if not uses_gpu(options):
        return free
    return structs.replace(free, gpus={gpu.name: gpu.free for gpu in lib.gpu_devices()})


def uses_gpu(options: Options) -> bool:
    return bool(lib.llama_supports_gpu_offload()) and options.n_gpu_layers != 0


def encodes_on_gpu(options: Options) -> bool:
    """Whether images and audio are encoded on the GPU."""
    if not lib.llama_supports_gpu_offload():
        return False
    return uses_gpu(options) if options.mmproj_gpu is None else options.mmproj_gpu


def resolve_gpu_layers(spec: EngineSpec, model: ModelShape | None) -> EngineSpec:
    """Replaces `auto` by a number, and logs what is offloaded. llama.cpp decides for a file that cannot be read."""
    options: Options = spec.options
    if not uses_gpu(options):
        return spec
    free = free_memory(options)
    layers = -1 if model is None else offloaded_layers(model, options, spec.caches, free, draft_shape(options))
    if model is not None and free.gpus:
        log.info(
            "%d of %d layers of %r go to the GPU (n_gpu_layers = %s): %s of its memory are free",
            *(layers, model.layers + 1, spec.model, options.n_gpu_layers, format_size(sum(free.gpus.values()))),
        )
    return structs.replace(spec, options=options.model_copy(update={"n_gpu_layers": layers}))


def limit_windows(spec: EngineSpec, model: ModelShape | None) -> EngineSpec:
    """A model with a table of positions cannot read further than the table goes: llama.cpp would end the process."""
    if model is None or model.positions is None:
        return spec
    limit, caches = model.positions, dict(spec.caches)
    for name, info in caches.items():
        if info.window > limit:
            log.info("the window of the cache %r of %r is %d: the model has no more positions", name, spec.model, limit)
            caches[name] = structs.replace(info, window=limit)
    return structs.replace(spec, caches=caches)


def resolve_options(spec: EngineSpec, model: ModelShape | None) -> EngineSpec:
    """Fills in what depends on the machine and the model."""

    def is_slow() -> bool:
        head_size = model.head_size if model is not None else 0
        return library.is_flash_attention_slow(head_size, library_folder())

    spec = resolve_gpu_layers(spec, model)
    return resolve_flash_attention(spec, gpu=uses_gpu(spec.options), is_slow=is_slow)


def resolve_flash_attention(spec: EngineSpec, *, gpu: bool, is_slow: Callable[[], bool]) -> EngineSpec:
    """Turns flash attention off if it is slow here and unset. Only fp16 values are slow, and quantized values cannot do
    without it."""
    is_set = spec.options.flash_attn is not None or any(info.flash_attn is not None for info in spec.caches.values())
    is_fp16 = all(info.type_v.lower() == "f16" for info in spec.caches.values())
    if gpu or is_set or not is_fp16 or not is_slow():
        return spec
    return structs.replace(spec, options=spec.options.model_copy(update={"flash_attn": "off"}))


# --- loading ----------------------------------------------------------------------------------------------------------


def load_model(path: Path, options: Options, report: Callable[[float], bool]) -> Any:
    """`report` takes the fraction that is loaded; if it returns False, loading stops."""
    file_check.check_weights(path, lambda: report(0.0))
    params = lib.llama_model_default_params()
    params.n_gpu_layers = -1 if options.n_gpu_layers == "auto" else options.n_gpu_layers
    params.load_mode = 1 if options.use_mmap else 0
    params.progress_callback = callback = lib.llama_progress_callback(lambda fraction, _: report(fraction))
    llama_log.clear()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    del callback  # C needs it until here
    if not model:
        raise InvalidRequest(f"{path} cannot be loaded: {llama_log.first_error()}", code="model_unreadable")
    return model


def create_context(model: Any, name: str, info: CacheInfo, options: Options, outputs: int = 0) -> Any:
    """`outputs` are the rows of a decode that have logits, at most: llama.cpp asserts it, and reserves memory for them.
    0 means all rows."""
    params = context_parameters(info, options)
    params.n_outputs_max = min(outputs, params.n_batch)
    return _create_context(model, params, f"the cache {name!r}")


def create_embedding_context(model: Any, options: Options, cells: int, sequences: int, pooling: Pooling) -> Any:
    """A context that returns vectors: with the pooling `none` of each token, else of each sequence. Its sequences share
    one pool of cells: they are read and forgotten together."""
    params = context_parameters(CacheInfo(cells), options)
    params.n_seq_max, params.kv_unified = sequences, True
    params.embeddings, params.pooling_type = True, _POOLING_TYPES[pooling]
    params.n_batch = params.n_ubatch = -(-params.n_ubatch // sequences) * sequences
    return _create_context(model, params, "the context for embeddings")


def _create_context(model: Any, params: Any, name: str) -> Any:
    llama_log.clear()
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise InvalidRequest(f"{name} cannot be created: {llama_log.first_error()}", code="cache_unusable")
    return context


def context_parameters(info: CacheInfo, options: Options) -> Any:
    options, params = options.for_cache(info), lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = info.window * info.parallel, info.parallel
    # Attention over latent vectors beside recurrent layers (kimi-linear) asserts that all sequences have equally many
    # rows of a micro-batch.
    params.n_ubatch = -(-options.n_ubatch // info.parallel) * info.parallel
    # llama.cpp asserts that a decode has at most n_batch rows, and each stream needs one.
    params.n_batch = max(options.n_batch, params.n_ubatch)
    params.n_threads, params.n_threads_batch = thread_counts(info, options)
    params.flash_attn_type = _FLASH_ATTENTION_TYPES[flash_attention_mode(options, gpu=uses_gpu(options))]
    params.type_k, params.type_v = _kv_type(info.type_k), _kv_type(info.type_v)
    params.kv_unified, params.no_perf = False, True
    params.swa_full = options.swa_full
    if options.rope_scaling is not None:
        params.rope_scaling_type = _ROPE_SCALING_TYPES[options.rope_scaling]
    for name in ROPE_OPTIONS:  # unset: as the file says
        if (value := getattr(options, name)) is not None:
            setattr(params, name, value)
    return params


def _kv_type(name: str) -> int:
    if name.lower() not in KV_TYPES:
        raise InvalidRequest(
            f"{name!r} is not a type of a KV cache; use one of {', '.join(KV_TYPES)}", code="cache_unusable"
        )
    return KV_TYPES[name.lower()][0]


def thread_counts(info: CacheInfo, options: Options) -> tuple[int, int]:
    """For single tokens and for batches. The default is the number of physical cores: llama.cpp's threads spin while
    they wait for each other, so one too many costs more than it brings."""
    single = cores.bounded(options.for_cache(info).n_threads or cores.physical(), "n_threads")
    return single, cores.bounded(options.n_threads_batch or single, "n_threads_batch")


def max_threads(spec: EngineSpec) -> int:
    """Of all contexts of a model; the one for embeddings has no own settings."""
    return max(max(thread_counts(info, spec.options)) for info in (CacheInfo(1), *spec.caches.values()))
