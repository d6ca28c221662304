"""Whether a context computes attention the flash way: the user's word, else what measured better on such a backend.

On a CPU it is on. Beside the plain way it reads a prompt as fast or faster (1.7 times with AMX), decodes as fast at a
depth of 512 tokens and 1.3 times as fast at 4,000, and needs no memory for the scores of whole micro-batches. One trap:
where the CPU has AVX512-FP16 the pinned release adds half-precision values up in blocks of 128, so heads of 64, 80 or
96 fall to its loop over single numbers, and decoding at depth to less than half. `setup/llama_cpp_build.py` therefore
leaves those instructions out. On a GPU llama.cpp knows best whether all devices of the model can do it: `auto`.
"""

from __future__ import annotations

from typing import Literal

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
