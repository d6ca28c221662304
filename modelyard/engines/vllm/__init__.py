"""vLLM in process: continuous batching on GPUs, token ids in and out, by default in a separate process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from modelyard.core.engine import Capabilities, Engine, EnginePlugin, EngineSpec, Media
from modelyard.core.errors import ModelyardError
from modelyard.engines.option_faults import OptionFault, try_call
from modelyard.engines.vllm.errors import failure_reason, with_cause
from modelyard.engines.vllm.model_folder import estimate as estimate
from modelyard.engines.vllm.model_folder import folder_faults, require_folder
from modelyard.engines.vllm.options import KNOWN_NAMES as KNOWN_NAMES
from modelyard.engines.vllm.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard.engines.vllm.options import LOCAL_OPTIONS as LOCAL_OPTIONS
from modelyard.engines.vllm.options import VllmOptions as Options
from modelyard.engines.vllm.request import IGNORED

CAPABILITIES = Capabilities(modalities=("text", "image"), structured=True, logprobs=True, lora=True, ignored=IGNORED)


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that reads the engine's generations."""
    from modelyard.engines.vllm.async_llm import check_installed
    from modelyard.engines.vllm.engine import VllmEngine

    check_installed()
    return VllmEngine(spec)


def tokenizer_path(options: Options) -> Path:
    return require_folder(options.vllm_tokenizer or options.model_name)


def count_media(options: Options, media: Sequence[Media], python: str | None = None) -> list[int]:
    """What each image adds to a prompt with its placeholder, by the processor of the model's folder."""
    from modelyard.engines.vllm.image_tokens import count_image_tokens

    return count_image_tokens(options, media, python)


def explain(error: ModelyardError, lines: Sequence[str]) -> ModelyardError:
    """vLLM's message often says only that one of its processes failed; the cause is in that process's output."""
    return with_cause(error, failure_reason(lines))


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    from modelyard.engines.vllm.async_llm import check_installed

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
    tuning=__name__,
)
