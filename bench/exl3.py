"""What our engine costs beside ExLlamaV3's own generator: in process, in a process of its own, and where it goes.

    python -m bench.exl3 FOLDER [--rounds N] [--seconds N] [--json FILE] [--profile]
    python -m bench.exl3 --paced            # without a GPU: a stand-in whose steps take a fixed time

Directly means: the same generator on the same thread, its results counted and nothing else. All ways have their turns
in each round. Two ratios are told: of the medians, and the median of the ratios of the same round, each with what 95 %
of redrawn rounds give. Below them the CPU time a step of the two threads that matter, as the kernel counts it: the
engine's own, and the loop that hands its tokens on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.ratios import Interval, interval
from bench.stats import percentile
from modelyard.core.engine import CacheInfo, End, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines import exllamav3
from modelyard.engines.exllamav3.engine import ExllamaEngine
from modelyard.engines.exllamav3.model import ExllamaJob
from modelyard.workers import process_engine
from modelyard.workers.process_engine import ProcessTextEngine, create_process_engine
from modelyard.workers.worker_process import worker_loop_factory

STREAMS = (1, 8)
WINDOW, PROMPT = 4096, 64
_GREEDY = Sampling(temperature=0)
_seeds = itertools.count(1)

Heard = list[list[tuple[float, int]]]  # (when, tokens) of each stream
Way = Callable[[int, int], Awaitable[Heard]]  # (streams, tokens)


def prompt(tokens: int) -> Prompt:
    """That no cache has seen."""
    seed = next(_seeds)
    ids = [3 + (seed * 7919 + at * 104729) % 3000 for at in range(PROMPT)]
    return Prompt(parts=(TokenRun(ids),), sampling=_GREEDY, max_tokens=tokens, cache="main")


def rate(heard: Heard) -> float:
    """Tokens a second of the time in which all streams run; where there is none, of the whole time."""
    begin, end = max(times[0][0] for times in heard), min(times[-1][0] for times in heard)
    if end <= begin:
        begin, end = min(times[0][0] for times in heard), max(times[-1][0] for times in heard) + 1e-9
    return sum(count for times in heard for at, count in times if begin < at <= end) / (end - begin)


# --- the ways -------------------------------------------------------------------------------------------------------


def directly(engine: ExllamaEngine) -> Way:
    async def run(streams: int, tokens: int) -> Heard:
        jobs = [ExllamaJob(prompt(tokens), asyncio.get_running_loop()) for _ in range(streams)]
        for job in jobs:
            job.limit_output(WINDOW)
        heard: Heard = [[] for _ in jobs]
        await engine.run_on_thread(lambda: _drive(engine, jobs, heard))
        return heard

    return run


def _drive(engine: ExllamaEngine, jobs: list[ExllamaJob], heard: Heard) -> None:
    model, generator = engine._model, engine._caches["main"].generator
    assert model is not None
    made_of = partial(model.create_native_job, on_sampled=lambda: None)
    raw = {id(made := made_of(job)): (made, times) for job, times in zip(jobs, heard, strict=True)}
    for made, _ in raw.values():
        generator.enqueue(made)
    left = len(jobs)
    while left:
        for result in generator.iterate():
            if (ids := result.get("token_ids")) is not None:
                raw[id(result["job"])][1].append((time.perf_counter(), ids.shape[-1]))
            left -= bool(result["eos"])


def through(engine: ExllamaEngine | ProcessTextEngine) -> Way:
    async def one(tokens: int) -> list[tuple[float, int]]:
        times = []
        async for batch in engine.generate(prompt(tokens)):
            for chunk in batch:
                if type(chunk) is Tokens:
                    times.append((time.perf_counter(), len(chunk.ids)))
                elif isinstance(chunk, End) and chunk.error is not None:
                    raise chunk.error
        return times

    async def run(streams: int, tokens: int) -> Heard:
        return list(await asyncio.gather(*(one(tokens) for _ in range(streams))))

    return run


# --- what the kernel knows of the threads ---------------------------------------------------------------------------


def threads(pid: int) -> dict[int, tuple[int, int]]:
    """Of each thread of a process: nanoseconds on a CPU, and how often it has gone to sleep by itself."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            busy = int((task / "schedstat").read_text().split()[0])
            slept = next(line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
            found[int(task.name)] = busy, int(slept.split()[1])
    return found


def spent(pid: int, before: dict[int, tuple[int, int]], steps: int) -> str:
    """The two busiest Python threads: the main one runs the loop, the other is the engine's."""
    after = threads(pid)
    both = before.keys() & after.keys()
    grown = {tid: (after[tid][0] - before[tid][0], after[tid][1] - before[tid][1]) for tid in both}
    loop = grown.pop(pid, (0, 0))
    other = max(grown.values(), default=(0, 0))
    rest = sum(busy for busy, _ in grown.values()) - other[0]
    cells = [
        f"{name} {busy / steps / 1e3:7.1f} µs, sleeps {slept / steps:5.2f}"
        for name, (busy, slept) in (("engine", other), ("loop", loop))
    ]
    return "; ".join(cells) + f"; others {rest / steps / 1e3:6.1f} µs"


# --- rounds ---------------------------------------------------------------------------------------------------------


def of_medians(ours: list[float], direct: list[float]) -> Interval:
    dice, rounds = random.Random(0), range(len(ours))
    drawn = []
    for _ in range(4000):
        chosen = dice.choices(rounds, k=len(ours))
        drawn.append(median(ours[at] for at in chosen) / median(direct[at] for at in chosen))
    return Interval(median(ours) / median(direct), percentile(drawn, 2.5), percentile(drawn, 97.5))


async def measured(ways: dict[str, Way], pids: dict[str, int], rounds: int, seconds: float) -> dict[int, Any]:
    rates: dict[int, dict[str, list[float]]] = {streams: {name: [] for name in ways} for streams in STREAMS}
    for streams in STREAMS:
        tokens = min(WINDOW - PROMPT - 2, max(200, int(seconds * rate(await ways["direct"](streams, 200)) / streams)))
        costs: dict[str, str] = {}
        for number in range(rounds + 1):
            for name in _order(list(ways), number):
                gc.collect()
                before = threads(pids[name])
                heard = await ways[name](streams, tokens)
                if number:  # the first round only warms up
                    rates[streams][name].append(rate(heard))
                    costs[name] = spent(pids[name], before, tokens)
        report(streams, tokens, rates[streams], costs)
    return rates


def _order(names: list[str], number: int) -> list[str]:
    """Every way comes after every other one."""
    turned = names[number % len(names) :] + names[: number % len(names)]
    return turned if number % 2 else turned[::-1]


def report(streams: int, tokens: int, rates: dict[str, list[float]], costs: dict[str, str]) -> None:
    print(f"\n{streams} streams, {tokens} tokens each, {len(rates['direct'])} rounds", flush=True)
    for name, values in rates.items():
        told = f"  {name:18} {median(values):8.1f} tok/s  step {1e3 * streams / median(values):6.3f} ms"
        if name != "direct":
            paired = interval([a / b for a, b in zip(values, rates["direct"], strict=True)])
            told += f"  medians {of_medians(values, rates['direct'])}  paired {paired}"
        print(told, flush=True)
    for name, cost in costs.items():
        print(f"  {name:18} a step: {cost}", flush=True)


# --- a profile ------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Where the engine's thread is, as medians over its steps: in the generator, in its wait for the GPU, in ours."""

    def __init__(self, engine: ExllamaEngine) -> None:
        self._engine, self._cache = engine, engine._caches["main"]
        self._cuda = engine._model.library.torch.cuda  # type: ignore[union-attr]
        self.steps: list[tuple[float, float, float, float]] = []  # whole, in the generator, of it the wait, and CPU
        self._waited, self._last = 0.0, (0.0, 0.0)

    def __enter__(self) -> Stopwatch:
        self._iterate, self._synchronize = self._cache.generator.iterate, self._cuda.synchronize
        self._cache.generator.iterate, self._cuda.synchronize = self._step, self._wait
        return self

    def __exit__(self, *_: object) -> None:
        del self._cache.generator.iterate
        self._cuda.synchronize = self._synchronize

    def _wait(self, *told: Any) -> None:
        began = time.perf_counter()
        self._synchronize(*told)
        self._waited += time.perf_counter() - began

    def _step(self) -> Any:
        began = time.perf_counter()
        told = self._iterate()
        now, cpu = time.perf_counter(), time.thread_time()
        self.steps.append((now - self._last[0], now - began, self._waited, cpu - self._last[1]))
        self._last, self._waited = (now, cpu), 0.0
        return told

    def __str__(self) -> str:
        whole, inside, waited, cpu = (1e6 * median(each) for each in zip(*self.steps[5:-5], strict=True))
        swift = 1e6 * percentile([step[0] for step in self.steps[5:-5]], 10)
        told = f"step {whole:.0f} µs (10%: {swift:.0f}): generator {inside:.0f}, of it waiting for the GPU {waited:.0f}"
        return f"{told}; ours {whole - inside:.0f}; CPU of the thread {cpu:.0f}"


async def profiled(engine: ExllamaEngine, ways: dict[str, Way]) -> None:
    for streams in STREAMS:
        for name in ("direct", "inline"):
            with Stopwatch(engine) as watch:
                await ways[name](streams, 400)
            print(f"{streams} streams, {name}: {watch}", flush=True)


# --- the whole ------------------------------------------------------------------------------------------------------


async def run(
    folder: str, rounds: int, seconds: float, profile: bool, others: Mapping[str, str] | None = None
) -> dict[int, Any]:
    """`others`: more processes by name, each with Python that its worker executes before anything else."""
    options = exllamav3.Options(path=folder)
    spec = EngineSpec("bench", options, {"main": CacheInfo(WINDOW, max(STREAMS))})
    async with AsyncExitStack() as stack:
        inline = exllamav3.create(spec)
        assert isinstance(inline, ExllamaEngine)
        stack.push_async_callback(inline.close)
        await inline.open(lambda *_: None)
        ways: dict[str, Way] = {"direct": directly(inline), "inline": through(inline)}
        pids = {"direct": os.getpid(), "inline": os.getpid()}
        for name, first in {"process": "", **(others or {})}.items():
            process = create_process_engine("exllamav3", spec, "text")
            assert isinstance(process, ProcessTextEngine)
            stack.push_async_callback(process.close)
            with patch.object(process_engine, "worker_command", lambda endpoint, _, first=first: _command(endpoint, first)):
                await process.open(lambda *_: None)
            ways[name], pids[name] = through(process), process.pid or 0
        rates = await measured(ways, pids, rounds, seconds)
        if profile:
            await profiled(inline, ways)
        return rates


def _command(endpoint: str, first: str) -> list[str]:
    return [sys.executable, "-c", f"{first}\nfrom modelyard.workers.__main__ import main; main()", endpoint]


def paced(folder: Path) -> str:
    """A model's folder for the stand-in, which this process and its children load from now on."""
    from bench.paced import shims
    from tests.engines.exllamav3.helpers import write_model

    found = str(shims(folder))
    sys.path.insert(0, found)
    os.environ["PYTHONPATH"] = os.pathsep.join([found, os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return str(write_model(folder / "model"))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", nargs="?")
    asked.add_argument("--paced", action="store_true")
    asked.add_argument("--rounds", type=int, default=8)
    asked.add_argument("--seconds", type=float, default=2.5)
    asked.add_argument("--profile", action="store_true")
    asked.add_argument("--json", type=Path)
    told = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="exl3-") as scratch:
        folder = paced(Path(scratch)) if told.paced else told.folder
        with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
            rates = runner.run(run(folder, told.rounds, told.seconds, told.profile))
    if told.json is not None:
        told.json.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
