"""vLLM in process: continuous batching on GPUs, token ids in and out, by default in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from modelyard.core.engine import Capabilities, Engine, EngineSpec
from modelyard.core.errors import ModelyardError
from modelyard.engines.vllm import async_llm, model_folder
from modelyard.engines.vllm.errors import with_cause
from modelyard.engines.vllm.estimate import estimate
from modelyard.engines.vllm.options import LIVE_OVERRIDES
from modelyard.engines.vllm.options import VllmOptions as Options
from modelyard.engines.vllm.request import IGNORED

__all__ = [
    "CAPABILITIES",
    "HOLDS_WEIGHTS",
    "LIVE_OVERRIDES",
    "OWN_PROCESS",
    "Options",
    "chat_template",
    "create",
    "estimate",
    "explain",
    "kind",
    "tokenizer_path",
]

HOLDS_WEIGHTS = OWN_PROCESS = True
CAPABILITIES = Capabilities(modalities=("text", "image"), structured=True, logprobs=True, lora=True, ignored=IGNORED)


def kind(options: Options) -> Literal["text", "chat"]:
    del options
    return "text"


def create(spec: EngineSpec) -> Engine:
    """To be called on the loop that its answers are read on."""
    async_llm.check_installed()
    from modelyard.engines.vllm.engine import VllmEngine

    return VllmEngine(spec)


def tokenizer_path(options: Options) -> Path:
    return model_folder.require_folder(options.vllm_tokenizer or options.model_name)


def chat_template(options: Options) -> str | None:
    """None: it lies in the folder, where everybody looks."""
    del options
    return None


def explain(error: ModelyardError, lines: Sequence[str]) -> ModelyardError:
    """vLLM's own words are often only that a process of its own has failed: why stands in what that one wrote."""
    from modelyard.engines.vllm_serve.log_parser import failure_reason  # which itself builds on this package

    return with_cause(error, failure_reason(lines))
