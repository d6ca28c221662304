"""Huge pages are asked for new, large buffers only."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from modelyard.engines.llama_cpp.loading import HugePages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has transparent huge pages")

_MB = 1 << 20


def private_memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def advised_bytes() -> int:
    """Of this process: mappings with the kernel's flag `hg`."""
    size = total = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += size
    return total


def test_new_large_buffers_get_huge_pages_and_older_or_small_ones_do_not() -> None:
    older = private_memory(64 * _MB)
    older[:1] = b"x"
    huge_pages, before = HugePages(), advised_bytes()
    small = private_memory(_MB)
    assert huge_pages.request() == 0
    large = private_memory(96 * _MB)
    assert 96 * _MB <= huge_pages.request() <= 97 * _MB, "the kernel may have joined it with the small one"
    assert 96 * _MB <= advised_bytes() - before <= 97 * _MB
    for each in (older, small, large):
        each.close()


def test_a_system_without_proc_gets_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("modelyard.engines.llama_cpp.loading._MAPS", tmp_path / "maps")
    huge_pages = HugePages()
    buffer = private_memory(64 * _MB)
    assert huge_pages.request() == 0
    buffer.close()
