"""Loads the weights and makes contexts, with the reason in llama.cpp's own words when that fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import library
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.estimate import (
    ModelShape,
    check_fits,
    draft_shape,
    estimate_memory,
    gpu_share,
    read_model_shape,
)
from modelyard.engines.llama_cpp.options import FlashAttentionMode, Options, flash_attention_mode
from modelyard.telemetry import system
from modelyard.tokenizer import llama_log

# Whether a context computes attention the flash way: the user's word, else what measured better on such a backend.
#
# On a CPU it is on: beside the plain way it reads prompts faster (1.1 times, 1.7 with AMX), decodes short contexts
# faster, those of 512 tokens as fast, and needs no memory for the scores of whole micro-batches; at 4,000 tokens
# the plain way decodes 1.5 times as fast without AMX (docs/performance.md has the table). One exception: where the CPU
# has AVX512-FP16 the pinned release adds half-precision values up in blocks of 128, so heads of 64, 80 or 96 fall
# to its loop over single numbers, and decoding at depth to less than half. `setup/llama_cpp_build.py` leaves those
# instructions out; a library that was built in another way is recognized (`halves.py`), and the plain way taken.
# On a GPU llama.cpp knows best whether all devices of the model can do it: `auto`.

FLASH_ATTENTION_TYPES: dict[FlashAttentionMode, int] = {"on": 1, "off": 0, "auto": -1}  # llama_flash_attn_type


def resolve_flash_attention(spec: EngineSpec, *, gpu: bool, slow: Callable[[], bool]) -> EngineSpec:
    """The spec with flash attention off where nobody asked for it and it is `slow` here. It touches values of 16 bits
    only, and those that are quantized cannot do without it."""
    asked = spec.options.flash_attn is not None or any(info.flash_attn is not None for info in spec.caches.values())
    halves = all(info.type_v.lower() == "f16" for info in spec.caches.values())
    if gpu or asked or not halves or not slow():
        return spec
    return structs.replace(spec, options=spec.options.model_copy(update={"flash_attn": "off"}))


log = logging.getLogger(__name__)

_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
_SCALINGS = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_ROPE = (
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)

lib.llama_backend_init()


def check_before_loading(path: Path, spec: EngineSpec) -> ModelShape | None:
    """Before the weights: refuse what cannot fit, warn of what may disappoint. A file that cannot be read is left to
    llama.cpp, which says best what is wrong with it."""
    try:
        model = read_model_shape(path)
    except InvalidRequest:
        return None
    _warn_of_length(model.trained, spec)
    check_memory(model, spec.model, spec.options, spec.caches, draft_shape(spec.options))
    return model


def check_memory(
    model: ModelShape, name: str, options: Options, caches: Mapping[str, CacheInfo], draft: ModelShape | None = None
) -> None:
    on_gpus = uses_gpu(options)
    machine = system.free_memory(with_gpus=on_gpus)
    if options.overcommit or (on_gpus and not machine.gpus):  # a GPU that only llama.cpp can look into
        return
    share = gpu_share(model, options, machine)
    check_fits(name, estimate_memory(model, options, caches, machine, draft), share, machine)


def resolve_options(spec: EngineSpec, model: ModelShape | None) -> EngineSpec:
    """With what this machine and model decide where the user did not."""
    slow = partial(library.is_flash_attention_slow, model.head if model is not None else 0, library.library_folder())
    return resolve_flash_attention(spec, gpu=uses_gpu(spec.options), slow=slow)


def uses_gpu(options: Options) -> bool:
    return bool(lib.llama_supports_gpu_offload()) and options.n_gpu_layers != 0


def _warn_of_length(trained: int, spec: EngineSpec) -> None:
    if not trained or spec.options.stretches:
        return
    for name, info in spec.caches.items():
        if info.window > trained:
            log.warning(
                "the cache %r has a window of %d tokens and the model %r was trained on %d: beyond them answers may "
                "be nonsense; rope_scaling and rope_freq_scale can help",
                name,
                info.window,
                spec.model,
                trained,
            )


def load_model(path: Path, options: Options, go_on: Callable[[float], bool]) -> Any:
    """`go_on` hears how much is done; its False ends the loading."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = options.n_gpu_layers
    params.load_mode = 1 if options.use_mmap else 0
    params.progress_callback = report = lib.llama_progress_callback(lambda done, _: go_on(done))
    llama_log.forget()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    del report  # it had to live until here
    if not model:
        raise InvalidRequest(f"{path} cannot be loaded: {llama_log.reason()}", code="model_unreadable")
    return model


