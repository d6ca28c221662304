"""The llama-server engine's knobs for the optimizer.

llama-server fits an unset number to the machine by itself. The search starts from the default that it then takes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.errors import NotFound
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.engines.llama_server.options import LlamaServerOptions
from modelyard.engines.llama_server.server import combined_cache, find_binary, flash_attention
from modelyard.library import cores
from modelyard.library.model_files import locate_model_file

_BATCH, _UBATCH, _DRAFT_TOKENS = 2048, 512, 16  # llama-server's defaults
_UNQUANTIZED = ("f32", "f16", "bf16")
_FIT_TIMEOUT_S = 120.0


def knobs(spec: EngineSpec, here: AvailableMemory, goal: Goal) -> Iterator[Knob]:
    options: LlamaServerOptions = spec.options
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
    options: LlamaServerOptions = spec.options
    combined = combined_cache(spec.caches)
    threads = combined.n_threads or options.llama_server_n_threads or cores.physical()
    return {
        "llama_server_n_gpu_layers": options.llama_server_n_gpu_layers or "auto",
        "parallel": spec.caches[cache].parallel,
        "llama_server_n_threads": threads,
        "llama_server_n_threads_batch": options.llama_server_n_threads_batch or threads,
        "n_batch": combined.n_batch or _BATCH,
        "n_ubatch": combined.n_ubatch or _UBATCH,
        "llama_server_flash_attn": flash_attention(options, combined) or "auto",
        "type_k": combined.type_k.lower(),
        "type_v": combined.type_v.lower(),
        "llama_server_spec_draft_n_max": options.llama_server_spec_draft_n_max or _DRAFT_TOKENS,
    }


def forbids(setting: Setting) -> str | None:
    values = setting.values
    if values.get("llama_server_flash_attn") == "off" and values.get("type_v", "f16") not in _UNQUANTIZED:
        return "a quantized V cache needs flash attention"
    if int(values.get("n_ubatch", 0)) > int(values.get("n_batch", _BATCH)):
        return "n_ubatch must not exceed n_batch"
    return None


def fitted(spec: EngineSpec) -> dict[str, Value] | None:
    layers = fitted_layers(spec.options, locate_model_file(spec.options.path))
    return None if layers is None else {"llama_server_n_gpu_layers": "all" if layers == "-1" else layers}


def fitted_layers(options: LlamaServerOptions, model: Path) -> str | None:
    """The number of GPU layers that llama-fit-params chooses for this machine; -1: all. None without that program,
    which is expected beside llama-server."""
    try:
        program = Path(find_binary(options.llama_server_binary)).with_name("llama-fit-params")
    except NotFound:
        return None
    if not program.is_file():
        return None
    try:
        done = subprocess.run(  # noqa: S603
            [str(program), "-m", str(model)], capture_output=True, check=False, timeout=_FIT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return None
    words = done.stdout.decode("utf-8", "replace").split() if done.returncode == 0 else []
    return next((value for flag, value in pairwise(words) if flag in ("-ngl", "--n-gpu-layers")), None)
