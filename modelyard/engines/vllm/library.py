"""The vLLM library itself: whether it is here, how it is imported, and the few names of it that this engine uses."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from modelyard.plugins import MissingLibrary

# Read by vLLM when it is imported; whatever the environment says already goes before.
DEFAULTS = {
    # On some new GPUs flashinfer's sampler is compiled for an architecture that an older toolkit does not know.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # A copy of a process with threads may wait for ever for a lock that one of them held.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Nothing is told to anybody outside this machine.
    "VLLM_NO_USAGE_STATS": "1",
}
_ABSENT = (
    "vllm needs the Python package 'vllm', which is not in this environment: install it with pip install "
    "'modelyard[vllm]', or name the interpreter of an environment that has it with python = \"…/bin/python\" in the "
    "model's section"
)


class Library(Struct, frozen=True):
    engine: Any  # AsyncLLM
    engine_arguments: Any  # AsyncEngineArgs
    sampling: Any  # SamplingParams
    deltas: Any  # RequestOutputKind.DELTA
    tokens: Any  # tokens_input: a prompt that is nothing but token ids
    prompt: Any  # TokensPrompt: one with pictures, which vLLM's processor has to look at first
    form: Any  # StructuredOutputsParams
    adapter: Any  # LoRARequest
    dead: type[Exception]  # EngineDeadError
    refused: tuple[type[Exception], ...]  # what is wrong with a request, not with vLLM


def check() -> None:
    if find_spec("vllm") is None:
        raise MissingLibrary(_ABSENT)


def load() -> Library:
    """Takes many seconds the first time."""
    check()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    top, sampling = import_module("vllm"), import_module("vllm.sampling_params")
    return Library(
        engine=import_module("vllm.v1.engine.async_llm").AsyncLLM,
        engine_arguments=top.AsyncEngineArgs,
        sampling=top.SamplingParams,
        deltas=sampling.RequestOutputKind.DELTA,
        tokens=import_module("vllm.inputs").tokens_input,
        prompt=top.TokensPrompt,
        form=sampling.StructuredOutputsParams,
        adapter=import_module("vllm.lora.request").LoRARequest,
        dead=import_module("vllm.v1.engine.exceptions").EngineDeadError,
        refused=(import_module("vllm.exceptions").VLLMClientError, ValueError),
    )
