"""llama.cpp in process: named, isolated KV caches on one set of weights, no HTTP hop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.core.engine import Engine, EngineSpec
from modelyard.engines.llama_cpp.estimate import estimate as estimate
from modelyard.engines.llama_cpp.library import offloads_to_gpu
from modelyard.engines.llama_cpp.options import CAPABILITIES as CAPABILITIES
from modelyard.engines.llama_cpp.options import KV_TYPES as KV_TYPES
from modelyard.engines.llama_cpp.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard.engines.llama_cpp.options import Options as Options
from modelyard.library.model_files import locate_model_file

KIND = "text"
HOLDS_WEIGHTS = True


def own_process(options: Mapping[str, Any]) -> bool:
    """On a GPU a step takes half a millisecond: the gateway's own work in the same process would slow it down. And
    whoever truncates a mapped file kills the process that reads it (SIGBUS)."""
    return bool(options.get("use_mmap")) or offloads_to_gpu(
        options.get("n_gpu_layers", options.get("gguf_n_gpu_layers", -1))
    )


def verify() -> None:
    """Runs the self-test: a library that this machine cannot run dies in a child process."""
    # Imported here: the child runs that module as its main program.
    from modelyard.engines.llama_cpp import selftest

    selftest.require_working_library()


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that reads the engine's answers."""
    verify()
    from modelyard.engines.llama_cpp.engine import LlamaCppEngine

    return LlamaCppEngine(spec)


def tokenizer_path(options: Options) -> Path:
    """The model file: its vocabulary is read without its weights."""
    return locate_model_file(options.path)
