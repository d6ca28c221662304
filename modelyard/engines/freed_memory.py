"""Returns the memory of an unloaded model to the operating system: glibc keeps most of what native code frees.

Every allocator arena (one per thread, up to eight per core) keeps free memory at its end up to a threshold, which grows
to 64 MB as large blocks are freed. `malloc_trim` returns only the free memory before that end. So the threshold is
lowered while a model is freed; while models run it is high, because returning memory after each step would cost time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LOW, _HIGH = 128 << 10, 64 << 20  # glibc's own: at the start, and the highest that it sets by itself
_MMAP_THRESHOLD = 32 << 20  # the highest that glibc sets by itself


@contextmanager
def returned() -> Iterator[None]:
    """What is freed in this block goes back to the operating system. Does nothing without glibc."""
    if not _has_trim():
        yield
        return
    _set_thresholds(_LOW)
    try:
        yield
    finally:
        _set_thresholds(_HIGH)


def trim() -> None:
    """Returns what lies free between blocks in use; takes milliseconds. Does nothing without glibc."""
    if _has_trim():
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(keep: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, keep)


@cache
def _has_trim() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
