"""Decoding on a GPU: our engine in process beside llama.cpp's own benchmarks, on one model, in interleaved rounds.

    python -m bench.gpu --model FILE --tools FOLDER [--rounds N] [--tokens N] [--json FILE]

FOLDER holds `llama-bench` and `llama-batched-bench` of the same build as the library that the engine loads. A step of a
small model takes half a millisecond there, so what Python adds to it shows. The benchmarks choose no tokens at all,
while ours picks the likeliest one of each row: the ratio is not flattered. "python" is the share of a step that is
not spent inside C calls (see `bench.step`), from a run of its own, since the clock costs time itself; "waits" is the
part of it for which the GPU waits, the rest being done while it works at the next step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench import step
from modelyard.core.engine import End, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.engine import LlamaCppEngine

STREAMS = (1, 8)
_PROMPT = 64  # tokens
_GREEDY = Sampling(temperature=0)
_SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1)
_CONTEXT = 8 * 2048


class Line(Struct, frozen=True):
    """Tokens a second of all streams together, a round each."""

    streams: int
    ours: list[float]
    sampled: list[float]
    peer: list[float]
    python: float
    python_us: float
    step_ms: float
    waits: float
    waits_us: float
    sampled_step_ms: float
    sampled_waits_us: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.peer)


async def rate(engine: LlamaCppEngine, streams: int, tokens: int, sampling: Sampling, seed: int) -> float:
    """Of the time in which all streams run."""
    heard: list[list[tuple[float, int]]] = [[] for _ in range(streams)]

    async def one(number: int) -> None:
        ids = [(number * 7919 + at * 104729 + seed) % engine._n_vocab for at in range(_PROMPT)]
        prompt = Prompt(parts=(TokenRun(ids),), sampling=sampling, max_tokens=tokens, session=f"{seed}-{number}")
        async for batch in engine.generate(prompt):
            count = sum(len(each.ids) for each in batch if isinstance(each, Tokens))
            heard[number].append((time.perf_counter(), count))
            if isinstance(batch[-1], End) and batch[-1].error is not None:
                raise batch[-1].error

    await asyncio.gather(*(one(number) for number in range(streams)))
    begin, end = max(times[0][0] for times in heard), min(times[-1][0] for times in heard)
    said = sum(count for times in heard for at, count in times if begin < at <= end)
    return said / (end - begin)


async def ours(file: Path, streams: int, tokens: int, seed: int) -> tuple[float, float]:
    engine = await step.opened(file, 1, streams)
    try:
        await rate(engine, streams, 16, _GREEDY, seed + 1)
        greedy = await rate(engine, streams, tokens, _GREEDY, seed + 2)
        return greedy, await rate(engine, streams, tokens, _SAMPLED, seed + 3)
    finally:
        await engine.close()


def alone(tools: Path, file: Path, tokens: int) -> float:
    argv = [tools / "llama-bench", "-m", file, "-ngl", "99", "-p", "0", "-n", str(tokens), "-r", "3", "-o", "json"]
    told = subprocess.run(list(map(str, argv)), capture_output=True, check=True, timeout=300).stdout
    return float(json.loads(told)[0]["avg_ts"])


def together(tools: Path, file: Path, streams: int, tokens: int) -> float:
    shape = ["-npp", str(_PROMPT), "-ntg", str(tokens), "-npl", str(streams), "-c", str(_CONTEXT)]
    argv = [tools / "llama-batched-bench", "-m", file, "-ngl", "99", *shape, "--output-format", "jsonl"]
    told = subprocess.run(list(map(str, argv)), capture_output=True, check=True, timeout=300).stdout.decode()
    (found,) = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    return float(found["speed_tg"])


def measured(file: Path, tools: Path, streams: int, rounds: int, tokens: int) -> Line:
    own: list[tuple[float, float]] = []
    peer: list[float] = []
    for round_ in range(rounds):
        own.append(asyncio.run(ours(file, streams, tokens, 1000 * round_)))
        peer.append(alone(tools, file, tokens) if streams == 1 else together(tools, file, streams, tokens))
    row = asyncio.run(step.measure(file, 1, streams, tokens, _GREEDY))
    greedy, sampled = ([each[at] for each in own] for at in (0, 1))
    drawn = asyncio.run(step.measure(file, 1, streams, tokens, _SAMPLED))
    shares = row.share, row.python * 1e6, row.wall * 1e3, row.waiting, row.waits * 1e6
    return Line(streams, greedy, sampled, peer, *shares, drawn.wall * 1e3, drawn.waits * 1e6)


def shown(lines: list[Line]) -> Table:
    table = Table(title="Decoding, tokens a second (medians)")
    for name in (
        "streams",
        "ours",
        "peer",
        "ratio",
        "ours, sampled",
        "step ms",
        "python µs",
        "python",
        "waits µs",
        "waits",
        "sampled: step ms",
        "waits µs",
    ):
        table.add_column(name, justify="right")
    for line in lines:
        rates = (f"{statistics.median(each):,.0f}" for each in (line.ours, line.peer))
        ours = f"{line.step_ms:.3f}", f"{line.python_us:.0f}", f"{line.python:.1%}"
        drawn = f"{line.sampled_step_ms:.3f}", f"{line.sampled_waits_us:.0f}"
        rest = *ours, f"{line.waits_us:.0f}", f"{line.waits:.1%}", *drawn
        table.add_row(str(line.streams), *rates, f"{line.ratio:.3f}", f"{statistics.median(line.sampled):,.0f}", *rest)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lines = [measured(asked.model, asked.tools, n, asked.rounds, asked.tokens) for n in asked.streams]
    Console(width=140).print(shown(lines))
    if asked.json is not None:
        asked.json.write_text(json.dumps([{name: getattr(x, name) for name in x.__struct_fields__} for x in lines]))


if __name__ == "__main__":
    main()
