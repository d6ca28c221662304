"""Loads models and creates contexts. Errors carry the reason that llama.cpp logs.

Weights get huge pages. Each token reads all weights, and with pages of 4 KiB the CPU spends a part of that time on
finding them. Most Linux distributions give huge pages only to memory for which a program asks (`transparent_hugepage`
is `madvise`), and native libraries do not ask. A mapped file has none either.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import structs

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
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
    with_heads,
)
from modelyard.engines.llama_cpp.model_shape import ModelShape, read_model_shape
from modelyard.engines.llama_cpp.offload import fit_to_memory, limit_memory
from modelyard.engines.llama_cpp.options import KV_TYPES, Options, flash_attention_mode
from modelyard.library import cores
from modelyard.library.gguf import Pooling
from modelyard.library.llama_cpp_package import library_folder
from modelyard.telemetry import system
from modelyard.tokenizer import llama_log

log = logging.getLogger(__name__)


# --- huge pages -------------------------------------------------------------------------------------------------------

_MAPS = Path("/proc/self/maps")
_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *$", re.MULTILINE)
_SMALLEST = 8 << 20  # bytes of a buffer
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # on Linux only

Range = tuple[int, int]  # addresses


class HugePages:
    """Asks for huge pages for the large buffers that are allocated after this was created."""

    def __init__(self) -> None:
        self._before = _private_ranges()

    def request(self) -> int:
        """Call it when the buffers are allocated and before they are written: memory that has its pages keeps them.
        Returns the bytes for which it asked."""
        if _MADV_HUGEPAGE is None:
            return 0
        advise, asked = ctypes.CDLL(None, use_errno=True).madvise, 0
        for start, end in _without(_private_ranges(), self._before):
            if end - start < _SMALLEST:
                continue
            if advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE) == 0:
                asked += end - start
            else:
                log.debug("the kernel gives no huge pages: error %d", ctypes.get_errno())
        return asked


def _private_ranges() -> list[Range]:
    """What this process can write and shares with no other, in ascending order. The kernel joins neighbours."""
    try:
        text = _MAPS.read_text()
    except OSError:  # another system, or a sandbox
        return []
    return [(int(start, 16), int(end, 16)) for start, end in _ANONYMOUS.findall(text)]


def _without(ranges: Sequence[Range], others: Sequence[Range]) -> Iterator[Range]:
    """The parts of the ranges that are in none of the others; both in ascending order."""
    for start, end in ranges:
        free = start
        for other_start, other_end in others:
            if free < other_end and other_start < end:
                if free < other_start:
                    yield free, other_start
                free = other_end
        if free < end:
            yield free, end


# --- names of options, and llama.cpp's numbers for them ---------------------------------------------------------------

_FLASH_ATTENTION_TYPES = {"on": 1, "off": 0, "auto": -1}
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_NUMA_STRATEGIES = {"distribute": 1, "isolate": 2, "numactl": 3}
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
    spec = resolve_speculation(spec, model)
    spec = fit_spec(limit_windows(spec, model), model)
    if not spec.options.scales_positions:
        warn_about_trained_length(spec, model.trained, "; rope_scaling and rope_freq_scale can help")
    check_memory(model, spec.model, spec.options, spec.caches, draft_shape(spec.options, model))
    return model


def check_memory(
    model: ModelShape, name: str, options: Options, caches: Mapping[str, CacheInfo], draft: ModelShape | None = None
) -> None:
    if options.overcommit:
        return
    free = free_memory(options)
    memory = estimate_memory(model, options, caches, free, draft)
    if options.n_gpu_layers == "auto":  # these layers fit: only the rest needs RAM
        free = structs.replace(free, gpus={"auto": sys.maxsize})
    check_fits(name, memory, free)


def free_memory(options: Options) -> AvailableMemory:
    """RAM and the GPUs that the library uses: some are hidden by variables, others only the library can see."""
    free = system.free_memory(with_gpus=False)
    if not uses_gpu(options):
        return free
    found = {gpu.name: gpu.free for gpu in lib.gpu_devices()}
    if options.devices is not None:  # in this order they share the model, and `main_gpu` counts them
        found = {name: found[name] for name in options.devices if name in found}
    return limit_memory(options, structs.replace(free, gpus=found))


def uses_gpu(options: Options) -> bool:
    return bool(lib.llama_supports_gpu_offload()) and options.n_gpu_layers != 0


def encodes_on_gpu(options: Options) -> bool:
    """Whether images and audio are encoded on the GPU."""
    if not lib.llama_supports_gpu_offload():
        return False
    return uses_gpu(options) if options.mmproj_gpu is None else options.mmproj_gpu


def samples_in_graph(model: Any, options: Options) -> bool:
    """Whether llama.cpp's graph may sample: the output layer is on an NVIDIA GPU. Others were not measured."""
    layers = options.n_gpu_layers
    if not uses_gpu(options) or options.split_mode == "tensor":
        return False
    if layers != "auto" and 0 <= layers <= lib.llama_model_n_layer(model):
        return False
    names = options.devices or [gpu.name for gpu in lib.gpu_devices()]
    return bool(names) and all(name.startswith("CUDA") for name in names)


