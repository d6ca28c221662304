"""The results of a run as tables for people, and as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modelyard.benchmark.load import Round
from modelyard.benchmark.results import BenchmarkResults, Pairing, Summary
from modelyard.benchmark.statistics import Distribution

_WIDTH = 120
_PERCENTILES = "p50/p90/p99"
_STYLES = {"better": "green", "worse": "red"}


def show(results: BenchmarkResults, out: Console) -> None:
    if not out.is_terminal:  # do not wrap lines in a file
        out = Console(file=out.file, width=max(out.width, _WIDTH))
    for target in results.targets:
        out.print(f"[bold]{target.label}[/bold] {escape(target.name)} [dim]{escape(target.model)}[/dim]")
    table = _summary_table(results)
    out.print(table if table.row_count else "nothing was measured")
    if len(results.targets) > 1 and (pairings := results.pairings()):
        out.print()
        out.print(_comparison_table(pairings))
    out.print()
    for note in notes(results):
        out.print(f"[dim]· {escape(note)}[/dim]", highlight=False, soft_wrap=True)
    for line in _errors(results):
        out.print(f"[red]error[/red] {escape(line)}", highlight=False, soft_wrap=True)


def _summary_table(results: BenchmarkResults) -> Table:
    columns = (f"TTFT ms\n{_PERCENTILES}", f"ITL ms\n{_PERCENTILES}", "tok/s\na stream", "tok/s\nin all", "req/s")
    table = _table("", "streams", "answers", *columns)
    for target, found, _ in results.summaries():
        failed = sum(found.errors.values())
        answers = f"{found.answers}" + (f" [red]+{failed} failed[/red]" if failed else "")
        total = found.tokens_per_s
        margin = f" ± {_number(total.high - total.middle)}" if math.isfinite(total.high) else ""
        table.add_row(
            target.label,
            str(found.streams),
            answers,
            _milliseconds(found.ttft_s),
            _milliseconds(found.gap_s),
            _number(found.stream_rate.mean),
            _number(total.middle) + margin,
            _number(found.requests_per_s.middle),
        )
    return table


def _comparison_table(pairings: list[Pairing]) -> Table:
    others = {pairing.target.label for pairing in pairings}
    other = others.pop() if len(others) == 1 else "other"
    table = _table("", "streams", "", pairings[0].first.label, other, "ratio", "")
    for pairing in pairings:
        found = pairing.found
        what = f"{pairing.target.label} over {pairing.first.label}"
        sides = [_mean(side, found.unit) for side in (found.second, found.first)]
        style = _STYLES.get(found.verdict)
        verdict = f"[{style}]{pairing.target.label} is {found.verdict}[/{style}]" if style else found.verdict
        table.add_row(what, str(found.streams), found.figure, *sides, _ratio(pairing), verdict)
    return table


def _mean(values: Sequence[float], unit: str) -> str:
    if not values:
        return "–"
    return f"{_number(fmean(values) * 1000)} ms" if unit == "s" else _number(fmean(values))


def _ratio(pairing: Pairing) -> str:
    ratio = pairing.found.ratio
    if ratio is None:
        return "–"
    if not math.isfinite(ratio.high):
        return f"{ratio.middle:.3f}"
    high = f"{ratio.high:.3f}" if ratio.high < 100 else f"{ratio.high:.0e}"
    return rf"{ratio.middle:.3f} \[{ratio.low:.3f}, {high}]"


def notes(results: BenchmarkResults) -> list[str]:
    plan, workload = results.plan, results.plan.workload
    turns = f", {workload.turns} turns of {workload.turn_tokens} more" if workload.turns > 1 else ""
    lines = [
        f"workload {workload.name}: prompts of {workload.prompt_tokens} tokens{turns}, "
        f"outputs of at most {workload.output_tokens}; {plan.rounds} rounds; --seed {plan.seed}",
        "TTFT: time to the first token; ITL: between two tokens; rates are means, ± of 95 % over the rounds",
        *results.notes,
        *_lengths(results),
    ]
    if len(results.targets) > 1:
        lines.append("the rounds of all targets are interleaved; the intervals of all lines hold together with 95 %")
        if plan.rounds < 2:
            lines.append("one round gives no interval: nothing can be called better or worse")
    if results.is_interrupted:
        lines.append("interrupted: only what was measured until then")
    return lines


def _lengths(results: BenchmarkResults) -> list[str]:
    """The measured lengths, once for all numbers of streams where they are equal."""
    lines: dict[tuple[str, str], list[str]] = {}
    for target, found, _ in results.summaries():
        lines.setdefault((target.label, _length(found)), []).append(str(found.streams))
    return [f"{label} at {', '.join(streams)}: {line}" for (label, line), streams in lines.items()]


def _length(found: Summary) -> str:
    if not found.answers:
        return "no response"
    prompt, cached, output = (
        f"{tokens / found.answers:.0f}" for tokens in (found.prompt_tokens, found.cached_tokens, found.output_tokens)
    )
    if found.is_counted:
        return f"{output} chunks of output, each counted as a token: the server reports no usage"
    return f"{prompt} prompt tokens, {cached} of them cached, {output} output tokens"


def _errors(results: BenchmarkResults) -> list[str]:
    lines = [f"{count} × in the warm-up: {error}" for error, count in results.warmup_errors.items()]
    for target, found, _ in results.summaries():
        lines += [f"{count} × {target.label} at {found.streams}: {error}" for error, count in found.errors.items()]
    return lines


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if not place or not column else "right", overflow="fold")
    return table


def _milliseconds(values: Distribution) -> str:
    return "/".join(_number(value * 1000) for value in (values.p50, values.p90, values.p99))


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    digits = next((digits for least, digits in ((100, 0), (10, 1), (1, 2)) if abs(value) >= least), None)
    return f"{value:.2g}" if digits is None else f"{value:,.{digits}f}"


# --- JSON -------------------------------------------------------------------------------------------------------------


def values(results: BenchmarkResults) -> dict[str, Any]:
    plan = results.plan
    return {
        "workload": msgspec.to_builtins(plan.workload),
        "plan": {name: getattr(plan, name) for name in ("streams", "rounds", "requests", "seconds", "warmup", "seed")},
        "subjects": [msgspec.to_builtins(target) for target in results.targets],
        "results": [
            {"subject": target.label, **msgspec.to_builtins(found), "of_rounds": [_round(one) for one in rounds]}
            for target, found, rounds in results.summaries()
        ],
        "comparisons": [
            {"subject": one.target.label, "over": one.first.label, **msgspec.to_builtins(one.found)}
            for one in results.pairings()
        ],
        "warmup_errors": results.warmup_errors,
        "notes": notes(results),
        "interrupted": results.is_interrupted,
    }


def _round(one: Round) -> dict[str, Any]:
    """Every sample without its gaps, which are many; `rate` summarizes them."""
    fields = ("began_s", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "total_s", "rate", "error")
    return {"wall_s": one.wall_s, "samples": [{f: getattr(sample, f) for f in fields} for sample in one.samples]}
