"""The limits of a container, from Linux's control groups: versions 1 and 2.

A process is in one group per hierarchy (/proc/self/cgroup), and the limits of all groups above apply, too. Inside a
container its own group is usually the root of what it sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from msgspec import Struct

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2⁶³ for no limit


class CgroupLimits(Struct, frozen=True):
    """None: there is no limit."""

    memory: int | None = None
    cpus: float | None = None


def cgroup_limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> CgroupLimits:
    """The tightest limits of this process's groups."""
    folders = list(_folders(root, membership))
    memory = [limit for folder in folders if (limit := _memory(folder)) is not None]
    cpus = [quota for folder in folders if (quota := _cpus(folder)) is not None]
    return CgroupLimits(min(memory, default=None), min(cpus, default=None))


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    """Those of this process's groups and of all groups above them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    seen = {root}
    yield root
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        hierarchy = root / controllers if controllers else root  # version 2 has one hierarchy, without a name
        group = PurePosixPath(path.lstrip("/"))
        for part in (group, *group.parents):
            if ".." not in part.parts and (folder := hierarchy / part) not in seen:
                seen.add(folder)
                yield folder


def _memory(folder: Path) -> int | None:
    limits = [_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return next((limit for limit in limits if limit is not None and limit < _UNLIMITED), None)


def _cpus(folder: Path) -> float | None:
    """A quota of CPU time, as a number of CPUs."""
    with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        words = (folder / "cpu.max").read_text().split()
        return int(words[0]) / int(words[1])  # "max" is no number
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None  # -1: no limit


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
