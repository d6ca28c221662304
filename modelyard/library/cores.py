"""The CPU cores that this process may use: by its affinity, and by the quota of its container."""

from __future__ import annotations

import logging
import os
from functools import cache

import psutil

from modelyard.library.cgroup import cgroup_limits

log = logging.getLogger("modelyard.engines")


def logical() -> int:
    """Hardware threads: two that share a core count twice. Of a quota of 2.5 CPUs two are used: a third thread would
    make the others wait when the quota of a period is spent."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_limits().cpus
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def physical() -> int:
    allowed = logical()
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def physical_if_limited() -> int | None:
    """For programs that know the cores of the machine, but not the limits of this process."""
    cores = physical()
    return cores if cores < (psutil.cpu_count(logical=False) or cores) else None


def thread_counts() -> tuple[int, ...]:
    """Thread counts worth trying: powers of two, all physical cores, one fewer, and all logical cores."""
    cores, most = physical(), logical()
    powers = {1 << n for n in range(most.bit_length()) if 1 << n <= most}
    return tuple(sorted(powers | {cores, max(1, cores - 1), most}))


def bounded(threads: int, setting: str) -> int:
    """No more threads than cores. Threads that wait for each other at every layer of a model hardly progress when they
    also wait for a core: with hundreds a token takes minutes."""
    most = logical()
    if threads <= most:
        return threads
    _warn(setting, threads, most)
    return most


@cache  # every context of a model asks
def _warn(setting: str, threads: int, most: int) -> None:
    log.warning("%s = %d is more than this process may use: %d threads, one per core", setting, threads, most)
