"""A trial: one setting measured by a child process with limits of time and memory. Every outcome is a result.

`python -m modelyard.tune.trial_process` is the child; job and outcome cross the process boundary as JSON files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from msgspec import Struct

from modelyard.benchmark.workload import Workload
from modelyard.core.knobs import Loss
from modelyard.processes.child_process import ChildProcess, describe_exit

FailureKind = Literal["crash", "hang", "memory", "refused", "errors"]

_POLL_S = 0.05  # between two looks at the memory: about the time in which 100 MB can be filled
_LOG_LINES = 3  # of the child's output that explain a crash
_KIND_TEXTS: dict[FailureKind, str] = {
    "crash": "the process died",
    "hang": "not finished in time",
    "memory": "out of memory",
    "refused": "it cannot be loaded",
    "errors": "its requests failed",
}


class TrialJob(Struct, frozen=True, kw_only=True):
    """Measure one model with this workload; with a `reference`, the quality loss against it instead.

    `config` and `reference` hold this one model and its caches.
    """

    config: dict[str, Any]
    model: str
    workload: Workload
    conversations: int = 1
    seed: int = 0
    key: str = ""
    answer_s: float = 600.0  # time limit of one answer
    reference: dict[str, Any] | None = None
    bench: bool = False  # run the engine's own benchmark program instead


class TrialLimits(Struct, frozen=True):
    seconds: float
    memory: int | None = None


class Measurement(Struct, frozen=True, kw_only=True, tag="figures"):
    """`speed` is tokens per second: of one stream, or of all streams together if there are several."""

    speed: float
    ttft_s: float
    answer_s: float
    memory: int
    load_s: float = 0.0
    wall_s: float = 0.0  # of all answers of the trial


class TrialFailure(Struct, frozen=True, tag="failure"):
    kind: FailureKind
    reason: str

    def __str__(self) -> str:
        return f"{_KIND_TEXTS[self.kind]}: {self.reason}"


class QualityResult(Struct, frozen=True, tag="loss"):
    loss: Loss


class EngineBenchResult(Struct, frozen=True, tag="bench"):
    """What the engine's own benchmark reports: prompt and output tokens per second."""

    prefill: float
    decode: float


Outcome = Measurement | TrialFailure | QualityResult | EngineBenchResult


def child_command(job: Path, outcome: Path) -> list[str]:
    return [sys.executable, "-m", "modelyard.tune.trial_process", str(job), str(outcome)]


async def run_trial(
    job: TrialJob,
    limits: TrialLimits,
    command: Callable[[Path, Path], list[str]] = child_command,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="modelyard-trial-") as folder:
        job_file, outcome_file = Path(folder) / "job.json", Path(folder) / "outcome.json"
        job_file.write_bytes(msgspec.json.encode(job))
        child = await ChildProcess.start(command(job_file, outcome_file), dict(os.environ))
        try:
            failure = await _wait(child, limits, clock)
        finally:
            if not child.ended.done():
                _kill_group(child.pid)
            code = await asyncio.shield(child.ended)
        if failure is not None:
            return failure
        if outcome_file.is_file():
            outcome: Outcome = msgspec.json.decode(outcome_file.read_bytes(), type=Outcome)
            return outcome
        if code == -signal.SIGKILL:
            return TrialFailure("memory", "the system killed it, as it does when memory runs out")
        output = child.log.tail(_LOG_LINES)
        return TrialFailure("crash", f"it {describe_exit(code)}" + (f": {output}" if output else ""))


async def _wait(child: ChildProcess, limits: TrialLimits, clock: Callable[[], float]) -> TrialFailure | None:
    """Until it ends, or exceeds a limit."""
    deadline = clock() + limits.seconds
    while not child.ended.done():
        if clock() > deadline:
            return TrialFailure("hang", f"stopped after {limits.seconds:.0f} s")
        used = resident_bytes(child.pid)
        if limits.memory is not None and used > limits.memory:
            return TrialFailure("memory", f"stopped at {used / 2**20:.0f} MiB")
        await asyncio.wait({child.ended}, timeout=_POLL_S)
    return None


def resident_bytes(pid: int) -> int:
    """Of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def _kill_group(pid: int) -> None:
    """With its children: it leads a process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
