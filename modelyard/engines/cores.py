"""The CPU cores that this process may compute on."""

from __future__ import annotations

import os

import psutil


def logical() -> int:
    """As the system counts them: those of one core that share its arithmetic count twice."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical() -> int:
    allowed = logical()
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def thread_counts() -> tuple[int, ...]:
    """Numbers of threads worth trying: the powers of two, all cores, one fewer, and all that the system counts."""
    cores, most = physical(), logical()
    powers = {1 << n for n in range(most.bit_length()) if 1 << n <= most}
    return tuple(sorted(powers | {cores, max(1, cores - 1), most}))
