"""Marked processes are killed with their parent."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from modelyard.processes.descendant_reaper import DescendantReaper

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
# Starts a marked child, prints its pid, and waits to be killed.
PARENT = f"""
import subprocess, sys, time
from modelyard.processes.descendant_reaper import DescendantReaper
reaper = DescendantReaper()
with reaper.mark_children():
    child = subprocess.Popen({SLEEP!r})
print(child.pid, flush=True)
time.sleep(3600)
"""
WAIT_S = 60.0


def found(reaper: DescendantReaper) -> list[int]:
    """The environment of a process is not readable for a moment while it is in execve."""
    deadline = time.monotonic() + WAIT_S
    while not (pids := reaper.pids):
        assert time.monotonic() < deadline
    return pids


def test_marked_processes_are_found_and_killed() -> None:
    reaper = DescendantReaper()
    with reaper.mark_children():
        child = subprocess.Popen(SLEEP)
    other = subprocess.Popen(SLEEP)
    try:
        assert found(reaper) == [child.pid]
        reaper.kill_all()
        assert child.wait(WAIT_S) == -9
        assert other.poll() is None
        assert reaper.pids == []
    finally:
        for each in (child, other):
            each.kill()
            each.wait()
        reaper.kill_all()


def test_marked_processes_die_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(WAIT_S)
    psutil.wait_procs([child], timeout=WAIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_kill_all_without_marked_processes_does_nothing() -> None:
    DescendantReaper().kill_all()


def test_concurrent_reapers_mark_only_their_own_processes() -> None:
    def start() -> tuple[DescendantReaper, subprocess.Popen[bytes]]:
        reaper = DescendantReaper()
        with reaper.mark_children():
            return reaper, subprocess.Popen(SLEEP)

    with ThreadPoolExecutor(2) as pool:
        (one, first), (two, second) = [each.result() for each in [pool.submit(start) for _ in range(2)]]
    try:
        assert (found(one), found(two)) == ([first.pid], [second.pid])
    finally:
        for reaper, child in ((one, first), (two, second)):
            reaper.kill_all()
            child.wait(WAIT_S)
