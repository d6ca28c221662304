"""Whether a context computes attention the flash way: the user's word, else what measured better on such a backend.

On a CPU it is on: beside the plain way it reads prompts faster (1.1 times, 1.7 with AMX), decodes short contexts
faster, those of 512 tokens as fast, and needs no memory for the scores of whole micro-batches; at 4,000 tokens
the plain way decodes 1.5 times as fast without AMX (docs/performance.md has the table). One exception: where the CPU
has AVX512-FP16 the pinned release adds half-precision values up in blocks of 128, so heads of 64, 80 or 96 fall
to its loop over single numbers, and decoding at depth to less than half. `setup/llama_cpp_build.py` leaves those
instructions out; a library that was built in another way is recognized (`halves.py`), and the plain way taken.
On a GPU llama.cpp knows best whether all devices of the model can do it: `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import structs

from modelyard.core.engine import EngineSpec
from modelyard.engines.llama_cpp.options import Options

Mode = Literal["on", "off", "auto"]
NUMBERS: dict[Mode, int] = {"on": 1, "off": 0, "auto": -1}  # llama_flash_attn_type


def mode(options: Options, *, gpu: bool) -> Mode:
    """Of a cache's own options; `gpu` where layers may lie on one."""
    asked = options.flash_attn
    if asked is None:
        return "auto" if gpu else "on"
    if isinstance(asked, str):
        return asked
    return "on" if asked else "off"


def settled(spec: EngineSpec, *, gpu: bool, slow: Callable[[], bool]) -> EngineSpec:
    """The spec with flash attention off where nobody asked for it and it is `slow` here. It touches values of 16 bits
    only, and those that are quantized cannot do without it."""
    asked = spec.options.flash_attn is not None or any(info.flash_attn is not None for info in spec.caches.values())
    halves = all(info.type_v.lower() == "f16" for info in spec.caches.values())
    if gpu or asked or not halves or not slow():
        return spec
    return structs.replace(spec, options=spec.options.model_copy(update={"flash_attn": "off"}))
