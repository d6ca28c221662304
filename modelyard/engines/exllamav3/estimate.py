"""What an EXL3 model will take of a GPU's memory, worked out from its folder before anything is loaded.

weights   all tensors, but for the embedding, which stays in RAM
KV        tokens of all caches × layers × keys and values, by their bits; quantized ones with a scale for 32 numbers
compute   the widest moment of reading a chunk, a row of logits for each job, and what CUDA takes for itself
"""

from __future__ import annotations

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.engines.exllamav3 import model_folder
from modelyard.engines.exllamav3.arguments import cache_tokens, quant_of
from modelyard.engines.exllamav3.model_folder import ExllamaModelInfo
from modelyard.engines.exllamav3.options import CacheBits, ExllamaOptions

_CONTEXT = 512 << 20  # a CUDA context with the kernels and workspaces of torch and ExLlamaV3


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    del machine  # it runs on GPUs only
    options: ExllamaOptions = spec.options
    model = model_folder.read_model_info(model_folder.find_folder(options.path))
    tokens = cache_tokens(options, spec.caches)
    kv = sum(
        tokens[name] * model.layers * _token(model, quant_of(name, info, options)) for name, info in spec.caches.items()
    )
    return MemoryEstimate(model.weights, int(kv), _compute(model, options, _most(spec)), "gpu")


def _token(model: ExllamaModelInfo, quant: CacheBits | None) -> float:
    """Bytes of one token in one layer."""
    bits = 32.0 if quant is None else sum(quant) + 2 * 16 / 32
    return model.kv_width * bits / 8


def _compute(model: ExllamaModelInfo, options: ExllamaOptions, jobs: int) -> int:
    moment = 2 * options.exllama_max_chunk_size * (6 * model.width + 3 * model.inner)
    return moment + 6 * model.vocab * jobs + _CONTEXT


def _most(spec: EngineSpec) -> int:
    """Jobs in one step: caches take turns."""
    return max((info.parallel for info in spec.caches.values()), default=1)
