"""What Python costs in a decode step of the llama.cpp engine: the time of a step that is not spent inside C calls.

    python -m bench.decode_step [--threads N] [--tokens N] [--model FILE] [--sampled] [--ahead] [--profile]

Streams of one cache generate `--tokens` tokens each, greedily unless `--sampled`. Every call into libllama is timed. A
step lasts from the end of the previous one to its own end, so that accepting jobs and emitting tokens counts too. The
time of numpy counts as Python. Rows are medians over the steps in which all streams ran: other programs stretch some
steps, not the median. "cpu" is the same by the thread's own clock, which stops while others have the core or the GIL.
On a GPU most of it overlaps with the next step: "waits" is the part for which the GPU waits, from the end of a step
until the next is submitted. `--ahead` takes that path on a CPU, with a tiny random model by default, so that the
tokens cost Python time only. `--profile` prints a profile of the engine's thread instead.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from modelyard.core.engine import CacheInfo, End, EngineSpec, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import binding, context, selftest
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.library.default_model import fetch

TARGET = 0.03
STREAMS = (1, 2, 4, 8)
_PROMPT = 64  # tokens


class StepTime(Struct, frozen=True):
    streams: int
    wall: float
    python: float
    cpu: float
    waits: float = 0.0


class StepCost(Struct, frozen=True):
    streams: int
    steps: int
    wall: float
    python: float
    cpu: float
    waits: float = 0.0

    @property
    def python_share(self) -> float:
        return self.python / self.wall

    @property
    def waiting_share(self) -> float:
        """The share that overlaps with nothing."""
        return self.waits / self.wall


class StepClock:
    """Sums the time of the wrapped calls per step."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        self._inside = self._inside_cpu = 0.0
        self._last: tuple[float, float] | None = None
        self._waits = 0.0  # Python time while nothing was decoded
        self._decoded: tuple[float, float] | None = None  # when decoding ended, and the time of C calls until then

    def wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._inside_cpu += time.thread_time() - cpu
                self._inside += time.perf_counter() - began

        return wrapped

    def wrap_decode(self, call: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = self.wrap_call(call)

        def decode(*arguments: Any) -> Any:
            if self._decoded is not None:
                at, inside = self._decoded
                self._waits += time.perf_counter() - at - (self._inside - inside)
            found = wrapped(*arguments)
            self._decoded = time.perf_counter(), self._inside
            return found

        return decode

    def wrap_synchronize(self, call: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = self.wrap_call(call)

        def synchronize(*arguments: Any) -> Any:
            found = wrapped(*arguments)
            self._decoded = time.perf_counter(), self._inside
            return found

        return synchronize

    def wrap_step(self, call: Callable[[context.LlamaContext], None]) -> Callable[[context.LlamaContext], None]:
        def step(cache: context.LlamaContext) -> None:
            streams = sum(job.generating for job in cache.jobs.values())
            call(cache)
            self._end_step(streams)

        return step

    def _end_step(self, streams: int) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self._last is not None:
            wall, busy = now - self._last[0], cpu - self._last[1]
            self.steps.append(StepTime(streams, wall, wall - self._inside, busy - self._inside_cpu, self._waits))
        if self._decoded is not None:
            self._decoded = self._decoded[0], self._decoded[1] - self._inside
        self._last, self._inside, self._inside_cpu, self._waits = (now, cpu), 0.0, 0.0, 0.0

    def installed(self) -> ExitStack:
        stack = ExitStack()
        for name, call in vars(binding.short).items():
            stack.enter_context(patch.object(binding.short, name, self.wrap_call(call)))
        # A step submitted ahead ends when its logits are read; otherwise it ends with decode.
        stack.enter_context(
            patch.object(binding.waiting, "get_logits", self.wrap_synchronize(binding.waiting.get_logits))
        )
        wrapped = {"llama_decode": self.wrap_decode, "llama_synchronize": self.wrap_synchronize}
        for name, wrap in wrapped.items():
            stack.enter_context(patch.object(binding.lib, name, wrap(getattr(binding.lib, name))))
        stack.enter_context(patch.object(context.LlamaContext, "step", self.wrap_step(context.LlamaContext.step)))
        return stack


def submit_ahead() -> AbstractContextManager[Any]:
    """As with a library built for GPUs: the next step is submitted before the tokens of the last are emitted."""
    return patch.object(binding.lib, "llama_supports_gpu_offload", lambda: True)


@contextmanager
def tiny_model() -> Iterator[Path]:
    with TemporaryDirectory(prefix="modelyard-step-") as folder:
        file = Path(folder) / "tiny.gguf"
        selftest.write_tiny_model(file)
        yield file


def summarize(streams: int, steps: list[StepTime]) -> StepCost:
    full = [step for step in steps if step.streams == streams]
    columns = zip(*((s.wall, s.python, s.cpu, s.waits) for s in full), strict=True)
    wall, python, cpu, waits = (statistics.median(values) for values in columns)
    return StepCost(streams, len(full), wall, python, cpu, waits)


async def open_engine(file: Path, threads: int, streams: int) -> LlamaCppEngine:
    options = llama_cpp.Options(path=str(file), n_threads=threads, speculation="off", kv_store=False)
    engine = llama_cpp.create(EngineSpec("bench", options, {"main": CacheInfo(1024, streams)}))
    assert isinstance(engine, LlamaCppEngine)
    await engine.open(lambda *_: None)
    return engine


async def generate(engine: LlamaCppEngine, streams: int, tokens: int, sampling: Sampling) -> None:
    async def one(number: int) -> None:
        ids = [(number * 7919 + at * 104729) % engine.n_vocab for at in range(_PROMPT)]
        prompt = Prompt(parts=(TokenRun(ids),), sampling=sampling, max_tokens=tokens, session=str(number))
        async for batch in engine.generate(prompt):
            if isinstance(batch[-1], End) and batch[-1].error is not None:
                raise batch[-1].error

    await asyncio.gather(*(one(number) for number in range(streams)))


async def measure(file: Path, threads: int, streams: int, tokens: int, sampling: Sampling) -> StepCost:
    engine, clock = await open_engine(file, threads, streams), StepClock()
    try:
        await generate(engine, streams, 4, sampling)
        with clock.installed():
            await generate(engine, streams, tokens, sampling)
    finally:
        await engine.close()
    return summarize(streams, clock.steps)


async def profile(file: Path, threads: int, streams: int, tokens: int, sampling: Sampling) -> None:
    """Of the engine's own thread: cProfile sees one thread only, so each of its steps runs under it."""
    engine, profiler = await open_engine(file, threads, streams), cProfile.Profile()
    original = context.LlamaContext.step
    try:
        with patch.object(context.LlamaContext, "step", lambda cache: profiler.runcall(original, cache)):
            await generate(engine, streams, tokens, sampling)
    finally:
        await engine.close()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def table(rows: list[StepCost]) -> Table:
    made = Table(title="A decode step, and its share of Python")
    for name in ("streams", "steps", "step ms", "python µs", "cpu µs", "share", f"target {TARGET:.0%}", "waits µs"):
        made.add_column(name, justify="right")
    for each in rows:
        verdict = "met" if each.python_share < TARGET else "missed"
        cells = (
            f"{each.wall * 1e3:.2f}",
            f"{each.python * 1e6:.0f}",
            f"{each.cpu * 1e6:.0f}",
            f"{each.python_share:.2%}",
        )
        made.add_row(str(each.streams), str(each.steps), *cells, verdict, f"{each.waits * 1e6:.0f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    options = parser.parse_args()
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1) if options.sampled else Sampling(temperature=0)
    with ExitStack() as stack:
        if options.ahead:
            stack.enter_context(submit_ahead())
        file = options.model or (stack.enter_context(tiny_model()) if options.ahead else fetch())
        if options.profile:
            asyncio.run(profile(file, options.threads, max(options.streams), options.tokens, sampling))
            return
        rows = [asyncio.run(measure(file, options.threads, n, options.tokens, sampling)) for n in options.streams]
        Console().print(table(rows))


if __name__ == "__main__":
    main()