def has_memory_left(options: Options) -> bool:
    """Whether llama.cpp can reserve its graphs again: it ends the process if a GPU is full."""
    return all(free >= _MIN_LEFT for free in free_memory(options).gpus.values())


def fit_spec(spec: EngineSpec, model: ModelShape | None, share: float = 1.0) -> EngineSpec:
    """With what `fit` chooses for this share of the free GPU memory, and a line about it in the log."""
    options: Options = spec.options
    if not options.fit or model is None:
        return spec
    free = free_memory(options)
    free = structs.replace(free, gpus={name: int(share * size) for name, size in free.gpus.items()})
    choice = fit_to_memory(model, options, spec.caches, free, draft_shape(options, model))
    log.info("%r is fitted to the memory: %s", spec.model, choice.description)
    return structs.replace(spec, options=choice.options, caches=dict(choice.caches))


_MIN_LEFT = 256 << 20  # bytes of a GPU for what llama.cpp allocates while it runs


def check_fit(spec: EngineSpec, before: Mapping[str, int]) -> None:
    """After loading: whether what `fit` chose is within the GPUs' memory. `before`: the free bytes of each."""
    after = {gpu.name: gpu.free for gpu in lib.gpu_devices()}
    limit = None if spec.options.gpu_memory_mb is None else spec.options.gpu_memory_mb << 20
    for name, free in before.items():
        taken = free - after.get(name, free)
        log.info("%r takes %s of %s", spec.model, format_size(taken), name)
        if after.get(name, free) < _MIN_LEFT or (limit is not None and taken > limit):
            raise InvalidRequest(f"it takes {format_size(taken)} of {name}: too much", code="model_too_large")


def resolve_gpu_layers(spec: EngineSpec, model: ModelShape | None) -> EngineSpec:
    """Replaces `auto` by a number, and logs what is offloaded. llama.cpp decides for a file that cannot be read."""
    options: Options = spec.options
    if not uses_gpu(options):
        return spec
    free = free_memory(options)
    draft = None if model is None else draft_shape(options, model)
    layers = -1 if model is None else offloaded_layers(model, options, spec.caches, free, draft)
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


def prepare_spec(spec: EngineSpec, model: ModelShape | None, share: float = 1.0) -> EngineSpec:
    """As it is loaded. `share` of the GPU's free memory is for what `fit` chooses."""
    spec = resolve_speculation(limit_windows(spec, model), model)
    return resolve_options(fit_spec(spec, model, share), model)


def resolve_speculation(spec: EngineSpec, model: ModelShape | None) -> EngineSpec:
    """`auto` drafts with the model's own heads, if the file has them and the library can run them."""
    if model is None or (options := with_heads(spec.options, model, gpu=uses_gpu(spec.options))) is spec.options:
        return spec
    if options.speculation == "mtp" and lib.lacks("mtp"):
        return spec
    return structs.replace(spec, options=options)


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
    params.load_mode, params.load_mtp = load_mode(options), options.speculation == "mtp" or options.uses_draft_model
    placement = TensorPlacement(options)
    placement.apply(params)
    params.progress_callback = callback = lib.llama_progress_callback(_with_huge_pages(report))
    llama_log.clear()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    del callback, placement  # C needs them until here
    if not model:
        raise InvalidRequest(f"{path} cannot be loaded: {llama_log.first_error()}", code="model_unreadable")
    return model


