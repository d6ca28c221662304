"""How much memory is free right now: RAM as far as this process may use it, and each GPU's."""

from __future__ import annotations

from pathlib import Path

import psutil

from modelyard.core.engine import Machine
from modelyard.telemetry.memory import read_gpus

_CGROUP = Path("/sys/fs/cgroup")


def machine(*, with_gpus: bool) -> Machine:
    """`with_gpus`: whether anybody would use them. Where no driver answers the engine has the last word."""
    gpus = {gpu.uuid: gpu.free for gpu in read_gpus()} if with_gpus else {}
    return Machine(min(psutil.virtual_memory().available, _allowed(_CGROUP)), gpus)


def _allowed(group: Path) -> int:
    """What a container's own limit leaves; files in memory are given back when somebody needs the room."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit: "max" is no number
        return 2**63
    files = int(told.get("inactive_file", 0)) + int(told.get("active_file", 0))
    return max(0, limit - used + files)
