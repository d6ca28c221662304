"""The memory of a CTranslate2 model, estimated from the header of its file before it is loaded.

weights   the matrices in the number format of the computation
KV        layers × window × parallel × keys and values of every query head: CTranslate2 copies what heads share
compute   the attention of one layer while a prompt is read: every token to every other
"""

from __future__ import annotations

from math import prod

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.engines.ct2.model_folder import Ct2Variable, find_folder, read_variables
from modelyard.engines.ct2.options import Ct2Options

_BYTES = {"int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    options: Ct2Options = spec.options
    variables = read_variables(find_folder(options.path))
    on_gpu = options.device != "cpu" and bool(machine.gpus)
    activation = _activation_bytes(options.compute_type, on_gpu=on_gpu)
    tokens = sum(info.window * info.parallel for info in spec.caches.values())
    window = max((info.window for info in spec.caches.values()), default=0)
    # The input width of each layer's output projection is the width of all its query heads.
    query_widths = [v.shape[-1] for name, v in variables.items() if name.endswith("self_attention/linear_1/weight")]
    # The file has the number of heads as a value, not as a shape; a head is usually 64 wide.
    heads = max((width // 64 for width in query_widths), default=0)
    matrices = [v.shape[0] for name, v in variables.items() if len(v.shape) == 2 and "/layer_" in name]
    return MemoryEstimate(
        sum(_loaded_bytes(variable, options.compute_type) for variable in variables.values()),
        2 * activation * tokens * sum(query_widths),
        activation * (window * window * heads + window * max(matrices, default=0)),
        "gpu" if on_gpu else "cpu",
    )


def _loaded_bytes(variable: Ct2Variable, compute_type: str) -> int:
    """Matrices are converted to the format of the computation; the rest is small."""
    size = _BYTES.get(compute_type.partition("_")[0])
    if size is None or len(variable.shape) < 2:
        return variable.bytes
    return prod(variable.shape) * size


def _activation_bytes(compute_type: str, *, on_gpu: bool) -> int:
    """Bytes per number between the matrices; plain int8 leaves the format to the device."""
    name = compute_type.rpartition("_")[2]
    if name in ("float16", "bfloat16", "float32"):
        return _BYTES[name]
    return 2 if on_gpu else 4
