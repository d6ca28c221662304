"""A run as a drawing: each figure over the number of streams, and ratios with their intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from modelyard.benchmark.bench.book import Book, Pairing
from modelyard.benchmark.drawing import Dot, Drawing, Point, Shape, Stroke, Words
from modelyard.benchmark.intervals import Interval
from modelyard.benchmark.summary import Summary

_COLOURS = ("#1f6fb4", "#d9640f", "#2a8a3e", "#8a4fbf", "#b0302f", "#5f5f5f")
_JUDGED = {"better": "#2a8a3e", "worse": "#b0302f"}
_WIDTH, _LEFT, _TOP, _APART = 960, 70, 84, 295
_WIDE, _HIGH = 250, 200  # of a panel
_ROW, _MIDDLE, _REACH = 24, 600, 300  # of the ratios

Mark = tuple[int, Interval]  # a number of streams, and the value there with what it reaches to


def plot(book: Book) -> Drawing:
    results, pairings = list(book.results()), [one for one in book.pairings() if _is_known(one)]
    workload = book.plan.workload
    title = f"{workload.name}: prompts of {workload.prompt_tokens} tokens, answers of {workload.output_tokens}"
    shapes: list[Shape] = [Words((16, 26), title, size=16), *_legend(book)]
    for place, (name, value) in enumerate(_PANELS.items()):
        lines = [[(x.streams, value(x)) for subject, x, _ in results if subject == s] for s in book.subjects]
        shapes += _panel(name, lines, _LEFT + place * _APART)
    below = _TOP + _HIGH + 60
    shapes += _ratios(pairings, below)
    return Drawing(_WIDTH, below + (_ROW * len(pairings) + 36 if pairings else 0), tuple(shapes))


def _legend(book: Book) -> Iterator[Shape]:
    for place, subject in enumerate(book.subjects):
        x = 16 + place * 300
        yield Dot((x + 4, 48), _COLOURS[place % len(_COLOURS)])
        yield Words((x + 14, 52), f"{subject.label}: {subject.name} {subject.model}".strip()[:44], size=11)


# --- figures over streams ---------------------------------------------------------------------------------------------


def _first(summary: Summary) -> Interval:
    found = summary.ttft_s
    return Interval(found.p50 * 1000, found.p50 * 1000, found.p90 * 1000)


def _each(summary: Summary) -> Interval:
    found = summary.stream_rate.mean
    return Interval(found, found, found)


def _whole(summary: Summary) -> Interval:
    found = summary.tokens_per_s
    return found if math.isfinite(found.high) else Interval(found.middle, found.middle, found.middle)


_PANELS: dict[str, Callable[[Summary], Interval]] = {
    "time to first token, ms: p50 to p90": _first,
    "tokens/s a stream: mean": _each,
    "tokens/s in all: mean with 95 %": _whole,
}


class _Axes(Struct, frozen=True):
    left: float
    top: float  # the value at the upper end
    streams: tuple[int, ...]

    def x(self, streams: int) -> float:
        return self.left + _WIDE * (self.streams.index(streams) + 0.5) / len(self.streams)

    def y(self, value: float) -> float:
        return _TOP + 20 + _HIGH * (1 - max(0.0, value) / self.top)

    def at(self, mark: Mark) -> Point:
        return self.x(mark[0]), self.y(mark[1].middle)

    def drawn(self) -> Iterator[Shape]:
        yield Stroke(((self.left, self.y(self.top)), (self.left, self.y(0)), (self.left + _WIDE, self.y(0))), "#888888")
        for share in (0.0, 0.5, 1.0):
            yield Words((self.left - 6, self.y(self.top * share) + 4), f"{self.top * share:.3g}", "end", 10)
        for streams in self.streams:
            yield Words((self.x(streams), self.y(0) + 16), f"{streams}", "middle", 10)
        yield Words((self.left + _WIDE, self.y(0) + 30), "streams", "end", 10, "#666666")


def _panel(title: str, lines: Sequence[Sequence[Mark]], left: float) -> Iterator[Shape]:
    known = [[mark for mark in line if math.isfinite(mark[1].middle)] for line in lines]
    marks = [mark for line in known for mark in line]
    top = max((value.high for _, value in marks), default=0.0) * 1.08 or 1.0
    axes = _Axes(left, top, tuple(sorted({streams for streams, _ in marks})))
    yield Words((left, _TOP + 8), title)
    yield from axes.drawn()
    for number, line in enumerate(known):
        yield from _line(line, axes, _COLOURS[number % len(_COLOURS)])


def _line(marks: Sequence[Mark], axes: _Axes, colour: str) -> Iterator[Shape]:
    if len(marks) > 1:
        yield Stroke(tuple(axes.at(mark) for mark in marks), colour, 2.0)
    for mark in marks:
        x, value = axes.x(mark[0]), mark[1]
        yield Stroke(((x, axes.y(value.low)), (x, axes.y(value.high))), colour)
        yield Dot(axes.at(mark), colour)


# --- ratios -----------------------------------------------------------------------------------------------------------


def _is_known(one: Pairing) -> bool:
    """One round has no interval to draw."""
    return one.found.ratio is not None and math.isfinite(one.found.ratio.high) and one.found.ratio.low > 0


class _Scale(Struct, frozen=True):
    """In logarithms: half is as far to the left of 1 as double is to the right."""

    widest: float

    def x(self, ratio: float) -> float:
        return _MIDDLE + _REACH * math.log(ratio) / self.widest


def _ratios(pairings: Sequence[Pairing], top: float) -> Iterator[Shape]:
    found = [one.found.ratio for one in pairings if one.found.ratio is not None]
    if not found:
        return
    scale = _Scale(1.05 * max(0.1, *(abs(math.log(end)) for ratio in found for end in (ratio.low, ratio.high))))
    bottom = top + _ROW * len(found)
    yield Stroke(((scale.x(1), top - 4), (scale.x(1), bottom)), "#888888", 1.5)
    for tick in (math.exp(-scale.widest), 1.0, math.exp(scale.widest)):
        yield Words((scale.x(tick), bottom + 16), f"{tick:.2f}x", "middle", 10)
    for number, (one, ratio) in enumerate(zip(pairings, found, strict=True)):
        yield from _ratio(one, ratio, top + _ROW * (number + 0.5), scale)


def _ratio(one: Pairing, ratio: Interval, y: float, scale: _Scale) -> Iterator[Shape]:
    colour = _JUDGED.get(one.found.verdict, "#5f5f5f")
    what = f"{one.subject.label} over {one.first.label} at {one.found.streams}: {one.found.figure}"
    yield Words((16, y + 4), what, size=11)
    yield Stroke(((scale.x(ratio.low), y), (scale.x(ratio.high), y)), colour, 2.0)
    yield Dot((scale.x(ratio.middle), y), colour)
