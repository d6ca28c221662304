"""A native llama-server, started and watched by us: GGUF models with vision, speculation and a build of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from modelyard.core.engine import Engine, EngineSpec
from modelyard.engines.llama_cpp import selftest
from modelyard.engines.llama_server.engine import CAPABILITIES, LlamaServer
from modelyard.engines.llama_server.estimate import estimate
from modelyard.engines.llama_server.options import LIVE_OVERRIDES, Options
from modelyard.library.model_files import locate_model_file

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

HOLDS_WEIGHTS = True  # every gateway process would start one of its own
COUNTS_LOCALLY = True


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "chat"


def create(spec: EngineSpec) -> Engine:
    """To be called on the loop that its answers are read on."""
    return LlamaServer(spec)


def tokenizer_path(options: Options) -> Path:
    """The model's own file: what is counted is counted by its vocabulary, for which the llama.cpp library must work."""
    selftest.require_working_library()
    return locate_model_file(options.path)


def chat_template(options: Options) -> str | None:
    """None: the vocabulary brings the file's own, which is also what llama-server uses."""
    del options
    return None
