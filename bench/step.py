"""What Python costs in a decode step of the llama.cpp engine: the time of a step that is not spent inside C calls.

    python -m bench.step [--threads N] [--tokens N] [--model FILE] [--sampled] [--ahead] [--profile]

Streams of one cache say `--tokens` tokens each, greedily unless `--sampled`. Every call into libllama is timed; a step
reaches from the end of the one before to its own end, so taking in jobs and handing out tokens counts too. What numpy
does counts as Python. Rows are medians over the steps in which all streams ran: a machine that is busy otherwise
stretches some steps, not the median. "cpu" is the same by the thread's own clock, which stands still while others have
the core or the interpreter. On a GPU most of it is done while the next step runs: "waits" is the part for which the
GPU waits, from the end of a step there until the next is given to it. `--ahead` takes that path on a CPU, with a tiny
random model unless another is named: what the tokens cost there is Python's alone. `--profile` prints where Python
spends it instead.
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


class Step(Struct, frozen=True):
    streams: int
    wall: float
    python: float
    cpu: float
    waits: float = 0.0


class Row(Struct, frozen=True):
    streams: int
    steps: int
    wall: float
    python: float
    cpu: float
    waits: float = 0.0

    @property
    def share(self) -> float:
        return self.python / self.wall

    @property
    def waiting(self) -> float:
        """The share that nothing else hides."""
        return self.waits / self.wall


class Clock:
    """Adds up what the wrapped calls take, and cuts it into steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._inside = self._inside_cpu = 0.0
        self._last: tuple[float, float] | None = None
        self._outside = 0.0  # Python while nothing was decoded
        self._rested: tuple[float, float] | None = None  # when decoding ended, and what C calls had taken by then

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*arguments: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._inside_cpu += time.thread_time() - cpu
                self._inside += time.perf_counter() - began

        return inside

    def decoding(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed(call)

        def decode(*arguments: Any) -> Any:
            if self._rested is not None:
                at, inside = self._rested
                self._outside += time.perf_counter() - at - (self._inside - inside)
            found = timed(*arguments)
            self._rested = time.perf_counter(), self._inside
            return found

        return decode

    def ending(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed(call)

        def synchronize(*arguments: Any) -> Any:
            found = timed(*arguments)
            self._rested = time.perf_counter(), self._inside
            return found

        return synchronize

    def step(self, call: Callable[[context.LlamaContext], None]) -> Callable[[context.LlamaContext], None]:
        def step(cache: context.LlamaContext) -> None:
            streams = sum(job.generating for job in cache.jobs.values())
            call(cache)
            self._cut(streams)

        return step

    def _cut(self, streams: int) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self._last is not None:
            wall, busy = now - self._last[0], cpu - self._last[1]
            self.steps.append(Step(streams, wall, wall - self._inside, busy - self._inside_cpu, self._outside))
        if self._rested is not None:
            self._rested = self._rested[0], self._rested[1] - self._inside
        self._last, self._inside, self._inside_cpu, self._outside = (now, cpu), 0.0, 0.0, 0.0

    def installed(self) -> ExitStack:
        stack = ExitStack()
        for name, call in vars(binding.short).items():
            stack.enter_context(patch.object(binding.short, name, self.timed(call)))
        # Where a step is given ahead of time, asking for its logits is what ends it; else it is over when decode is.
        stack.enter_context(patch.object(binding.waiting, "get_logits", self.ending(binding.waiting.get_logits)))
        wrapped = {"llama_decode": self.decoding, "llama_synchronize": self.ending}
        for name, wrap in wrapped.items():
            stack.enter_context(patch.object(binding.lib, name, wrap(getattr(binding.lib, name))))
        stack.enter_context(patch.object(context.LlamaContext, "step", self.step(context.LlamaContext.step)))
        return stack


def ahead() -> AbstractContextManager[Any]:
    """As with a library built for GPUs: the next step is given before the last is told. Here it is over when given."""
    return patch.object(binding.lib, "llama_supports_gpu_offload", lambda: True)


@contextmanager
def tiny_model() -> Iterator[Path]:
    with TemporaryDirectory(prefix="modelyard-step-") as folder:
        file = Path(folder) / "tiny.gguf"
        selftest.write_tiny_model(file)
        yield file


def row(streams: int, steps: list[Step]) -> Row:
    full = [step for step in steps if step.streams == streams]
    columns = zip(*((s.wall, s.python, s.cpu, s.waits) for s in full), strict=True)
    wall, python, cpu, waits = (statistics.median(values) for values in columns)
    return Row(streams, len(full), wall, python, cpu, waits)


async def opened(file: Path, threads: int, streams: int) -> LlamaCppEngine:
    options = llama_cpp.Options(path=str(file), n_threads=threads, speculation="off")
    engine = llama_cpp.create(EngineSpec("bench", options, {"main": CacheInfo(1024, streams)}))
    assert isinstance(engine, LlamaCppEngine)
    await engine.open(lambda *_: None)
    return engine


async def speak(engine: LlamaCppEngine, streams: int, tokens: int, sampling: Sampling) -> None:
    async def one(number: int) -> None:
        ids = [(number * 7919 + at * 104729) % engine.n_vocab for at in range(_PROMPT)]
        prompt = Prompt(parts=(TokenRun(ids),), sampling=sampling, max_tokens=tokens, session=str(number))
        async for batch in engine.generate(prompt):
            if isinstance(batch[-1], End) and batch[-1].error is not None:
                raise batch[-1].error

    await asyncio.gather(*(one(number) for number in range(streams)))


async def measure(file: Path, threads: int, streams: int, tokens: int, sampling: Sampling) -> Row:
    engine, clock = await opened(file, threads, streams), Clock()
    try:
        await speak(engine, streams, 4, sampling)
        with clock.installed():
            await speak(engine, streams, tokens, sampling)
    finally:
        await engine.close()
    return row(streams, clock.steps)


async def profile(file: Path, threads: int, streams: int, tokens: int, sampling: Sampling) -> None:
    """Of the engine's own thread: `cProfile` sees one thread only, so its loop is run under it."""
    engine, profiler = await opened(file, threads, streams), cProfile.Profile()
    plain = context.LlamaContext.step
    try:
        with patch.object(context.LlamaContext, "step", lambda cache: profiler.runcall(plain, cache)):
            await speak(engine, streams, tokens, sampling)
    finally:
        await engine.close()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def shown(rows: list[Row]) -> Table:
    table = Table(title="A decode step, and what of it is Python")
    for name in ("streams", "steps", "step ms", "python µs", "cpu µs", "share", f"target {TARGET:.0%}", "waits µs"):
        table.add_column(name, justify="right")
    for each in rows:
        verdict = "met" if each.share < TARGET else "missed"
        cells = f"{each.wall * 1e3:.2f}", f"{each.python * 1e6:.0f}", f"{each.cpu * 1e6:.0f}", f"{each.share:.2%}"
        table.add_row(str(each.streams), str(each.steps), *cells, verdict, f"{each.waits * 1e6:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    asked = parser.parse_args()
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1) if asked.sampled else Sampling(temperature=0)
    with ExitStack() as stack:
        if asked.ahead:
            stack.enter_context(ahead())
        file = asked.model or (stack.enter_context(tiny_model()) if asked.ahead else fetch())
        if asked.profile:
            asyncio.run(profile(file, asked.threads, max(asked.streams), asked.tokens, sampling))
            return
        rows = [asyncio.run(measure(file, asked.threads, n, asked.tokens, sampling)) for n in asked.streams]
        Console().print(shown(rows))


if __name__ == "__main__":
    main()
