"""Whether the built library adds half-precision values up with AVX512-FP16, told by the instructions in its file.

The pinned release then works in blocks of 128 and takes what is left over one by one, so attention over heads of other
sizes is slow in the flash way (`attention.py`). Nothing that the library says of itself tells it, and a measurement
would be another one on every busy day, which saved KV could not be restored after.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_BLOCK = 128
# EVEX in map 6 with a vector of 512 bits and no wide operand, then VFMADD132PH, VFMADD213PH or VFMADD231PH.
_SECOND, _THIRD, _FOURTH = (
    b"".join(b"\\x%02x" % byte for byte in range(256) if byte & mask == bits)
    for mask, bits in ((0x0F, 0x06), (0x87, 0x05), (0x60, 0x40))
)
_MULTIPLY_ADD = re.compile(rb"\x62[%b][%b][%b][\x98\xa8\xb8]" % (_SECOND, _THIRD, _FOURTH), re.DOTALL)
_ENOUGH = 2  # such bytes can stand in a table by chance, once


def slow_with(head: int, folder: Path) -> bool:
    """Heads of this size, in the library of this folder."""
    return head % _BLOCK != 0 and adds_up_halves(folder)


@cache
def adds_up_halves(folder: Path) -> bool:
    return any(count(file.read_bytes()) >= _ENOUGH for file in sorted(folder.glob("*ggml-cpu*.so")))


def count(code: bytes) -> int:
    return sum(1 for _ in _MULTIPLY_ADD.finditer(code))