def _with_huge_pages(report: Callable[[float], bool]) -> Callable[[float, Any], bool]:
    """llama.cpp reports its progress first when the memory of the weights is allocated and not yet written."""
    huge_pages: HugePages | None = HugePages()

    def on_progress(fraction: float, _: Any) -> bool:
        nonlocal huge_pages
        if huge_pages is not None:
            huge_pages.request()
            huge_pages = None
        return report(fraction)

    return on_progress


def load_mode(options: Options) -> int:
    """LLAMA_LOAD_MODE_*"""
    if options.direct_io:
        return 4
    return int(options.use_mmap) + 2 * int(options.mlock)


class TensorPlacement:
    """The arrays of `llama_model_params` that say where tensors go. C reads them until the model is loaded."""

    def __init__(self, options: Options) -> None:
        self._split_mode, self._main_gpu = options.split_mode, options.main_gpu
        self._devices = self._named_devices(options.devices) if options.devices is not None else None
        self._check_count(options, len(options.devices or lib.gpu_devices()))
        patterns = dict(options.tensor_overrides)
        if options.n_cpu_moe:
            patterns |= dict.fromkeys(_expert_patterns(options.n_cpu_moe), "CPU")
        self._patterns = [pattern.encode() for pattern in patterns]
        overrides = [
            lib.llama_model_tensor_buft_override(pattern, _buffer_type(device))
            for pattern, device in zip(self._patterns, patterns.values(), strict=True)
        ]
        self._overrides = _array(lib.llama_model_tensor_buft_override, overrides) if overrides else None
        self._split = None
        if options.tensor_split is not None:
            most = lib.llama_max_devices()
            parts = [*options.tensor_split, *[0.0] * most][:most]
            self._split = (ctypes.c_float * most)(*parts)

    def apply(self, params: Any) -> None:
        params.main_gpu = self._main_gpu
        if self._split_mode is not None:
            params.split_mode = _SPLIT_MODES[self._split_mode]
        if self._devices is not None:
            params.devices = ctypes.addressof(self._devices)
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        if self._split is not None:
            params.tensor_split = self._split

    @staticmethod
    def _check_count(options: Options, count: int) -> None:
        """llama.cpp ignores parts that are too many, and names no option in its error about a GPU that is not there.
        Without GPUs these options have no effect."""
        wrong = None
        if count and options.split_mode == "none" and options.main_gpu >= count:
            wrong = f"main_gpu = {options.main_gpu} counts from 0"
        elif count and len(options.tensor_split or ()) > count:
            wrong = f"tensor_split has {len(options.tensor_split or ())} parts"
        if wrong is not None:
            raise InvalidRequest(f"{wrong}, and this model has {count} GPU{'s' * (count > 1)}", code="device_unknown")

    @staticmethod
    def _named_devices(names: Sequence[str]) -> Any:
        handles = [lib.ggml_backend_dev_by_name(name.encode()) for name in names]
        if None in handles:
            known = ", ".join(gpu.name for gpu in lib.gpu_devices()) or "none"
            missing = names[handles.index(None)]
            raise InvalidRequest(f"there is no device {missing!r}; devices: {known}", code="device_unknown")
        return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def _array(kind: Any, values: Sequence[Any]) -> Any:
    """With the empty element that ends it."""
    return (kind * (len(values) + 1))(*values, kind(None, None))


def _expert_patterns(layers: int) -> list[str]:
    blocks = [r"\d+"] if layers < 0 else [str(number) for number in range(layers)]
    return [rf"blk\.{block}\.ffn_(up|down|gate|gate_up)_(ch|)exps" for block in blocks]


def _buffer_type(device: str) -> Any:
    if device.upper() == "CPU":
        return lib.ggml_backend_cpu_buffer_type()
    handle = lib.ggml_backend_dev_by_name(device.encode())
    if not handle:
        known = ", ".join(["CPU", *(gpu.name for gpu in lib.gpu_devices())])
        message = f"tensor_overrides: there is no device {device!r}; devices: {known}"
        raise InvalidRequest(message, code="device_unknown")
    return lib.ggml_backend_dev_buffer_type(handle)


