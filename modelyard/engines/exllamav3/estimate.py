"""The GPU memory of an EXL3 model, estimated from its folder before it is loaded.

weights   all tensors except the embedding, which stays in RAM
KV        tokens of all caches × layers × bits of keys and values; quantized ones have a 16-bit scale per 32 numbers
compute   the activations of one prompt chunk, a row of logits per job, and the CUDA context
"""

from __future__ import annotations

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.engines.exllamav3.arguments import cache_bits, cache_tokens
from modelyard.engines.exllamav3.model_folder import find_folder, read_model_info
from modelyard.engines.exllamav3.options import ExllamaOptions

_CUDA_CONTEXT = 512 << 20  # with the kernels and workspaces of torch and ExLlamaV3


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    del machine  # it runs on GPUs only
    options: ExllamaOptions = spec.options
    model = read_model_info(find_folder(options.path))
    tokens = cache_tokens(options, spec.caches)
    kv_bits = 0
    for name, info in spec.caches.items():
        bits = cache_bits(name, info, options)
        kv_bits += tokens[name] * model.layers * model.kv_width * (32 if bits is None else sum(bits) + 1)
    jobs_per_step = max((info.parallel for info in spec.caches.values()), default=1)  # caches take turns
    activations = 2 * options.exllama_max_chunk_size * (6 * model.hidden_size + 3 * model.intermediate_size)
    logits = 6 * model.n_vocab * jobs_per_step
    return MemoryEstimate(model.weights, kv_bits // 8, activations + logits + _CUDA_CONTEXT, "gpu")
