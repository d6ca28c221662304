"""The settings that the optimizer may change for a llama.cpp model, and which of them conflict.

`n_batch` is not one of them: the engine never decodes more than `n_ubatch` tokens at a time. Neither is
`speculation = "ngram"`: `auto` drafts from the text already, and stops if that measures slower.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.engines.llama_cpp import library
from modelyard.engines.llama_cpp.model_shape import read_model_shape
from modelyard.engines.llama_cpp.options import Options, flash_attention_mode, kv_type_bytes
from modelyard.engines.llama_server.knobs import fitted_layers
from modelyard.engines.llama_server.options import LlamaServerOptions
from modelyard.library import cores
from modelyard.library.model_files import locate_model_file

_UNQUANTIZED = ("f32", "f16", "bf16")


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    options: Options = spec.options
    if library.visible_memory(here).gpus:
        yield Knob(name="n_gpu_layers", values=_layers(spec), stage=0, ordered=False)
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8, 16), stage=1, place="cache")
    pace, room = (3, 1) if goal == "memory" else (2, 5)  # the goal's own settings come first: time is limited
    yield Knob(name="n_threads", values=cores.thread_counts(), stage=pace)
    yield Knob(name="n_threads_batch", values=cores.thread_counts(), stage=pace + 1)
    yield Knob(name="n_ubatch", values=(64, 128, 256, 512, 1024, 2048), stage=pace + 2)
    yield Knob(name="flash_attn", values=("on", "off"), stage=room)
    yield Knob(name="type_k", values=("f16", "q8_0", "q4_0"), stage=room + 1, lossy=True)
    yield Knob(name="type_v", values=("f16", "q8_0", "q4_0"), stage=room + 1, lossy=True)
    yield Knob(name="speculation", values=("auto", "off"), stage=7)
    if options.uses_draft_model:
        yield Knob(name="draft_n_max", values=(2, 4, 8, 16), stage=8)


def _layers(spec: EngineSpec) -> tuple[Value, ...]:
    """All that fit, and the quarters; all or none if the number of layers is unknown."""
    try:
        layers = read_model_shape(locate_model_file(spec.options.path)).layers
    except InvalidRequest:
        return ("auto", 0)
    return ("auto", *dict.fromkeys(layers * share // 4 for share in (3, 2, 1, 0)))


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    info: CacheInfo = spec.caches[cache]
    options: Options = spec.options.for_cache(info)
    return {
        "n_gpu_layers": options.n_gpu_layers,
        "parallel": info.parallel,
        "n_threads": options.n_threads or cores.physical(),
        "n_threads_batch": options.n_threads_batch or options.n_threads or cores.physical(),
        "n_ubatch": options.n_ubatch,
        # `auto` counts as on, which it is unless it is slow or unsupported.
        "flash_attn": "off" if flash_attention_mode(options, gpu=False) == "off" else "on",
        "type_k": info.type_k.lower(),
        "type_v": info.type_v.lower(),
        "speculation": options.speculation,
        "draft_n_max": options.max_draft,
    }


def fitted(spec: EngineSpec) -> dict[str, Value] | None:
    """The layers that llama.cpp's own program fits to the GPUs, if a native llama-server is installed."""
    layers = fitted_layers(LlamaServerOptions(path=spec.options.path), locate_model_file(spec.options.path))
    return None if layers is None else {"n_gpu_layers": int(layers)}


def forbids(setting: Setting) -> str | None:
    type_k, type_v = (str(setting.values.get(name, "f16")) for name in ("type_k", "type_v"))
    if setting.values.get("flash_attn") == "off" and type_v not in _UNQUANTIZED:
        return "a quantized type_v needs flash attention"
    if kv_type_bytes(type_v) > kv_type_bytes(type_k):
        return "quantized keys lose more than quantized values: type_k is never the coarser type"
    return None
