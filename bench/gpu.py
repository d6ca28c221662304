"""Decoding on a GPU: our engine in process beside llama.cpp's own benchmarks, on one model, in interleaved rounds.

    python -m bench.gpu --model FILE [--tools FOLDER] [--rounds N] [--tokens N] [--json FILE]
    python -m bench.gpu --model FILE --graph [--rounds N] [--tokens N]
    python -m bench.gpu --model FILE --fit MIB [--tokens N]

FOLDER holds `llama-bench` and `llama-batched-bench` of the same build as the library that the engine loads; without it
our engine runs alone. A step of a small model takes half a millisecond there, so that the cost of Python shows. The
benchmark programs sample no tokens, while our engine picks the most likely one of each row: the ratio is not flattered.
Then it samples, and the rates are compared with that of greedy decoding in the same round: `bench.random_model
--spread 6` makes the logits like those of a trained model. "python" is the share of a step that is not spent inside
C calls (see `bench.decode_step`), from a separate run, because the clock costs time itself; "waits" is the part of it
for which the GPU waits; the rest overlaps with the next step. `--graph` samples with a temperature alone, which on
NVIDIA GPUs llama.cpp's graph does, beside the CPU's sampler on the same engine: long streams, and streams of requests
of about 64 tokens that come and go. `--fit` loads the model into so much of the GPU's memory
as `fit` chooses, beside the same number of layers without its other choices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench import decode_step
from modelyard.core.engine import CacheInfo, End, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard_bench.statistics import Interval, ratio_interval

STREAMS = (1, 8)
_PROMPT = 64  # tokens
_GREEDY = Sampling(temperature=0)
_SAMPLED = {
    "temperature": Sampling(temperature=0.8),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "top_k top_p min_p": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
}
_CONTEXT = 8 * 2048


class GpuResult(Struct, frozen=True):
    """Tokens per second of all streams together, one value per round."""

    streams: int
    ours: list[float]
    sampled: dict[str, list[float]]
    peer: list[float]
    python: float
    python_us: float
    step_ms: float
    waits: float
    waits_us: float
    sampled_waits_us: dict[str, float]

    @property
    def ratio(self) -> Interval | None:
        return ratio_interval(self.ours, self.peer) if self.peer else None


async def rate(engine: LlamaCppEngine, streams: int, tokens: int, sampling: Sampling, seed: int) -> float:
    """Tokens per second while all streams run."""
    times: list[list[tuple[float, int]]] = [[] for _ in range(streams)]

    async def one(number: int) -> None:
        ids = [(number * 7919 + at * 104729 + seed) % engine.n_vocab for at in range(_PROMPT)]
        prompt = Prompt(parts=(TokenRun(ids),), sampling=sampling, max_tokens=tokens, session=f"{seed}-{number}")
        async for batch in engine.generate(prompt):
            count = sum(len(each.ids) for each in batch if isinstance(each, Tokens))
            times[number].append((time.perf_counter(), count))
            if isinstance(batch[-1], End) and batch[-1].error is not None:
                raise batch[-1].error

    await asyncio.gather(*(one(number) for number in range(streams)))
    begin, end = max(stream[0][0] for stream in times), min(stream[-1][0] for stream in times)
    generated = sum(count for stream in times for at, count in stream if begin < at <= end)
    return generated / (end - begin)


async def our_rates(file: Path, streams: int, tokens: int, seed: int) -> list[float]:
    """Greedily, then sampled in each way."""
    engine = await decode_step.open_engine(file, 1, streams)
    try:
        await rate(engine, streams, 16, _GREEDY, seed + 1)
        kinds = (_GREEDY, *_SAMPLED.values())
        return [await rate(engine, streams, tokens, kind, seed + at) for at, kind in enumerate(kinds, 2)]
    finally:
        await engine.close()


def llama_bench(tools: Path, file: Path, tokens: int) -> float:
    argv = [tools / "llama-bench", "-m", file, "-ngl", "99", "-p", "0", "-n", str(tokens), "-r", "3", "-o", "json"]
    out = subprocess.run(list(map(str, argv)), capture_output=True, check=True, timeout=300).stdout
    return float(json.loads(out)[0]["avg_ts"])


def llama_batched_bench(tools: Path, file: Path, streams: int, tokens: int) -> float:
    options = ["-npp", str(_PROMPT), "-ntg", str(tokens), "-npl", str(streams), "-c", str(_CONTEXT)]
    argv = [tools / "llama-batched-bench", "-m", file, "-ngl", "99", *options, "--output-format", "jsonl"]
    out = subprocess.run(list(map(str, argv)), capture_output=True, check=True, timeout=300).stdout.decode()
    (found,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return float(found["speed_tg"])


def measure(file: Path, tools: Path | None, streams: int, rounds: int, tokens: int) -> GpuResult:
    own: list[list[float]] = []
    peer: list[float] = []
    for round_ in range(rounds):
        own.append(asyncio.run(our_rates(file, streams, tokens, 1000 * round_)))
        if tools is not None:
            peer.append(
                llama_bench(tools, file, tokens) if streams == 1 else llama_batched_bench(tools, file, streams, tokens)
            )
    greedy, *sampled = ([each[at] for each in own] for at in range(len(_SAMPLED) + 1))
    row = asyncio.run(decode_step.measure(file, 1, streams, tokens, _GREEDY))
    shares = row.python_share, row.python * 1e6, row.wall * 1e3, row.waiting_share, row.waits * 1e6
    waits = {
        name: asyncio.run(decode_step.measure(file, 1, streams, tokens, kind)).waits * 1e6
        for name, kind in _SAMPLED.items()
    }
    return GpuResult(streams, greedy, dict(zip(_SAMPLED, sampled, strict=True)), peer, *shares, waits)


# --- sampling in llama.cpp's graph ------------------------------------------------------------------------------------

_LENGTHS = (48, 80, 56, 72, 64, 52, 76, 60, 68, 64)  # tokens of requests that come and go
_MOST_REQUESTS = 5000


async def coming_rate(engine: LlamaCppEngine, streams: int, seed: int, requests: int) -> float:
    """Tokens per second until the first stream has no more requests."""
    times: list[list[tuple[float, int]]] = [[] for _ in range(streams)]

    async def one(number: int) -> None:
        for at in range(requests):
            ids = [(number * 7919 + place * 104729 + seed + 31 * at) % engine.n_vocab for place in range(_PROMPT)]
            length = _LENGTHS[(3 * number + at) % len(_LENGTHS)]
            sampling = _SAMPLED["temperature"]
            prompt = Prompt(parts=(TokenRun(ids),), sampling=sampling, max_tokens=length, session=str(number))
            async for batch in engine.generate(prompt):
                count = sum(len(each.ids) for each in batch if isinstance(each, Tokens))
                times[number].append((time.perf_counter(), count))
                if isinstance(batch[-1], End) and batch[-1].error is not None:
                    raise batch[-1].error

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(streams)))
    end = min(stream[-1][0] for stream in times)
    return sum(count for stream in times for at, count in stream if at <= end) / (end - began)


async def graph_rates(
    file: Path, streams: int, rounds: int, tokens: int, requests: int = 6
) -> dict[str, dict[str, list[float]]]:
    """Of long streams and of requests that come and go: on the CPU and in the graph, in alternating rounds."""
    engine = await decode_step.open_engine(file, 1, streams)
    context, kind = engine._contexts[0], _SAMPLED["temperature"]
    sampler = context.graph_sampler
    found: dict[str, dict[str, list[float]]] = {"long": {}, "short": {}}
    try:
        if sampler is None:
            raise SystemExit("llama.cpp's graph does not sample this model: it needs an NVIDIA GPU that has all layers")
        for round_ in range(rounds):
            for where in ("cpu", "graph") if round_ % 2 else ("graph", "cpu"):
                context.graph_sampler = sampler
                await rate(engine, streams, 8, _GREEDY, round_)  # ends sampling in the graph
                for number in range(_MOST_REQUESTS if where == "graph" else 0):
                    await rate(engine, streams, 2, kind, number)
                    if sampler.is_active:
                        break
                if where == "cpu":
                    context.graph_sampler = None
                found["long"].setdefault(where, []).append(await rate(engine, streams, tokens, kind, round_))
                found["short"].setdefault(where, []).append(await coming_rate(engine, streams, round_, requests))
    finally:
        await engine.close()
    return found


def show_graph(file: Path, streams: int, rounds: int, tokens: int) -> None:
    for name, rates in asyncio.run(graph_rates(file, streams, rounds, tokens)).items():
        means = ", ".join(f"{where} {statistics.fmean(values):,.0f}" for where, values in rates.items())
        print(f"{streams} {name}: {means} tokens/s, {ratio_interval(rates['graph'], rates['cpu'])}", flush=True)


# --- a model that is larger than the GPU ------------------------------------------------------------------------------


async def fitted_rate(file: Path, limit_mb: int, tokens: int, **options: Any) -> tuple[float, str]:
    """Tokens per second of one stream, and how the model was fitted to this much GPU memory."""
    chosen = llama_cpp.Options(path=str(file), speculation="off", gpu_memory_mb=limit_mb, **options)
    engine = llama_cpp.create(EngineSpec("bench", chosen, {"main": CacheInfo(8192, 2)}))
    assert isinstance(engine, LlamaCppEngine)
    before = sum(gpu.free for gpu in lib.gpu_devices())
    await engine.open(lambda *_: None)
    try:
        taken = (before - sum(gpu.free for gpu in lib.gpu_devices())) >> 20
        await rate(engine, 1, 16, _GREEDY, 1)
        found = await rate(engine, 1, tokens, _GREEDY, 2)
    finally:
        await engine.close()
    used: llama_cpp.Options = engine.spec.options
    info = engine.spec.caches["main"]
    placed = f"n_gpu_layers {used.n_gpu_layers}, n_cpu_moe {used.n_cpu_moe}, KV {info.type_k}, window {info.window}"
    return found, f"{placed}, {taken:,} MiB of {limit_mb:,} taken"


def show_fit(file: Path, limit_mb: int, tokens: int) -> None:
    for name, options in (("fit", {"fit": True}), ("n_gpu_layers = auto", {})):
        found, placed = asyncio.run(fitted_rate(file, limit_mb, tokens, **options))
        print(f"{name}: {found:,.1f} tokens/s; {placed}", flush=True)


def table(lines: list[GpuResult]) -> Table:
    made = Table(title="Decoding, tokens/s (means)")
    for name in ("streams", "ours", "peer", "ratio", "step ms", "python µs", "python", "waits µs", "waits"):
        made.add_column(name, justify="right")
    for line in lines:
        rates = (f"{statistics.fmean(each):,.0f}" if each else "–" for each in (line.ours, line.peer))
        ours = f"{line.step_ms:.3f}", f"{line.python_us:.0f}", f"{line.python:.1%}"
        waits = f"{line.waits_us:.0f}", f"{line.waits:.1%}"
        made.add_row(str(line.streams), *rates, _shown(line.ratio), *ours, *waits)
    return made


def sampled_table(lines: list[GpuResult]) -> Table:
    made = Table(title="Sampled, tokens/s (means), beside greedy")
    for name in ("streams", "sampling", "tokens/s", "ratio", "waits µs"):
        made.add_column(name, justify="right")
    for line in lines:
        for name, found in line.sampled.items():
            ratio, waits = _shown(ratio_interval(found, line.ours)), f"{line.sampled_waits_us[name]:.0f}"
            made.add_row(str(line.streams), name, f"{statistics.fmean(found):,.0f}", ratio, waits)
    return made


def _shown(ratio: Interval | None) -> str:
    return "–" if ratio is None else str(ratio).replace("[", r"\[")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tools", type=Path, help="a folder with llama-bench and llama-batched-bench")
    parser.add_argument("--graph", action="store_true", help="measure sampling in llama.cpp's graph")
    parser.add_argument("--fit", type=int, metavar="MIB", help="measure a model in this much of the GPU's memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.fit is not None:
        show_fit(options.model, options.fit, options.tokens)
        return
    if options.graph:
        for streams in options.streams:
            show_graph(options.model, streams, options.rounds, options.tokens)
        return
    lines = [measure(options.model, options.tools, n, options.rounds, options.tokens) for n in options.streams]
    Console(width=140).print(table(lines), sampled_table(lines))
    if options.json is not None:
        options.json.write_text(json.dumps([{name: getattr(x, name) for name in x.__struct_fields__} for x in lines]))


if __name__ == "__main__":
    main()
