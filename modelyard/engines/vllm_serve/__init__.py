"""A `vllm serve` that runs as a child process: vLLM with its own environment, CUDA libraries and build."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from modelyard.core.engine import Engine, EngineSpec
from modelyard.engines.vllm import chat_template, estimate
from modelyard.engines.vllm import model_folder as _folder
from modelyard.engines.vllm.options import LIVE_OVERRIDES
from modelyard.engines.vllm_serve.engine import CAPABILITIES, VllmServeEngine
from modelyard.engines.vllm_serve.options import VllmServeOptions as Options

__all__ = [
    "CAPABILITIES",
    "COUNTS_LOCALLY",
    "HOLDS_WEIGHTS",
    "LIVE_OVERRIDES",
    "Options",
    "chat_template",
    "create",
    "estimate",
    "kind",
    "tokenizer_path",
]

HOLDS_WEIGHTS = True  # every gateway process would start its own server
COUNTS_LOCALLY = True


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "chat"


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that the engine will run on."""
    return VllmServeEngine(spec)


def tokenizer_path(options: Options) -> Path:
    return _folder.require_folder(options.vllm_tokenizer or options.model_name)
