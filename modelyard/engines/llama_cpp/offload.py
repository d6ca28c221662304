"""Which tensors of a model go to the GPUs, and what is given up for one that is larger than their memory. Pure.

n_gpu_layers       the last layers; the output counts as one
n_cpu_moe          the experts of the first layers stay in RAM: they are most of the weights of such a model, and a
                   token uses few of them
tensor_overrides   single tensors, by their names
fit                all of that by the estimate: the first of these that fits
                       1. all layers on the GPU
                       2. the experts of as few layers as possible in RAM
                       3. both again, with KV of q8_0
                       4. as many layers as possible, the rest in RAM
                       5. that with half the window, and so on, down to `MIN_WINDOW`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.engines.llama_cpp.estimate import (
    EXPERTS,
    draft_shape,
    estimate_memory,
    layers_that_fit,
    memory_by_device,
    with_heads,
)
from modelyard.engines.llama_cpp.library import visible_memory
from modelyard.engines.llama_cpp.model_shape import ModelShape, read_model_shape
from modelyard.engines.llama_cpp.options import Options, flash_attention_mode
from modelyard.library.model_files import locate_model_file

MIN_WINDOW = 4096
_SMALL_TYPE = "q8_0"
_LARGE_TYPES = ("f32", "f16", "bf16")


class FitChoice(Struct, frozen=True):
    """Options and caches that fit, and what differs from the configured ones, as a clause for people."""

    options: Options
    caches: Mapping[str, CacheInfo]
    changes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return ", ".join(self.changes) or "as configured"


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    model = read_model_shape(locate_model_file(spec.options.path))
    gpu = bool(machine.gpus) and spec.options.n_gpu_layers != 0
    spec = structs.replace(spec, options=with_heads(spec.options, model, gpu=gpu))
    draft = draft_shape(spec.options, model)
    memory = limit_memory(spec.options, visible_memory(machine))
    choice = FitChoice(spec.options, spec.caches)
    if spec.options.fit:
        choice = fit_to_memory(model, spec.options, spec.caches, memory, draft)
    return estimate_memory(model, choice.options, choice.caches, memory, draft)


def limit_memory(options: Options, free: AvailableMemory) -> AvailableMemory:
    """What the model may take of each GPU: `gpu_memory_mb` limits it, `split_mode = "none"` leaves one GPU, and with a
    `tensor_split` the GPU that is full first limits the others."""
    gpus = dict(free.gpus)
    if options.split_mode == "none":
        gpus = dict(list(gpus.items())[options.main_gpu : options.main_gpu + 1])
    if options.gpu_memory_mb is not None:
        gpus = {gpu: min(size, options.gpu_memory_mb << 20) for gpu, size in gpus.items()}
    if options.tensor_split is not None and options.split_mode != "none":
        gpus = _split_memory(gpus, options.tensor_split)
    return structs.replace(free, gpus=gpus)


def _split_memory(gpus: Mapping[str, int], parts: Sequence[float]) -> dict[str, int]:
    """Of each GPU that has a part so much that all of them are filled in proportion."""
    shares = {gpu: part for gpu, part in zip(gpus, parts, strict=False) if part > 0}
    whole = min((gpus[gpu] / share for gpu, share in shares.items()), default=0.0)
    return {gpu: int(whole * share) for gpu, share in shares.items()}


def fit_to_memory(
    model: ModelShape,
    options: Options,
    caches: Mapping[str, CacheInfo],
    machine: AvailableMemory,
    draft: ModelShape | None = None,
) -> FitChoice:
    """The first choice that fits; the last one if none does: loading then explains what is missing."""
    found = FitChoice(options, caches)
    for found in _choices(model, FitChoice(options, caches), machine, draft):
        if _fits(model, found, machine, draft):
            break
    return found


def _choices(
    model: ModelShape, start: FitChoice, machine: AvailableMemory, draft: ModelShape | None
) -> Iterator[FitChoice]:
    while True:
        windows = {info.window for info in start.caches.values()}
        small = _with_small_kv(start)
        for choice in (start, small) if small is not None else (start,):
            if machine.gpus:
                whole = _change(choice, {"n_gpu_layers": -1})
                yield whole
                if (experts := _layers_with_experts(model)) and not start.options.n_cpu_moe:
                    yield from _with_experts_in_ram(model, whole, experts, machine, draft)
            else:
                yield choice
        if machine.gpus:
            choice = small or start
            if (experts := _layers_with_experts(model)) and not start.options.n_cpu_moe:
                choice = _change(choice, {"n_cpu_moe": experts}, "all experts in RAM")
            free = tuple(machine.gpus.values())
            layers = layers_that_fit(model, choice.options, choice.caches, free, draft)
            yield _change(choice, {"n_gpu_layers": layers}, f"{layers} of {model.layers + 1} layers on the GPU")
        if max(windows, default=0) <= MIN_WINDOW:
            return
        start = _with_half_window(start)


def _with_experts_in_ram(
    model: ModelShape, whole: FitChoice, experts: int, machine: AvailableMemory, draft: ModelShape | None
) -> Iterator[FitChoice]:
    """The fewest layers whose experts must stay in RAM; more only make it slower."""

    def choice(count: int) -> FitChoice:
        return _change(whole, {"n_cpu_moe": count}, f"the experts of {count} of {experts} layers in RAM")

    low, high = 1, experts
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_gpu(model, choice(middle), machine, draft) else (middle + 1, high)
    yield choice(low)


def _change(choice: FitChoice, values: dict[str, Any], change: str = "") -> FitChoice:
    changes = (*choice.changes, change) if change else choice.changes
    return structs.replace(choice, options=choice.options.model_copy(update=values), changes=changes)


def _with_small_kv(choice: FitChoice) -> FitChoice | None:
    if not any(info.type_k.lower() in _LARGE_TYPES for info in choice.caches.values()):
        return None
    caches = {name: _small_kv(info, choice.options) for name, info in choice.caches.items()}
    return structs.replace(choice, caches=caches, changes=(*choice.changes, f"KV of {_SMALL_TYPE}"))


def _small_kv(info: CacheInfo, options: Options) -> CacheInfo:
    """Quantized values need flash attention."""
    has_flash_attention = flash_attention_mode(options.for_cache(info), gpu=False) != "off"
    type_k = _SMALL_TYPE if info.type_k.lower() in _LARGE_TYPES else info.type_k
    type_v = _SMALL_TYPE if info.type_v.lower() in _LARGE_TYPES and has_flash_attention else info.type_v
    return structs.replace(info, type_k=type_k, type_v=type_v)


def _with_half_window(choice: FitChoice) -> FitChoice:
    caches = {
        name: structs.replace(info, window=min(info.window, max(MIN_WINDOW, info.window // 2)))
        for name, info in choice.caches.items()
    }
    changes = tuple(change for change in choice.changes if not change.startswith("windows"))
    largest = max(info.window for info in caches.values())
    return structs.replace(choice, caches=caches, changes=(f"windows of at most {largest} tokens", *changes))


def _layers_with_experts(model: ModelShape) -> int:
    """Up to the last layer that has experts."""
    found = (EXPERTS.match(tensor.name) for _, tensors in model.files for tensor in tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _fits_gpu(model: ModelShape, choice: FitChoice, machine: AvailableMemory, draft: ModelShape | None) -> bool:
    free = tuple(machine.gpus.values())
    wanted = choice.options.n_gpu_layers
    most = layers_that_fit(model, choice.options, choice.caches, free, draft)
    return most > model.layers if wanted in (-1, "auto") else most >= int(wanted)


def _fits(model: ModelShape, choice: FitChoice, machine: AvailableMemory, draft: ModelShape | None) -> bool:
    if machine.gpus and not _fits_gpu(model, choice, machine, draft):
        return False
    memory = estimate_memory(model, choice.options, choice.caches, machine, draft)
    return memory_by_device(memory)[1] <= machine.ram_free
