"""What a CTranslate2 model will take of memory, worked out from the head of its file before anything is loaded.

weights   the file, as large as the number format that it is computed in makes it
KV        layers × window × parallel × keys and values: of every query head, for CTranslate2 copies what heads share
compute   the largest moment of reading a prompt: the attention of one layer, every token to every other
"""

from __future__ import annotations

from math import prod

from modelyard.core.engine import AvailableMemory, EngineSpec, MemoryEstimate
from modelyard.engines.ct2 import model_folder
from modelyard.engines.ct2.model_folder import Ct2Variable
from modelyard.engines.ct2.options import Ct2Options

_BYTES = {"int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}


def estimate(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    options: Ct2Options = spec.options
    found = model_folder.read_variables(model_folder.find_folder(options.path))
    on_gpu = options.device != "cpu" and bool(machine.gpus)
    number = _number(options.compute_type, on_gpu=on_gpu)
    cells = sum(info.window * info.parallel for info in spec.caches.values())
    longest = max((info.window for info in spec.caches.values()), default=0)
    return MemoryEstimate(
        sum(_weight(variable, options.compute_type) for variable in found.values()),
        2 * number * cells * sum(_attention_widths(found)),
        number * (longest * longest * _heads(found) + longest * _widest(found)),
        "gpu" if on_gpu else "cpu",
    )


def _weight(variable: Ct2Variable, compute_type: str) -> int:
    """Matrices are brought to the format that is computed in; the rest is small."""
    wanted = _BYTES.get(compute_type.partition("_")[0])
    if wanted is None or len(variable.shape) < 2:
        return variable.bytes
    return prod(variable.shape) * wanted


def _number(compute_type: str, *, on_gpu: bool) -> int:
    """Bytes of one number between the matrices: int8 of itself leaves it to the device."""
    named = compute_type.rpartition("_")[2]
    if named in ("float16", "bfloat16", "float32"):
        return _BYTES[named]
    return 2 if on_gpu else 4


def _attention_widths(found: dict[str, Ct2Variable]) -> list[int]:
    """Of each layer: what the queries of all heads are wide, which is what goes into its output projection."""
    return [v.shape[-1] for name, v in found.items() if name.endswith("self_attention/linear_1/weight")]


def _heads(found: dict[str, Ct2Variable]) -> int:
    """A file tells the number of heads as a value, not as a shape: 64 wide each is the rule."""
    return max((width // 64 for width in _attention_widths(found)), default=0)


def _widest(found: dict[str, Ct2Variable]) -> int:
    matrices = [v.shape[0] for name, v in found.items() if len(v.shape) == 2 and "/layer_" in name]
    return max(matrices, default=0)