def create_context(model: Any, name: str, info: CacheInfo, options: Options) -> Any:
    llama_log.forget()
    raw = lib.llama_init_from_model(model, context_parameters(info, options))
    if not raw:
        raise InvalidRequest(f"the cache {name!r} cannot be made: {llama_log.reason()}", code="cache_unusable")
    return raw


def can_rewind(model: Any, info: CacheInfo, options: Options) -> bool:
    """Whether the last tokens of a sequence can be taken back: not where a model keeps one state, nor where the KV
    behind a sliding window is thrown away."""
    if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model):
        return False
    return not lib.llama_model_n_swa(model) or bool(context_parameters(info, options).swa_full)


def create_embedding_context(model: Any, options: Options, cells: int, places: int) -> Any:
    """Gives the vector of each token that is read. One pool of cells: what shares it is read and forgotten together."""
    params = context_parameters(CacheInfo(cells), options)
    params.n_seq_max, params.kv_unified = places, True
    params.embeddings, params.pooling_type = True, 0  # none: each token's own
    params.n_batch = params.n_ubatch
    llama_log.forget()
    raw = lib.llama_init_from_model(model, params)
    if not raw:
        raise InvalidRequest(f"no context for embeddings: {llama_log.reason()}", code="cache_unusable")
    return raw


def context_parameters(info: CacheInfo, options: Options) -> Any:
    options, params = options.of(info), lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = info.window * info.parallel, info.parallel
    # A decode of more rows than n_batch is an assertion in llama.cpp, and each stream needs one.
    params.n_batch = max(options.n_batch, options.n_ubatch, info.parallel)
    params.n_ubatch = options.n_ubatch
    params.n_threads, params.n_threads_batch = threads(info, options), batch_threads(info, options)
    params.flash_attn_type = FLASH_ATTENTION_TYPES[flash_attention_mode(options, gpu=uses_gpu(options))]
    params.type_k, params.type_v = _type(info.type_k), _type(info.type_v)
    params.kv_unified, params.no_perf = False, True
    params.swa_full = options.swa_full
    _scale_positions(params, options)
    return params


def _scale_positions(params: Any, options: Options) -> None:
    """What is not set stays as llama.cpp has it: from the file."""
    if options.rope_scaling is not None:
        params.rope_scaling_type = _SCALINGS[options.rope_scaling]
    for name in _ROPE:
        if (value := getattr(options, name)) is not None:
            setattr(params, name, value)


def _type(name: str) -> int:
    if name.lower() not in _TYPES:
        raise InvalidRequest(
            f"{name!r} is no number format of a KV cache; there are {', '.join(_TYPES)}", code="cache_unusable"
        )
    return _TYPES[name.lower()]


def threads(info: CacheInfo, options: Options) -> int:
    return options.of(info).n_threads or default_threads()


def batch_threads(info: CacheInfo, options: Options) -> int:
    """Where several tokens are computed at once, which is work for more cores than a single one."""
    return options.n_threads_batch or threads(info, options)


def max_threads(spec: EngineSpec) -> int:
    """Of all contexts that a model may have; that for embeddings has no settings of its own."""
    counts = (threads, batch_threads)
    return max(count(info, spec.options) for info in (CacheInfo(1), *spec.caches.values()) for count in counts)


def default_threads() -> int:
    """The physical cores, as far as this process may use them: llama.cpp's threads spin while they wait for each
    other, so one too many costs more than it brings."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
