"""Fuzzes everything for a while and reports: `python -m tests.fuzz [--minutes 5] [--seed N] [--only PART]`

`api` and `admin` are a server process with the fake engine and a real model, `frames` a worker and a scheduler, `files`
damaged model files. The exit code is 1 if there are findings: a 5xx, a hang, a traceback in the log, an error in the
wrong shape, a connection that was cut, or a process that died.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom

from rich.table import Table

from bench.report import console, machine, show_notes
from tests.fuzz.explore import Results, explore_for
from tests.fuzz.file_targets import file_targets, vocabulary_target
from tests.fuzz.frame_targets import frame_targets
from tests.fuzz.server_under_test import server_process


def fuzz_api(seconds: float, start: int, results: Results) -> None:
    with server_process() as server:
        explore_for(server.targets(admin=False), seconds, start, results)


def fuzz_admin(seconds: float, start: int, results: Results) -> None:
    with server_process() as server:
        explore_for(server.targets(admin=True), seconds, start, results)


def fuzz_frames(seconds: float, start: int, results: Results) -> None:
    with frame_targets() as targets:
        explore_for(targets, seconds, start, results)


def fuzz_files(seconds: float, start: int, results: Results) -> None:
    with file_targets() as targets, tempfile.TemporaryDirectory(prefix="modelyard-fuzz-") as folder:
        explore_for(targets, seconds / 2, start, results)
        explore_for([vocabulary_target(Path(folder))], seconds / 2, start, results, batch=5)


PARTS: dict[str, tuple[float, Callable[[float, int, Results], None]]] = {  # the share of the time, and the part
    "api": (0.5, fuzz_api),
    "admin": (0.2, fuzz_admin),
    "frames": (0.15, fuzz_frames),
    "files": (0.15, fuzz_files),
}


def show(results: Results, seconds: float, start: int) -> None:
    out = console()
    table = Table(title="Fuzzing", title_justify="left", expand=False)
    for name in ("target", "inputs", "outcomes", "findings"):
        table.add_column(name, justify="right" if name == "inputs" else "left")
    for target, outcomes in results.outcomes.items():
        found = sum(1 for finding in results.findings.values() if finding.where == target)
        described = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        table.add_row(target, f"{outcomes.total():,}", described, str(found or ""))
    out.print(table)
    total = sum(outcomes.total() for outcomes in results.outcomes.values())
    show_notes((machine(), f"{total:,} inputs in {seconds:.0f} s, seed {start}, {len(results.findings)} findings"), out)
    for finding in results.findings.values():
        out.print(f"\n{finding.kind} at {finding.where}: {finding.detail}", style="red", markup=False)
        out.print(str(finding.example)[:3000], markup=False, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="repeats a run; another one each time by default")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    options = parser.parse_args()
    start = SystemRandom().randrange(2**32) if options.seed is None else options.seed
    chosen = {options.only: PARTS[options.only]} if options.only else PARTS
    whole = sum(share for share, _ in chosen.values())
    results, began = Results(), time.monotonic()
    for share, fuzz in chosen.values():
        fuzz(60 * options.minutes * share / whole, start, results)
    show(results, time.monotonic() - began, start)
    return 1 if results.findings else 0


if __name__ == "__main__":
    sys.exit(main())
