"""The quality loss of a quantized KV cache with llama-server, measured in process on the same file.

A server reports the log probabilities of single tokens only. The library is another build, but quantizes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.knobs import Loss
from modelyard.engines import llama_cpp
from modelyard.engines.llama_server.server import combined_cache


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    llama_cpp.verify()
    from modelyard.engines.llama_cpp.loss import loss as llama_cpp_loss

    return llama_cpp_loss(_in_process(spec), _in_process(reference), ids)


def _in_process(spec: EngineSpec) -> EngineSpec:
    cache = combined_cache(spec.caches)
    options = llama_cpp.Options(path=spec.options.path, n_threads=spec.options.llama_server_n_threads)
    return EngineSpec(spec.model, options, {"main": CacheInfo(cache.window, 1, cache.type_k, cache.type_v)})
