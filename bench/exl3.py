"""What our engine costs beside ExLlamaV3's own generator: in process, in a child process, and where the time goes.

    python -m bench.exl3 FOLDER [--rounds N] [--seconds N] [--json FILE] [--profile]

Directly means the same generator on the same thread with its results counted and nothing else. Every round measures
all of them; a ratio is that of the same rounds. Below the rates is the CPU time per step of the two threads that
matter, as counted by the kernel: the engine's own, and the event loop that hands its tokens on. It needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from msgspec.structs import replace

import modelyard_exllamav3 as exllamav3
from modelyard.core.engine import CacheInfo, End, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.workers.process_engine import ProcessTextEngine, create_process_engine
from modelyard.workers.worker_process import worker_loop_factory
from modelyard_bench.statistics import percentile, ratio_interval
from modelyard_exllamav3.engine import ExllamaEngine, ExllamaJob

STREAMS = (1, 8)
WINDOW, PROMPT_TOKENS = 4096, 64
_GREEDY = Sampling(temperature=0)
_seeds = itertools.count(1)

TokenTimes = list[list[tuple[float, int]]]  # (time, tokens) of each stream
RunPath = Callable[[int, int], Awaitable[TokenTimes]]  # (streams, tokens)


def prompt(tokens: int) -> Prompt:
    """A prompt that no cache has seen."""
    seed = next(_seeds)
    ids = [3 + (seed * 7919 + at * 104729) % 3000 for at in range(PROMPT_TOKENS)]
    return Prompt(parts=(TokenRun(ids),), sampling=_GREEDY, max_tokens=tokens, cache="main")


def tokens_per_s(times: TokenTimes) -> float:
    """While all streams run; over the whole time if they never do."""
    begin, end = max(stream[0][0] for stream in times), min(stream[-1][0] for stream in times)
    if end <= begin:
        begin, end = min(stream[0][0] for stream in times), max(stream[-1][0] for stream in times) + 1e-9
    return sum(count for stream in times for at, count in stream if begin < at <= end) / (end - begin)


# --- the paths --------------------------------------------------------------------------------------------------------


def direct_path(engine: ExllamaEngine) -> RunPath:
    async def run(streams: int, tokens: int) -> TokenTimes:
        jobs = [ExllamaJob(prompt(tokens), asyncio.get_running_loop(), "main", WINDOW) for _ in range(streams)]
        times: TokenTimes = [[] for _ in jobs]
        await engine.run_on_thread(lambda: _drive_generator(engine, jobs, times))
        return times

    return run


def _drive_generator(engine: ExllamaEngine, jobs: list[ExllamaJob], times: TokenTimes) -> None:
    model, generator = engine._model, engine._caches["main"].generator
    assert model is not None
    create = partial(model.create_native_job, on_sampled=lambda: None)
    native = {id(made := create(job)): (made, stream) for job, stream in zip(jobs, times, strict=True)}
    for made, _ in native.values():
        generator.enqueue(made)
    remaining = len(jobs)
    while remaining:
        for result in generator.iterate():
            if (ids := result.get("token_ids")) is not None:
                native[id(result["job"])][1].append((time.perf_counter(), ids.shape[-1]))
            remaining -= bool(result["eos"])


def engine_path(engine: ExllamaEngine | ProcessTextEngine) -> RunPath:
    async def one(tokens: int) -> list[tuple[float, int]]:
        times = []
        async for batch in engine.generate(prompt(tokens)):
            for chunk in batch:
                if type(chunk) is Tokens:
                    times.append((time.perf_counter(), len(chunk.ids)))
                elif isinstance(chunk, End) and chunk.error is not None:
                    raise chunk.error
        return times

    async def run(streams: int, tokens: int) -> TokenTimes:
        return list(await asyncio.gather(*(one(tokens) for _ in range(streams))))

    return run


# --- CPU time of threads ----------------------------------------------------------------------------------------------


def thread_times(pid: int) -> dict[int, tuple[int, int]]:
    """Of each thread of a process: nanoseconds on a CPU, and voluntary context switches."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            busy = int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text().splitlines()
            switches = next(line for line in status if line.startswith("voluntary"))
            found[int(task.name)] = busy, int(switches.split()[1])
    return found


def thread_cost(pid: int, before: dict[int, tuple[int, int]], steps: int) -> str:
    """Per step, of the two busiest Python threads: the main one runs the loop, the other is the engine's."""
    after = thread_times(pid)
    grown = {
        tid: (after[tid][0] - before[tid][0], after[tid][1] - before[tid][1]) for tid in before.keys() & after.keys()
    }
    loop = grown.pop(pid, (0, 0))
    engine = max(grown.values(), default=(0, 0))
    rest = sum(busy for busy, _ in grown.values()) - engine[0]
    cells = [
        f"{name} {busy / steps / 1e3:7.1f} µs, sleeps {slept / steps:5.2f}"
        for name, (busy, slept) in (("engine", engine), ("loop", loop))
    ]
    return "; ".join(cells) + f"; others {rest / steps / 1e3:6.1f} µs"


