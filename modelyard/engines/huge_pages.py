"""Huge pages for large buffers of native code, such as the weights of a model.

Each token reads all weights, and with pages of 4 KiB the CPU spends a part of that time on finding them. Most Linux
distributions give huge pages only to memory for which a program asks (`transparent_hugepage` is `madvise`), and native
libraries do not ask. A mapped file has none either.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *$", re.MULTILINE)
_SMALLEST = 8 << 20  # bytes of a buffer
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # on Linux only

Range = tuple[int, int]  # addresses


class HugePages:
    """Asks for huge pages for the large buffers that are allocated after this was created."""

    def __init__(self) -> None:
        self._before = _private_ranges()

    def request(self) -> int:
        """Call it when the buffers are allocated and before they are written: memory that has its pages keeps them.
        Returns the bytes for which it asked."""
        if _MADV_HUGEPAGE is None:
            return 0
        advise, asked = ctypes.CDLL(None, use_errno=True).madvise, 0
        for start, end in _without(_private_ranges(), self._before):
            if end - start < _SMALLEST:
                continue
            if advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE) == 0:
                asked += end - start
            else:
                log.debug("the kernel gives no huge pages: error %d", ctypes.get_errno())
        return asked


def _private_ranges() -> list[Range]:
    """What this process can write and shares with no other, in ascending order. The kernel joins neighbours."""
    try:
        text = _MAPS.read_text()
    except OSError:  # another system, or a sandbox
        return []
    return [(int(start, 16), int(end, 16)) for start, end in _ANONYMOUS.findall(text)]


def _without(ranges: Sequence[Range], others: Sequence[Range]) -> Iterator[Range]:
    """The parts of the ranges that are in none of the others; both in ascending order."""
    for start, end in ranges:
        free = start
        for other_start, other_end in others:
            if free < other_end and other_start < end:
                if free < other_start:
                    yield free, other_start
                free = other_end
        if free < end:
            yield free, end
