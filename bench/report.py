"""Results as a table for people: ours, LiteLLM's, their ratio, and the target beside them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench import growth, litellm_proxy
from bench.measure import Sample, Samples
from bench.phases import OURS, PASSING_ON, THEIRS, Results
from bench.stats import Latencies, Repeated
from bench.subjects import TOKENS


class Row(Struct, frozen=True):
    what: str
    ours: str
    theirs: str = ""
    ratio: str = ""
    target: str = ""
    met: bool | None = None


def show(results: Results, console: Console) -> None:
    table = Table(title="The gateway beside a LiteLLM proxy", title_justify="left", expand=False)
    table.add_column("")
    for name in (OURS, THEIRS, "ratio", "target"):
        table.add_column(name, justify="right")
    for row in rows(results):
        mark = {None: "", True: " [green]✓[/green]", False: " [red]✗[/red]"}[row.met]
        table.add_row(row.what, row.ours, row.theirs, row.ratio, row.target + mark)
    console.print(table)
    for note in notes(results):
        console.print(f"[dim]· {note}[/dim]", highlight=False)


def rows(results: Results) -> Iterator[Row]:
    yield from _requests(results.requests)
    yield from _events(results.events)
    yield from _streams(results)
    added, grown = results.added, results.growth
    yield Row("added TTFT p50, one request at a time", _ms(added.p50), target="≤ 1 ms", met=added.p50 <= 1)
    yield Row("added TTFT p99", _ms(added.p99), target="≤ 5 ms", met=added.p99 <= 5)
    name = f"{grown.tokens:,} tokens grow by {growth.GROWTH}: render + tokenize"
    yield Row(name, _ms(grown.turn_median), target="≤ 2 ms", met=grown.turn_median <= 2)
    yield Row("   the slowest turn", _ms(grown.turn_max))
    yield Row("   the first time, all of it", _ms(grown.first))
    yield Row("   reading the JSON body", _ms(grown.read_median))


def _requests(found: dict[str, Samples]) -> Iterator[Row]:
    per_cpu = {name: samples.of(lambda s: s.answers_per_cpu_s) for name, samples in found.items()}
    yield _compared("requests per CPU-second", per_cpu, 5000, 50)
    yield from _beside_a_proxy(per_cpu, 50)
    yield _compared("requests/s, one process", {n: s.of(lambda s: s.answers_per_s) for n, s in found.items()})


def _events(found: dict[str, Samples]) -> Iterator[Row]:
    per_cpu = {name: samples.of(lambda s: s.events_per_cpu_s) for name, samples in found.items()}
    yield _compared("SSE events per CPU-second", per_cpu)
    yield from _beside_a_proxy(per_cpu)
    yield _compared("SSE events/s, one process", {n: s.of(lambda s: s.events_per_s) for n, s in found.items()})


def _beside_a_proxy(found: dict[str, Repeated], times: float = 0) -> Iterator[Row]:
    if PASSING_ON in found:
        yield _compared("   beside LiteLLM with a server behind it", {**found, THEIRS: found[PASSING_ON]}, times=times)


def _compared(what: str, found: dict[str, Repeated], target: float = 0, times: float = 0) -> Row:
    ours, theirs = found[OURS], found.get(THEIRS)
    ratio = ours.over(theirs) if theirs is not None else None
    wanted = [f"≥ {target:,.0f}"] if target else []
    met = ours.median >= target
    if times and ratio is not None:
        wanted.append(f"≥ {times:.0f}×")
        met = met and ratio.median >= times
    return Row(
        what,
        _spread(ours),
        _spread(theirs) if theirs is not None else "",
        _spread(ratio, "×", 1) if ratio is not None else "",
        ", ".join(wanted),
        met if wanted else None,
    )


def _streams(results: Results) -> Iterator[Row]:
    ours, theirs = results.streams, results.litellm_streams
    flying = ours.of(lambda s: s.outcome.in_flight).median
    yield Row("streams at a time", f"{flying:,.0f}", f"{theirs.outcome.in_flight:,}" if theirs else "")
    errors = str(theirs.outcome.errors) if theirs else ""
    yield Row("   errors", str(ours.errors), errors, target="0", met=ours.errors == 0)
    for what, name in (
        ("TTFT p50", "ttft_p50"),
        ("TTFT p99", "ttft_p99"),
        ("inter-token p50", "gap_p50"),
        ("inter-token p99", "gap_p99"),
    ):
        measured = _ms(getattr(theirs.outcome.latencies, name)) if theirs else ""
        yield Row(f"   {what}", _ms(ours.of(lambda s, name=name: _latency(s, name)).median), measured)  # type: ignore[misc]
    cores = ours.of(lambda s: s.cpu_s / s.outcome.seconds).median
    yield Row("   CPU, cores", f"{cores:.2f}", f"{theirs.cpu_s / theirs.outcome.seconds:.2f}" if theirs else "")
    rss = ours.of(lambda s: s.rss_mb).median
    yield Row("   RSS", f"{rss:.0f} MB", f"{theirs.rss_mb:.0f} MB" if theirs else "", target="< 300 MB", met=rss < 300)


def _latency(sample: Sample, name: str) -> float:
    found = sample.outcome.latencies
    return float(getattr(found, name)) if isinstance(found, Latencies) else float("nan")


def _spread(found: Repeated, unit: str = "", digits: int = 0) -> str:
    spread = f" ±{found.spread:.0%}" if len(found.values) > 1 else ""
    return f"{found.median:,.{digits}f}{unit}{spread}"


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def notes(results: Results) -> Iterator[str]:
    plan = results.plan
    yield f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    yield "load: bench/load.py, a process of its own (raw sockets on uvloop); its CPU is not counted"
    yield (
        f"fake engine behind SmolLM2's own tokenizer and template, {TOKENS} tokens out, no two prompts alike; "
        f"{plan.connections} connections; median of {plan.rounds} interleaved round(s) of {plan.seconds:.0f} s, "
        "± half the range"
    )
    yield (
        f"concurrent streams: {plan.rate:.0f} tokens/s each, every connection asks again when its stream ends, for "
        f"{plan.stream_seconds:.0f} s, {plan.stream_rounds} round(s); TTFT is the first text, not the first event"
    )
    yield (
        f"added TTFT: {plan.turns} streams one after another on a keep-alive connection, in turns with a bare socket "
        f"server whose p50 ({results.added.bare_p50:.2f} ms) is taken off both percentiles"
    )
    if THEIRS in results.requests:
        yield f"LiteLLM {litellm_proxy.VERSION}, one worker, answers from its own mock_response, with nothing behind it"
        yield "with a server behind it: bench/bare.py, which costs next to nothing and is not counted"
        yield "LiteLLM's concurrent streams come from an upstream, bench/bare.py, because a mocked stream has no pace"
    busy = max(
        s.others for samples in (results.requests[OURS], results.events[OURS], results.streams) for s in samples.rounds
    )
    if busy > 0.15:
        yield f"[yellow]other work kept up to {busy:.1f} cores busy: latencies and rates are worse for it[/yellow]"
