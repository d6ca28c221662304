"""llama.cpp in process: named, isolated KV caches on one set of weights, no HTTP hop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from modelyard.core.engine import Engine, EngineSpec
from modelyard.engines.llama_cpp import files, library, selftest
from modelyard.engines.llama_cpp.estimate import estimate
from modelyard.engines.llama_cpp.options import CAPABILITIES, LIVE_OVERRIDES, Options

__all__ = [
    "CAPABILITIES",
    "HOLDS_WEIGHTS",
    "LIVE_OVERRIDES",
    "Options",
    "chat_template",
    "create",
    "estimate",
    "kind",
    "own_process",
    "tokenizer_path",
    "verify",
]

HOLDS_WEIGHTS = True


def own_process(options: Mapping[str, Any]) -> bool:
    """On a GPU a step takes half a millisecond: there every wait for the gateway's own work would be felt."""
    layers = options.get("n_gpu_layers", options.get("gguf_n_gpu_layers", -1))
    return library.offloads_to_gpu(layers)


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "text"


def verify() -> None:
    """A library that this machine cannot run dies in a child process, before this one loads it."""
    selftest.require_working_library()


def create(spec: EngineSpec) -> Engine:
    """To be called on the loop that its answers are read on."""
    verify()
    from modelyard.engines.llama_cpp.engine import LlamaCppEngine

    return LlamaCppEngine(spec)


def tokenizer_path(options: Options) -> Path:
    """The file itself: its vocabulary is read without its weights."""
    return files.find(options.path)


def chat_template(options: Options) -> str | None:
    """None: the vocabulary brings the file's own."""
    del options
    return None
