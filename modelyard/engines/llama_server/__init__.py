"""A llama-server that runs as a child process: GGUF models, vision, speculative decoding, any llama.cpp build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from modelyard.core.engine import AvailableMemory, EnginePlugin, EngineSpec, Media, MemoryEstimate
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import Options as LlamaCppOptions
from modelyard.engines.llama_cpp import prepare as prepare  # the vocabulary is read through the library
from modelyard.engines.llama_cpp import selftest
from modelyard.engines.llama_cpp.estimate import estimate_memory
from modelyard.engines.llama_cpp.model_shape import read_model_shape
from modelyard.engines.llama_server.engine import CAPABILITIES as CAPABILITIES
from modelyard.engines.llama_server.engine import LlamaServerEngine, model_capabilities
from modelyard.engines.llama_server.options import KV_TYPES as KV_TYPES
from modelyard.engines.llama_server.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard.engines.llama_server.options import LlamaServerOptions as Options
from modelyard.engines.llama_server.server import combined_cache, find_binary
from modelyard.engines.option_faults import (
    OptionFault,
    require_file,
    require_folder,
    require_template,
    try_call,
    try_options,
)
from modelyard.library.gguf import require_complete
from modelyard.library.model_files import locate_model_file

create = LlamaServerEngine
capabilities = model_capabilities


def tokenizer_path(options: Options) -> Path:
    """The model file: its vocabulary counts tokens, which needs the llama.cpp library."""
    selftest.require_working_library()
    return locate_model_file(options.path)


def count_media(options: Options, media: Sequence[Media], python: str | None = None) -> list[int]:
    """The tokens of each image, as llama.cpp in process counts them."""
    del python
    counting = LlamaCppOptions(
        path=options.path,
        mmproj=options.llama_server_mmproj_path or False,
        image_max_tokens=options.llama_server_image_max_tokens,
    )
    return llama_cpp.count_media(counting, media)


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    """The estimate of llama.cpp in process, plus the projector and the draft model. The layers on the GPU are known
    only if the options say them: with auto llama-server decides."""
    options: Options = spec.options
    draft_path, projector = options.llama_server_draft_model_path, options.llama_server_mmproj_path
    main = _estimate_file(options.path, options.llama_server_n_gpu_layers, spec, machine)
    draft = MemoryEstimate()
    if draft_path:
        draft = _estimate_file(draft_path, options.llama_server_spec_draft_ngl, spec, machine)
    weights = main.weights + draft.weights
    # llama-server reports a missing projector itself.
    if projector and (file := Path(projector).expanduser()).is_file():
        weights += file.stat().st_size
    page_cache = main.page_cache + draft.page_cache
    is_known = options.llama_server_n_gpu_layers not in (None, "auto")
    return MemoryEstimate(
        weights,
        main.kv + draft.kv,
        main.compute + draft.compute,
        main.device,
        page_cache,
        main.gpu_layers if is_known else 0,
        main.layers if is_known else 0,
    )


def _estimate_file(path: str, layers: str | None, spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    options = LlamaCppOptions(
        path=path,
        mmproj=False,
        n_gpu_layers=-1 if layers in (None, "auto", "all") else int(layers),
        flash_attn=spec.options.llama_server_flash_attn or "auto",
    )
    shape = read_model_shape(locate_model_file(path))
    return estimate_memory(shape, options, {"all": combined_cache(spec.caches)}, machine)


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    options: Options = spec.options
    yield from try_call("llama_server_binary", lambda: find_binary(options.llama_server_binary))
    yield from try_options(
        ("path", lambda path: require_complete(locate_model_file(path)), options.path),
        ("llama_server_draft_model_path", locate_model_file, options.llama_server_draft_model_path),
        ("llama_server_mmproj_path", require_file, options.llama_server_mmproj_path),
        ("chat_template", require_template, options.chat_template),
        *(("llama_server_library_path", require_folder, folder) for folder in options.llama_server_library_path),
    )


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    kind="chat",
    capabilities=CAPABILITIES,
    capabilities_of=capabilities,
    tokenizer_path=tokenizer_path,
    counts_locally=True,
    marks_media=True,  # where tokens are counted here
    count_media=count_media,
    live_overrides=LIVE_OVERRIDES,
    kv_types=KV_TYPES,
    prepare=prepare,
    estimate=estimate,
    faults=faults,
    title="llama-server",
    find_program=find_binary,
    tuning=__name__,
    has_fitted=True,
)