# --- rounds -----------------------------------------------------------------------------------------------------------

Rates = dict[int, dict[str, list[float]]]  # by streams and path


async def measure(paths: dict[str, RunPath], pids: dict[str, int], rounds: int, seconds: float) -> Rates:
    rates: Rates = {streams: {name: [] for name in paths} for streams in STREAMS}
    for streams in STREAMS:
        estimate = tokens_per_s(await paths["direct"](streams, 200))
        tokens = min(WINDOW - PROMPT_TOKENS - 2, max(200, int(seconds * estimate / streams)))
        costs: dict[str, str] = {}
        for number in range(rounds + 1):
            for name in rotated(list(paths), number):
                gc.collect()
                before = thread_times(pids[name])
                times = await paths[name](streams, tokens)
                if number:  # the first round is the warm-up
                    rates[streams][name].append(tokens_per_s(times))
                    costs[name] = thread_cost(pids[name], before, tokens)
        show(streams, tokens, rates[streams], costs)
    return rates


def rotated(names: list[str], number: int) -> list[str]:
    """Every path comes after every other one."""
    turned = names[number % len(names) :] + names[: number % len(names)]
    return turned if number % 2 else turned[::-1]


def show(streams: int, tokens: int, rates: dict[str, list[float]], costs: dict[str, str]) -> None:
    print(f"\n{streams} streams, {tokens} tokens each, {len(rates['direct'])} rounds", flush=True)
    for name, values in rates.items():
        mean = fmean(values)
        ratio = "" if name == "direct" else f"  ratio {ratio_interval(values, rates['direct'])}"
        print(f"  {name:12} {mean:8.1f} tok/s  step {1e3 * streams / mean:6.3f} ms{ratio}", flush=True)
    for name, cost in costs.items():
        print(f"  {name:12} per step: {cost}", flush=True)


# --- a profile --------------------------------------------------------------------------------------------------------


class StepProfile:
    """The time of the engine's thread as medians over its steps: in the generator, waiting for the GPU, in our code."""

    def __init__(self, engine: ExllamaEngine) -> None:
        self._cache = engine._caches["main"]
        self._cuda = engine._model.library.torch.cuda  # type: ignore[union-attr]
        self.steps: list[tuple[float, float, float, float]] = []  # step, generator, its wait for the GPU, CPU
        self._waited, self._last = 0.0, (0.0, 0.0)

    def __enter__(self) -> StepProfile:
        self._iterate, self._synchronize = self._cache.generator.iterate, self._cuda.synchronize
        self._cache.generator.iterate, self._cuda.synchronize = self._timed_step, self._timed_wait
        return self

    def __exit__(self, *_: object) -> None:
        del self._cache.generator.iterate
        self._cuda.synchronize = self._synchronize

    def _timed_wait(self, *arguments: Any) -> None:
        began = time.perf_counter()
        self._synchronize(*arguments)
        self._waited += time.perf_counter() - began

    def _timed_step(self) -> Any:
        began = time.perf_counter()
        results = self._iterate()
        now, cpu = time.perf_counter(), time.thread_time()
        self.steps.append((now - self._last[0], now - began, self._waited, cpu - self._last[1]))
        self._last, self._waited = (now, cpu), 0.0
        return results

    def __str__(self) -> str:
        steps = self.steps[5:-5]
        whole, inside, waited, cpu = (1e6 * median(each) for each in zip(*steps, strict=True))
        fast = 1e6 * percentile([step[0] for step in steps], 10)
        text = f"step {whole:.0f} µs (p10 {fast:.0f}): generator {inside:.0f}, of it waiting for the GPU {waited:.0f}"
        return f"{text}; ours {whole - inside:.0f}; CPU of the thread {cpu:.0f}"


# --- the run ----------------------------------------------------------------------------------------------------------


async def run(folder: str, rounds: int, seconds: float, profile: bool) -> Rates:
    options = exllamav3.Options(path=folder)
    spec = EngineSpec("bench", options, {"main": CacheInfo(WINDOW, max(STREAMS))})
    async with AsyncExitStack() as stack:
        inline = exllamav3.create(spec)
        assert isinstance(inline, ExllamaEngine)
        child = create_process_engine(replace(spec, backend="exllamav3"))
        assert isinstance(child, ProcessTextEngine)
        for engine in (inline, child):
            stack.push_async_callback(engine.close)
            await engine.open(lambda *_: None)
        paths = {"direct": direct_path(inline), "in process": engine_path(inline), "child": engine_path(child)}
        pids = {"direct": os.getpid(), "in process": os.getpid(), "child": child.pid or 0}
        rates = await measure(paths, pids, rounds, seconds)
        if profile:
            for streams in STREAMS:
                for name in ("direct", "in process"):
                    with StepProfile(inline) as found:
                        await paths[name](streams, 400)
                    print(f"{streams} streams, {name}: {found}", flush=True)
        return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        rates = runner.run(run(options.folder, options.rounds, options.seconds, options.profile))
    if options.json is not None:
        options.json.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
