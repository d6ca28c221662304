"""What the optimizer may turn of a model that a native llama-server runs, and what cannot go together.

Where a number is not set llama-server fits it to the machine by itself; what it then takes is its default, so that is
what the search starts from.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.engines import cores
from modelyard.engines.llama_server.command import shared
from modelyard.engines.llama_server.fit import fitted_layers
from modelyard.engines.llama_server.options import Options
from modelyard.library.model_files import locate_model_file

_BATCH, _UBATCH = 2048, 512  # llama-server's own
_FULL = ("f32", "f16", "bf16")


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    options: Options = spec.options
    if here.gpus:
        yield Knob(name="llama_server_n_gpu_layers", values=("auto", "all", "0"), stage=0)
    if goal == "batch":
        yield Knob(name="parallel", values=(1, 2, 4, 8, 16), stage=1, place="cache")
    yield Knob(name="llama_server_n_threads", values=cores.thread_counts(), stage=2)
    yield Knob(name="llama_server_n_threads_batch", values=cores.thread_counts(), stage=3)
    yield Knob(name="n_batch", values=(512, 1024, 2048, 4096), stage=4, place="cache")
    yield Knob(name="n_ubatch", values=(128, 256, 512, 1024), stage=4, place="cache")
    yield Knob(name="llama_server_flash_attn", values=("auto", "on", "off"), stage=5)
    yield Knob(name="type_k", values=("f16", "q8_0", "q4_0"), stage=6, lossy=True)
    yield Knob(name="type_v", values=("f16", "q8_0", "q4_0"), stage=6, lossy=True)
    if options.llama_server_draft_model_path:
        yield Knob(name="llama_server_spec_draft_n_max", values=(2, 4, 8, 16), stage=7)


def current(spec: EngineSpec, cache: str) -> dict[str, Value]:
    options: Options = spec.options
    own, all_of_it = spec.caches[cache], shared(spec.caches)
    threads = all_of_it.n_threads or options.llama_server_n_threads or cores.physical()
    return {
        "llama_server_n_gpu_layers": options.llama_server_n_gpu_layers or "auto",
        "parallel": own.parallel,
        "llama_server_n_threads": threads,
        "llama_server_n_threads_batch": options.llama_server_n_threads_batch or threads,
        "n_batch": all_of_it.n_batch or _BATCH,
        "n_ubatch": all_of_it.n_ubatch or _UBATCH,
        "llama_server_flash_attn": _flash(options, all_of_it.flash_attn),
        "type_k": all_of_it.type_k.lower(),
        "type_v": all_of_it.type_v.lower(),
        "llama_server_spec_draft_n_max": options.llama_server_spec_draft_n_max or 16,
    }


def _flash(options: Options, own: bool | None) -> str:
    if own is not None:
        return "on" if own else "off"
    return options.llama_server_flash_attn or "auto"


def fitted(spec: EngineSpec) -> dict[str, Value] | None:
    """By llama.cpp's own program; llama-server does the same by itself where nothing is set."""
    told = fitted_layers(spec.options, locate_model_file(spec.options.path))
    return None if told is None else {"llama_server_n_gpu_layers": "all" if told == "-1" else told}


def forbids(setting: Setting) -> str | None:
    told = setting.values
    if told.get("llama_server_flash_attn") == "off" and told.get("type_v", "f16") not in _FULL:
        return "rounded values in the cache need flash attention"
    if int(told.get("n_ubatch", 0)) > int(told.get("n_batch", _BATCH)):
        return "no more is computed at a time than is handed over"
    return None
