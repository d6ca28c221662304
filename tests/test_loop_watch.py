"""The watch of fuzzing and bench/faults.py: an event loop in another process that works for too long at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.loop_watch import STALL_S, longest_stall

# A loop as the server makes it, which works for a while after it was free.
PROGRAM = """
import asyncio, sys, time, uvloop
def work(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
async def main():
    await asyncio.sleep(0.1)
    work(float(sys.argv[1]))
    await asyncio.sleep(0.1)
with asyncio.Runner(loop_factory=lambda: uvloop.new_event_loop()) as runner:
    runner.run(main())
"""


def stall(folder: Path, seconds: float) -> float:
    """The longest that is written while a program works for so long."""
    (folder / "works.py").write_text(PROGRAM)
    run = "import sys; from pathlib import Path; from tests.loop_watch import run_watched; "
    run += "run_watched(Path(sys.argv[1]), sys.argv[2:], 'works')"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{Path.cwd()}"}
    command = [sys.executable, "-c", run, str(folder / "stalls"), str(seconds)]
    subprocess.run(command, check=True, timeout=60, env=environment)
    return longest_stall(folder / "stalls", 0.0)


def test_a_stall_in_another_process_is_written_and_a_short_one_is_not(tmp_path: Path) -> None:
    assert stall(tmp_path, 0.02) == 0.0
    assert stall(tmp_path, 2 * STALL_S) >= 2 * STALL_S
    assert longest_stall(tmp_path / "stalls", time.time() + 60) == 0.0, "what was before does not count"