def set_numa(strategy: str | None) -> None:
    """For the whole process, once: llama.cpp ignores later calls."""
    if strategy is not None:
        lib.llama_numa_init(_NUMA_STRATEGIES[strategy])


def create_context(model: Any, name: str, info: CacheInfo, options: Options, outputs: int = 0, sampled: int = 1) -> Any:
    """`outputs` are the rows of a decode that have logits, at most: llama.cpp asserts it, and reserves memory for them.
    0 means all rows. `sampled`: those of a sequence that its graph samples."""
    params = context_parameters(info, options)
    params.n_outputs_max, params.n_outputs_max_per_seq = min(outputs, params.n_batch), sampled
    return _create_context(model, params, f"the cache {name!r}")


def create_head_context(
    model: Any, name: str, info: CacheInfo, options: Options, target: Any, outputs: int, kind: int, *, shares_kv: bool
) -> Any:
    """A context of the layers that draft for the target. It can always be cut, unless it shares the target's KV."""
    params = context_parameters(info, options)
    params.ctx_type, params.ctx_other, params.n_rs_seq = kind, target, 0
    params.swa_full = params.swa_full or not shares_kv
    params.n_batch = max(params.n_batch, outputs)
    params.n_outputs_max = outputs
    return _create_context(model, params, f"the context of the cache {name!r} for drafts")


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
    params.kv_unified, params.no_perf = options.kv_unified, True
    params.swa_full = options.swa_full
    params.n_rs_seq = options.rollback  # 0 for models that cannot do that
    if options.moe_cache_mb:
        if not hasattr(params, "moe_cache_size"):
            message = f"moe_cache_mb needs llama.cpp of build 11549 or later; the library in use is {lib.version}"
            raise InvalidRequest(message, code="option_unsupported")
        params.moe_cache_size = options.moe_cache_mb << 20
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
    number = KV_TYPES[name.lower()][0]
    if number < 0 and (number := _later_type(name.lower())) < 0:
        raise InvalidRequest(
            f"{name!r} is a type of later releases of llama.cpp; the library in use is {lib.version}",
            code="option_unsupported",
        )
    return number


_TYPE_NAMES = (
    "from modelyard import libllama; from ctypes import c_char_p, c_int; names = libllama.declared("
    "libllama.load().raw, 'ggml_type_name', (c_char_p, [c_int])); "
    "[print(n, repr(names(n)), flush=True) for n in range(41, 64)]"
)


def _plain(name: str) -> str:
    return name.lower().replace("fp8", "f8").replace("_", "").removesuffix("fn")


@cache
def _later_type(name: str) -> int:
    """The library's number of a type, by its own name for it; -1: it has none. ggml does not say how many types it has,
    and what is behind the last one may end the process: a child asks."""
    env = os.environ | {"LLAMA_CPP_LIB_PATH": str(lib.folder)}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-P", "-c", _TYPE_NAMES],
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    for line in done.stdout.splitlines():
        number, _, found = line.partition(" ")
        if _plain(found.strip("b'\"")) == _plain(name):
            return int(number)
    return -1


def thread_counts(info: CacheInfo, options: Options) -> tuple[int, int]:
    """For single tokens and for batches. The default is the number of physical cores, and `threads.py` uses as many of
    them as pay: llama.cpp's threads spin while they wait for each other, so one too many costs more than it brings."""
    single = cores.bounded(options.for_cache(info).n_threads or cores.physical(), "n_threads")
    return single, cores.bounded(options.n_threads_batch or single, "n_threads_batch")


def may_vary_threads(info: CacheInfo, options: Options) -> bool:
    """Numbers that a user sets are used as they are, and a GPU computes with any."""
    fixed = options.for_cache(info).n_threads or options.n_threads_batch
    return fixed is None and not lib.llama_supports_gpu_offload()


def max_threads(spec: EngineSpec) -> int:
    """Of all contexts of a model; the one for embeddings has no own settings."""
    return max(max(thread_counts(info, spec.options)) for info in (CacheInfo(1), *spec.caches.values()))
