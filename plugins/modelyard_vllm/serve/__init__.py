"""A `vllm serve` that runs as a child process: vLLM with its own environment, CUDA libraries and build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import modelyard_vllm as vllm
from modelyard.core.engine import EnginePlugin, EngineSpec, Media
from modelyard.engines import option_faults
from modelyard.engines.option_faults import OptionFault, require_template, try_call, try_options
from modelyard_vllm import estimate as estimate
from modelyard_vllm.model_folder import find_folder, folder_faults, require_folder
from modelyard_vllm.options import KNOWN_NAMES as KNOWN_NAMES
from modelyard_vllm.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard_vllm.options import LOCAL_OPTIONS as LOCAL_OPTIONS
from modelyard_vllm.serve.engine import CAPABILITIES as CAPABILITIES
from modelyard_vllm.serve.engine import VllmServeEngine
from modelyard_vllm.serve.options import VllmServeOptions as Options
from modelyard_vllm.serve.server import find_binary, interpreter_of

create = VllmServeEngine


def tokenizer_path(options: Options) -> Path:
    return require_folder(options.vllm_tokenizer or options.model_name)


def count_media(options: Options, media: Sequence[Media], python: str | None = None) -> list[int]:
    """As with vLLM in process, by the interpreter beside the program."""
    return vllm.count_media(options, media, python or interpreter_of(find_binary(options.vllm_serve_binary)))


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    options: Options = spec.options
    yield from try_call("vllm_serve_binary", lambda: find_binary(options.vllm_serve_binary))
    yield from try_options(
        ("chat_template", require_template, options.chat_template),
        *(("vllm_serve_library_path", option_faults.require_folder, path) for path in options.vllm_serve_library_path),
    )
    yield from folder_faults(options)


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    kind="chat",
    capabilities=CAPABILITIES,
    tokenizer_path=tokenizer_path,
    counts_locally=True,
    count_media=count_media,
    live_overrides=LIVE_OVERRIDES,
    local_options=LOCAL_OPTIONS,
    known_names=KNOWN_NAMES,
    estimate=estimate,
    faults=faults,
    takes_folder=lambda _: 0 if vllm.is_in_process() else 1,
    library_options=vllm.library_options,
    find_model=find_folder,
    title="vllm serve",
    find_program=find_binary,
    tuning=__name__,
)
