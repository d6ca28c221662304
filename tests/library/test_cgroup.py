"""Limits of a container, with fake trees of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.library import cores
from modelyard.library.cgroup import CgroupLimits, cgroup_limits

MIB = 1 << 20


def tree(root: Path, membership: str, files: dict[str, str]) -> CgroupLimits:
    (root / "self").write_text(membership)
    for name, text in files.items():
        file = root / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return cgroup_limits(root / "cgroup", root / "self")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, CgroupLimits()),
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, CgroupLimits()),
        ("0::/\n", {"cpu.max": "150000 100000", "memory.max": str(64 * MIB)}, CgroupLimits(64 * MIB, 1.5)),
        # the groups above count, too
        (
            "0::/pod/web\n",
            {"cpu.max": "max 100000", "pod/cpu.max": "200000 100000", "pod/web/cpu.max": "400000 100000"},
            CgroupLimits(None, 2.0),
        ),
        ("0::/pod/web\n", {"pod/web/cpu.max": "50000 100000"}, CgroupLimits(None, 0.5)),
        # version 1 has a hierarchy per controller
        (
            "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
            {
                "cpu,cpuacct/box/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "memory/box/memory.limit_in_bytes": str(32 * MIB),
                "memory/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
            },
            CgroupLimits(32 * MIB, 3.0),
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CgroupLimits()),
        # what cannot be read limits nothing
        ("", {"cpu.max": "", "memory.max": "a lot"}, CgroupLimits()),
        ("0::/../other\n", {"cpu.max": "100000 0"}, CgroupLimits()),
    ],
)
def test_the_tightest_limit_of_a_process_counts(
    tmp_path: Path, membership: str, files: dict[str, str], expected: CgroupLimits
) -> None:
    assert tree(tmp_path, membership, files) == expected


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path / "none", tmp_path / "nothing") == CgroupLimits()


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_a_quota_bounds_the_threads_of_every_engine(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(cores, "cgroup_limits", lambda: CgroupLimits(None, quota))
    assert (cores.logical(), cores.physical(), max(cores.thread_counts())) == (expected,) * 3
    assert cores.bounded(100, "n_threads") == expected
    assert cores.physical_if_limited() == (expected if expected < 8 else None)
