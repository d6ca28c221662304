"""The results of a run as a drawing: each metric over the number of streams, and ratios with their intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from modelyard.benchmark.drawing import Circle, Drawing, DrawingShape, Label, Point, Polyline
from modelyard.benchmark.results import BenchmarkResults, Pairing, Summary
from modelyard.benchmark.statistics import Interval

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
    for place, target in enumerate(results.targets):
        x = 16 + place * 300
        shapes.append(Circle((x + 4, 48), _COLOURS[place % len(_COLOURS)]))
        shapes.append(Label((x + 14, 52), f"{target.label}: {target.name} {target.model}".strip()[:44], size=11))
    for place, (name, value) in enumerate(_PANELS.items()):
        lines = [
            [(found.streams, value(found)) for t, found, _ in summaries if t == target] for target in results.targets
        ]
        shapes += _panel(name, lines, _LEFT + place * _PANEL_STEP)
    below = _TOP + _PANEL_HEIGHT + 60
    shapes += _ratios(pairings, below)
    return Drawing(_WIDTH, below + (_ROW * len(pairings) + 36 if pairings else 0), tuple(shapes))


# --- metrics over streams ---------------------------------------------------------------------------------------------


def _ttft(summary: Summary) -> Interval:
    ttft = summary.ttft_s
    return Interval(ttft.p50 * 1000, ttft.p50 * 1000, ttft.p90 * 1000)


def _stream_rate(summary: Summary) -> Interval:
    return Interval(*[summary.stream_rate.mean] * 3)


def _throughput(summary: Summary) -> Interval:
    found = summary.tokens_per_s
    return found if math.isfinite(found.high) else Interval(*[found.middle] * 3)


_PANELS: dict[str, Callable[[Summary], Interval]] = {
    "time to first token, ms: p50 to p90": _ttft,
    "tokens/s a stream: mean": _stream_rate,
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
