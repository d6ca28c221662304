"""A trial: one setting measured by a child process with limits of time and memory. Every outcome is a result.

Job and outcome cross the process boundary as JSON files.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import msgspec
import psutil
from msgspec import Struct

from modelyard import plugins
from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import Engine, TextEngine
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.knobs import Loss
from modelyard.gateway.model import Model
from modelyard.library import cores
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard.router.router import ModelEntry
from modelyard.server.engine_factory import create_engine, model_spec
from modelyard.server.model_definition import define_model
from modelyard.telemetry.system import read_memory
from modelyard_bench.load import ChatTarget, EngineTarget, LoadGenerator, LoadTarget, Round, RoundLength
from modelyard_bench.workload import Workload

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
    """`speed` is tokens per second: of one stream, or of all streams together if there are several. Speed and times are
    those of the cores alone, without the time that other programs had them."""

    speed: float
    ttft_s: float
    answer_s: float
    memory: int
    load_s: float = 0.0
    wall_s: float = 0.0  # of all answers of the trial, other programs included
    share: float = 1.0  # of that time that is ours


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
    return [sys.executable, "-m", "modelyard_optimize.trial", str(job), str(outcome)]


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
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with its children: it leads a process group
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


# --- the child process ------------------------------------------------------------------------------------------------
#
# `python -m modelyard_optimize.trial JOB OUTCOME` measures one setting and exits. If the setting crashes the process,
# that costs one trial. The outcome file is either complete or absent.

_WARMUP_TOKENS = 16  # of prompt and output that are not measured
_LEAST_SHARE = 0.01  # of the time that a correction leaves


def main(argv: Sequence[str]) -> None:
    job = msgspec.json.decode(Path(argv[0]).read_bytes(), type=TrialJob)
    outcome, unfinished = Path(argv[1]), Path(argv[1] + ".part")
    unfinished.write_bytes(msgspec.json.encode(run_job(job)))
    unfinished.rename(outcome)


def run_job(job: TrialJob) -> Outcome:
    try:
        if job.bench:
            return _engine_bench(job)
        if job.reference is not None:
            return QualityResult(_quality_loss(job, job.reference))
        return asyncio.run(_measure(job))
    except MemoryError:
        return TrialFailure("memory", "Python could not allocate memory")
    except ModelyardError as error:
        return TrialFailure(_failure_kind(error), error.message)


def _failure_kind(error: ModelyardError) -> FailureKind:
    text = error.message.lower()
    is_allocation = "alloc" in text and ("fail" in text or "unable" in text)
    return "memory" if error.code == "model_too_large" or is_allocation or "out of memory" in text else "refused"


# --- speed ------------------------------------------------------------------------------------------------------------


async def _measure(job: TrialJob) -> Outcome:
    entry, engine, model = _create_engine(job)
    began = time.perf_counter()
    gpu_before = sum(gpu.used for gpu in read_memory().gpus)
    try:
        await engine.open(lambda *_: None)
        load_s = time.perf_counter() - began
        if isinstance(engine, TextEngine):
            tokenizer = model.pipeline.tokenizer
            target: LoadTarget = EngineTarget(engine, tokenizer, cache=entry.default_cache.name, limit_s=job.answer_s)
        else:
            target = ChatTarget(engine, entry.name, limit_s=job.answer_s)
        one, share = await _run_load(job, entry, target)
        memory = read_memory()
        used = memory.ram_used_here + max(0, sum(gpu.used for gpu in memory.gpus) - gpu_before)
    finally:
        await engine.close()
    return summarize(one, used, load_s, share)


def _create_engine(job: TrialJob) -> tuple[ModelEntry, Engine, Model]:
    config, entry, model = _read_model(job)
    return entry, create_engine(model_spec(config, entry)), model


def _read_model(job: TrialJob) -> tuple[Config, ModelEntry, Model]:
    config = Config.model_validate(job.config)
    entry = config.router().catalog.models[job.model]
    model = define_model(entry)
    if model.fault is not None:
        raise model.fault
    return config, entry, model


async def _run_load(job: TrialJob, entry: ModelEntry, target: LoadTarget) -> tuple[Round, float]:
    """The same number of answers for every setting: with fewer slots, more of them run one after the other. And the
    share of the time that other programs left."""
    info = entry.default_cache.info
    workload = fit_workload(job.workload, info.window)
    streams = min(workload.streams, info.parallel)
    warmup = msgspec.structs.replace(workload, prompt_tokens=_WARMUP_TOKENS, output_tokens=_WARMUP_TOKENS, turns=1)
    await LoadGenerator(target, warmup, streams=streams, seed=job.seed, key=f"warm {job.key}").run()
    length = RoundLength(conversations=max(1, job.conversations * workload.streams // streams))
    began, before = time.perf_counter(), read_threads()
    one = await LoadGenerator(target, workload, length, streams=streams, seed=job.seed, key=job.key).run()
    return one, undisturbed_share(time.perf_counter() - began, before, read_threads(), cores.logical())


# Seconds on a core, and seconds ready to run without one, by thread.
ThreadTimes = dict[tuple[int, int], tuple[float, float]]


def read_threads() -> ThreadTimes:
    """Of this process and its children; empty where the system does not report it, which only Linux does."""
    found: ThreadTimes = {}
    for process in (os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))):
        for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(OSError, ValueError):  # it has ended
                ran, waited, _ = map(int, thread.read_text().split())
                found[process, int(thread.parent.name)] = (ran / 1e9, waited / 1e9)
    return found


def undisturbed_share(wall_s: float, before: ThreadTimes, after: ThreadTimes, count: int) -> float:
    """What is left of the time when other programs do not use the cores: 1 on a quiet machine.

    A thread that is ready and has no core waits for other programs, and with more threads than cores also for those of
    this one, as it would on a quiet machine. The threads of a model wait for each other at every layer: they get on
    while all of them have a core, so that their shares multiply.
    """
    active = list[tuple[float, float]]()  # the share that a thread had of the cores when it wanted one, and how often
    for thread, (ran, waited) in after.items():
        old = before.get(thread, (0.0, 0.0))
        if (wanted := ran + waited - sum(old)) > 0:
            active.append(((ran - old[0]) / wanted, min(1.0, wanted / wall_s)))
    of_core = min(1.0, count / max(1e-9, sum(activity for _, activity in active)))  # each would have it alone here
    left: float = math.prod(min(1.0, share / of_core) ** activity for share, activity in active)
    return max(_LEAST_SHARE, left)


def fit_workload(workload: Workload, window: int) -> Workload:
    """With a shorter prompt if the context window is small."""
    excess = workload.context_tokens - (window - 1)
    if excess <= 0:
        return workload
    if workload.prompt_tokens - excess < _WARMUP_TOKENS:
        raise Unavailable(f"a window of {window} tokens is too small for the workload {workload.name!r}")
    return msgspec.structs.replace(workload, prompt_tokens=workload.prompt_tokens - excess)


def summarize(one: Round, memory: int, load_s: float, share: float = 1.0) -> Measurement | TrialFailure:
    """Medians over the answers: one that another program disturbed more than the others does not count."""
    if errors := [sample.error for sample in one.samples if sample.error is not None]:
        return TrialFailure(
            "errors", f"{len(errors)} of {len(one.samples)} answers failed, the first with: {errors[0]}"
        )
    answers = [sample for sample in one.succeeded if sample.ttft_s is not None]
    if not answers:
        return TrialFailure("errors", "no answer has a token")
    rates = [rate for sample in answers if (rate := sample.rate) is not None]
    return Measurement(
        speed=(median(rates) if rates and one.streams == 1 else one.tokens_per_s) / share,
        ttft_s=fmean(sample.ttft_s or 0.0 for sample in answers) * share,
        answer_s=median(sample.total_s for sample in answers) * share,
        memory=memory,
        load_s=load_s,
        wall_s=one.wall_s,
        share=share,
    )


# --- the engine's own modules -----------------------------------------------------------------------------------------


def _engine_bench(job: TrialJob) -> EngineBenchResult:
    _, entry, _ = _read_model(job)
    module = importlib.import_module(f"{plugins.engine(entry.backend).tuning}.bench")
    spec, workload = engine_spec(entry), job.workload
    return EngineBenchResult(*module.bench(spec, workload.prompt_tokens, workload.output_tokens))


def _quality_loss(job: TrialJob, reference: dict[str, Any]) -> Loss:
    """What the rounding of this setting loses on `QUALITY_TEXT` against the reference."""
    _, entry, model = _read_model(job)
    spec, tokenizer = engine_spec(entry), model.pipeline.tokenizer
    ids = [*([] if tokenizer.bos is None else [tokenizer.bos]), *tokenizer.encode_plain(QUALITY_TEXT)]
    engine = plugins.engine(entry.backend)
    engine.verify()
    module = importlib.import_module(f"{engine.tuning}.loss")
    exact_spec = engine_spec(Config.model_validate(reference).router().catalog.models[job.model])
    loss: Loss = module.loss(spec, exact_spec, ids)
    return loss


# Our own text of several kinds, so that no model knows it by heart.
QUALITY_TEXT = """\
The lock-keeper's notebook, third winter

