"""What a llama-server will take of memory: as llama.cpp in process does, and its projector and draft model besides."""

from __future__ import annotations

from pathlib import Path

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.engines.llama_cpp import Options as CppOptions
from modelyard.engines.llama_cpp.estimate import estimate_memory, read_model_shape
from modelyard.engines.llama_server.command import shared
from modelyard.engines.llama_server.options import Options
from modelyard.library.model_files import locate_model_file


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    options: Options = spec.options
    cache = shared(spec.caches)
    main = _of(options.path, options.llama_server_n_gpu_layers, options, cache, machine)
    draft = _draft(options, cache, machine)
    seeing = _size(options.llama_server_mmproj_path)
    return MemoryEstimate(
        main.weights + draft.weights + seeing, main.kv + draft.kv, main.compute + draft.compute, main.device
    )


def _draft(options: Options, cache: CacheInfo, machine: AvailableMemory) -> MemoryEstimate:
    path = options.llama_server_draft_model_path
    return _of(path, options.llama_server_spec_draft_ngl, options, cache, machine) if path else MemoryEstimate()


def _of(path: str, layers: str | None, options: Options, cache: CacheInfo, machine: AvailableMemory) -> MemoryEstimate:
    settings = CppOptions(path=path, n_gpu_layers=_layers(layers), flash_attn=options.llama_server_flash_attn or "auto")
    return estimate_memory(read_model_shape(locate_model_file(path)), settings, {"all": cache}, machine)


def _layers(told: str | None) -> int:
    return int(told) if told not in (None, "auto", "all") else -1


def _size(path: str | None) -> int:
    """A projector that is not there is llama-server's to complain of."""
    file = Path(path).expanduser() if path else None
    return file.stat().st_size if file is not None and file.is_file() else 0
