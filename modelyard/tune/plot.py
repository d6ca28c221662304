"""The report of an optimization as a drawing: settings by memory and score, the Pareto front, and ratios. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from modelyard.benchmark.drawing import Circle, Drawing, DrawingShape, Label, Point, Polyline
from modelyard.core.knobs import COUNTS, Goal
from modelyard.tune.report import Report, ReportRow

_WIDTH, _LEFT, _TOP, _CHART_WIDTH, _CHART_HEIGHT = 900, 80, 84, 560, 320
_PLAIN, _FRONT, _BEST, _CURRENT, _FAINT = "#9a9a9a", "#1f6fb4", "#2a8a3e", "#b0302f", "#dddddd"
_MIB = 2**20
_TICKS = 5
_LABEL_OFFSETS = {"best": -8, "current": 16}  # their circles are often close to each other


class Scale(Struct, frozen=True):
    """Maps values to positions on an axis; wide enough that noise does not fill it."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> Scale:
        low, high = min(values), max(values)
        padding = max(0.08 * (high - low), 0.02 * high)
        return cls(max(0.0, low - padding), high + padding, begin, end)

    def at(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round numbers: steps of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(number * step, 9) for number in range(first, last + 1)]


def plot(report: Report) -> Drawing:
    noise = "" if report.noise is None else f", noise {report.noise:.1%}"
    shapes: list[DrawingShape] = [
        Label((16, 28), f"{report.model} for {report.goal}: {report.verdict}", size=15),
        Label((16, 48), f"{report.trials} trials of {report.grid} in a full grid{noise}", size=11),
    ]
    if report.rows:
        shapes += _chart(report.rows, report.goal)
    shapes += _ratios(report)
    return Drawing(_WIDTH, _TOP + _CHART_HEIGHT + 60, tuple(shapes))


def _chart(rows: Sequence[ReportRow], goal: Goal) -> Iterator[DrawingShape]:
    current = next((row for row in rows if row.name == "current" or not row.changes), None)
    unit = chart_value(current or rows[0], goal)
    x_scale = Scale.of([row.memory / _MIB for row in rows], _LEFT, _LEFT + _CHART_WIDTH)
    y_scale = Scale.of([1.0, *(chart_value(row, goal) / unit for row in rows)], _TOP + _CHART_HEIGHT, _TOP)
    title = f"{COUNTS[goal]}, {'current' if current is not None else 'the best'} = 1"
    yield Label((16, _TOP - 14), title, size=11)
    yield from _axes(x_scale, y_scale)
    points = [(x_scale.at(row.memory / _MIB), y_scale.at(chart_value(row, goal) / unit)) for row in rows]
    if len(front := pareto_front(points)) > 1:
        yield Polyline(tuple(front), _FRONT)
    for row, at in sorted(zip(rows, points, strict=True), key=lambda pair: bool(pair[0].name)):
        colour = {"best": _BEST, "current": _CURRENT}.get(row.name, _FRONT if row.front else _PLAIN)
        yield Circle(at, colour, 5 if row.name else 3)
        if row.name:
            is_right = at[0] > _LEFT + 0.75 * _CHART_WIDTH
            position = (at[0] - 8 if is_right else at[0] + 8, at[1] + _LABEL_OFFSETS.get(row.name, 28))
            yield Label(position, row.name, "end" if is_right else "start", 11, colour)
    x, y = _LEFT + _CHART_WIDTH + 40, _TOP + _CHART_HEIGHT - 20
    yield Circle((x + 3, y - 4), _FRONT, 3)
    yield Label((x + 12, y), "not beaten in speed, first", size=11)
    yield Label((x + 12, y + 14), "token and memory at once", size=11)


def chart_value(row: ReportRow, goal: Goal) -> float:
    """The score; for memory, which has the other axis, the speed."""
    return row.speed if goal == "memory" else row.score


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both coordinates, from left to right. A smaller y is higher in a drawing."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _axes(x_scale: Scale, y_scale: Scale) -> Iterator[DrawingShape]:
    bottom, right = _TOP + _CHART_HEIGHT, _LEFT + _CHART_WIDTH
    for tick in y_scale.ticks:
        yield Polyline(((_LEFT, y_scale.at(tick)), (right, y_scale.at(tick))), _FAINT)
        yield Label((_LEFT - 8, y_scale.at(tick) + 4), f"{tick:g}×", "end", 10)
    for tick in x_scale.ticks:
        yield Polyline(((x_scale.at(tick), bottom), (x_scale.at(tick), bottom + 4)), "#222222")
        yield Label((x_scale.at(tick), bottom + 18), f"{tick:g}", "middle", 10)
    yield Polyline(((_LEFT, _TOP), (_LEFT, bottom), (right, bottom)), "#222222")
    yield Label((right, bottom + 36), "memory, MiB", "end", 11)


def _ratios(report: Report) -> Iterator[DrawingShape]:
    x = _LEFT + _CHART_WIDTH + 40
    if report.ratios:
        yield Label((x, _TOP + 10), "the best against", size=12)
    for place, (name, ratio) in enumerate(report.ratios.items()):
        y = _TOP + 34 + 40 * place
        yield Label((x, y), name, size=12)
        yield Label((x, y + 16), f"{ratio.middle:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]", size=12, colour=_BEST)
