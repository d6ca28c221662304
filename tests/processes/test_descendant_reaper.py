"""Processes that bear a mark, and their end."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

from modelyard.processes.descendant_reaper import DescendantReaper

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
# Starts a child that bears the mark, tells its pid, and waits to be killed.
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


def test_what_is_started_meanwhile_is_told_by_its_mark_and_ended() -> None:
    reaper = DescendantReaper()
    with reaper.mark_children():
        child = subprocess.Popen(SLEEP)
    other = subprocess.Popen(SLEEP)
    try:
        assert reaper.pids == [child.pid]
        reaper.kill_all()
        assert child.wait(WAIT_S) == -9
        assert other.poll() is None
        assert reaper.pids == []
    finally:
        for each in (child, other):
            each.kill()
            each.wait()
        reaper.kill_all()


def test_nothing_outlives_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(WAIT_S)
    psutil.wait_procs([child], timeout=WAIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_brood_that_never_hatched_ends() -> None:
    DescendantReaper().kill_all()


def test_two_broods_that_hatch_at_once_keep_apart() -> None:
    def start() -> tuple[DescendantReaper, subprocess.Popen[bytes]]:
        reaper = DescendantReaper()
        with reaper.mark_children():
            return reaper, subprocess.Popen(SLEEP)

    with ThreadPoolExecutor(2) as pool:
        (one, first), (two, second) = [each.result() for each in [pool.submit(start) for _ in range(2)]]
    try:
        assert (one.pids, two.pids) == ([first.pid], [second.pid])
    finally:
        for reaper, child in ((one, first), (two, second)):
            reaper.kill_all()
            child.wait(WAIT_S)
