"""The results of a run: tables for the terminal, values for JSON, and a drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modelyard_bench.drawing import Circle, Drawing, DrawingShape, Label, Point, Polyline
from modelyard_bench.load import Round
from modelyard_bench.results import BenchmarkResults, Pairing, Summary
from modelyard_bench.statistics import Distribution, Interval

_MIN_WIDTH = 120
_PERCENTILES = "p50/p90/p99"
_STYLES = {"better": "green", "worse": "red"}


def show(results: BenchmarkResults, out: Console) -> None:
    if not out.is_terminal:  # do not wrap lines in a file
        out = Console(file=out.file, width=max(out.width, _MIN_WIDTH))
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
        table.add_row(what, str(found.streams), found.figure, *sides, _ratio(found.ratio), verdict)
    return table


def _mean(values: Sequence[float], unit: str) -> str:
    if not values:
        return "–"
    return f"{_number(fmean(values) * 1000)} ms" if unit == "s" else _number(fmean(values))


def _ratio(ratio: Interval | None) -> str:
    if ratio is None or not math.isfinite(ratio.high):
        return "–" if ratio is None else f"{ratio.middle:.3f}"
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
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if not index or not column else "right", overflow="fold")
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


# --- the drawing: each metric over the number of streams, and ratios with their intervals -----------------------------

_COLOURS = ("#1f6fb4", "#d9640f", "#2a8a3e", "#8a4fbf", "#b0302f", "#5f5f5f")
_VERDICT_COLOURS = {"better": "#2a8a3e", "worse": "#b0302f"}
_WIDTH, _LEFT, _TOP, _PANEL_STEP = 960, 70, 84, 295
_PANEL_WIDTH, _PANEL_HEIGHT = 250, 200
_ROW, _RATIO_CENTRE, _RATIO_WIDTH = 24, 600, 300

Mark = tuple[int, Interval]  # a number of streams, and the value there with its interval


def plot(results: BenchmarkResults) -> Drawing:
    summaries = list(results.summaries())
    # A ratio of one round has no interval to draw.
    pairings = [
        (one, ratio)
        for one in results.pairings()
        if (ratio := one.found.ratio) is not None and math.isfinite(ratio.high) and ratio.low > 0
    ]
    workload = results.plan.workload
    title = f"{workload.name}: prompts of {workload.prompt_tokens} tokens, outputs of {workload.output_tokens}"
    shapes: list[DrawingShape] = [Label((16, 26), title, size=16)]
    for index, target in enumerate(results.targets):
        x = 16 + index * 300
        shapes.append(Circle((x + 4, 48), _COLOURS[index % len(_COLOURS)]))
        shapes.append(Label((x + 14, 52), f"{target.label}: {target.name} {target.model}".strip()[:44], size=11))
    for index, (name, value) in enumerate(_PANELS.items()):
        lines = [
            [(found.streams, value(found)) for t, found, _ in summaries if t == target] for target in results.targets
        ]
        shapes += _panel(name, lines, _LEFT + index * _PANEL_STEP)
    below = _TOP + _PANEL_HEIGHT + 60
    shapes += _ratios(pairings, below)
    return Drawing(_WIDTH, below + (_ROW * len(pairings) + 36 if pairings else 0), tuple(shapes))


# --- metrics over streams ---------------------------------------------------------------------------------------------


def _throughput(summary: Summary) -> Interval:
    found = summary.tokens_per_s
    return found if math.isfinite(found.high) else Interval(*[found.middle] * 3)


_PANELS: dict[str, Callable[[Summary], Interval]] = {
    "time to first token, ms: p50 to p90": lambda one: Interval(
        *(1000 * value for value in (one.ttft_s.p50, one.ttft_s.p50, one.ttft_s.p90))
    ),
    "tokens/s a stream: mean": lambda one: Interval(*[one.stream_rate.mean] * 3),
    "tokens/s in all: mean with 95 %": _throughput,
}


class _Axes(Struct, frozen=True):
    left: float
    top: float  # the value at the upper end
    streams: tuple[int, ...]

    def x(self, streams: int) -> float:
        return self.left + _PANEL_WIDTH * (self.streams.index(streams) + 0.5) / len(self.streams)

    def y(self, value: float) -> float:
        return _TOP + 20 + _PANEL_HEIGHT * (1 - max(0.0, value) / self.top)

    def at(self, mark: Mark) -> Point:
        return self.x(mark[0]), self.y(mark[1].middle)

    def draw(self) -> Iterator[DrawingShape]:
        right = self.left + _PANEL_WIDTH
        yield Polyline(((self.left, self.y(self.top)), (self.left, self.y(0)), (right, self.y(0))), "#888888")
        for share in (0.0, 0.5, 1.0):
            yield Label((self.left - 6, self.y(self.top * share) + 4), f"{self.top * share:.3g}", "end", 10)
        for streams in self.streams:
            yield Label((self.x(streams), self.y(0) + 16), f"{streams}", "middle", 10)
        yield Label((right, self.y(0) + 30), "streams", "end", 10, "#666666")


def _panel(title: str, lines: Sequence[Sequence[Mark]], left: float) -> Iterator[DrawingShape]:
    finite = [[mark for mark in line if math.isfinite(mark[1].middle)] for line in lines]
    marks = [mark for line in finite for mark in line]
    top = max((value.high for _, value in marks), default=0.0) * 1.08 or 1.0
    axes = _Axes(left, top, tuple(sorted({streams for streams, _ in marks})))
    yield Label((left, _TOP + 8), title)
    yield from axes.draw()
    for number, line in enumerate(finite):
        colour = _COLOURS[number % len(_COLOURS)]
        if len(line) > 1:
            yield Polyline(tuple(axes.at(mark) for mark in line), colour, 2.0)
        for mark in line:
            x, value = axes.x(mark[0]), mark[1]
            yield Polyline(((x, axes.y(value.low)), (x, axes.y(value.high))), colour)
            yield Circle(axes.at(mark), colour)


# --- ratios -----------------------------------------------------------------------------------------------------------


def _ratios(pairings: Sequence[tuple[Pairing, Interval]], top: float) -> Iterator[DrawingShape]:
    """On a logarithmic scale: 0.5x is as far to the left of 1x as 2x is to the right."""
    if not pairings:
        return
    ends = [abs(math.log(end)) for _, ratio in pairings for end in (ratio.low, ratio.high)]
    widest = 1.05 * max(0.1, *ends)

    def x(ratio: float) -> float:
        return _RATIO_CENTRE + _RATIO_WIDTH * math.log(ratio) / widest

    bottom = top + _ROW * len(pairings)
    yield Polyline(((x(1), top - 4), (x(1), bottom)), "#888888", 1.5)
    for tick in (math.exp(-widest), 1.0, math.exp(widest)):
        yield Label((x(tick), bottom + 16), f"{tick:.2f}x", "middle", 10)
    for number, (one, ratio) in enumerate(pairings):
        y = top + _ROW * (number + 0.5)
        colour = _VERDICT_COLOURS.get(one.found.verdict, "#5f5f5f")
        what = f"{one.target.label} over {one.first.label} at {one.found.streams}: {one.found.figure}"
        yield Label((16, y + 4), what, size=11)
        yield Polyline(((x(ratio.low), y), (x(ratio.high), y)), colour, 2.0)
        yield Circle((x(ratio.middle), y), colour)