Nobody had told me that water has a memory. In the first week the upper gate would not close by the width of a hand, and
I leaned on the beam until my shoulder was blue. On the eighth day it closed by itself, quietly, while I was eating. The
old keeper laughed when I wrote to him about it. "It was never the gate," he answered. "Upstream they cut reeds in
October. You were closing it on a forest." Since then I write down what happens a day's walk away: reeds, rain,
weddings, the mill that only runs when flour is dear. My own lock is explained by things I cannot see from it.

There are three kinds of boats. The first kind hurries and bumps its bow against the sill, and I raise the paddles
slowly for it, out of spite. The second kind waits with its engine off, and I raise them slowly, too, out of respect.
The third kind does not come at all. I keep a list of those: the Annabel, due on the fourteenth; the Two Brothers, which
became one brother, then a bicycle shop; a green boat without a name whose owner paid in plums.

How to set the weir after a storm:

1. Read the gauge twice. If the two readings differ by more than 4 cm, somebody is standing on it.
2. Open paddle A by a quarter turn for every 10 cm above 1.80 m, but never by more than two full turns.
3. Wait eleven minutes. The wave from paddle A needs nine to reach the bend and come back.
4. If the level still rises, open B by half of what you gave A, and ring the bell for the ferry.
5. Write it down before you dry your hands, or you will not write it down.

A small program does the sum for me now. My niece wrote it on the back of a bill:

    def turns(level_cm, open_already=0.0):
        surplus = max(0, level_cm - 180)
        wanted = 0.25 * (surplus // 10)
        return min(2.0, wanted) - open_already

With a level of 214 cm the surplus is 34, which makes three steps of ten, so 0.75 turns; had I already given it half a
turn, a quarter would be left. She also taught it to answer in a machine's voice, {"level": 214, "paddle": "A", "turns":
0.75}, and to say "unknown" when the gauge is under ice, which is more than most people manage.

In February the inspector came. He asked why the book had two entries for the same night. I said that one was what I
saw and the other what I understood in the morning. He thought about this for as long as a barge takes to sink by one
plank, then he signed both. "Most keepers," he said, "only keep the second one."
"""


if __name__ == "__main__":
    main(sys.argv[1:])
