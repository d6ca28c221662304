"""A `vllm serve` that runs as a child process: vLLM with its own environment, CUDA libraries and build."""

from __future__ import annotations

from pathlib import Path

from modelyard.engines.vllm import estimate as estimate
from modelyard.engines.vllm.model_folder import require_folder
from modelyard.engines.vllm.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard.engines.vllm.options import LOCAL_OPTIONS as LOCAL_OPTIONS
from modelyard.engines.vllm_serve.engine import CAPABILITIES as CAPABILITIES
from modelyard.engines.vllm_serve.engine import VllmServeEngine
from modelyard.engines.vllm_serve.options import VllmServeOptions as Options

KIND = "chat"
create = VllmServeEngine
HOLDS_WEIGHTS = True  # every gateway process would start its own server
COUNTS_LOCALLY = True


def tokenizer_path(options: Options) -> Path:
    return require_folder(options.vllm_tokenizer or options.model_name)
