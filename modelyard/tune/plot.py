"""A run as a drawing: every setting by memory and what the goal counts, the front joined, the proof's ratios. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from modelyard.benchmark.drawing import Circle, Drawing, DrawingShape, Label, Point, Polyline
from modelyard.core.knobs import COUNTS, Goal
from modelyard.tune.report import Report, Row

_WIDTH, _LEFT, _TOP, _WIDE, _HIGH = 900, 80, 84, 560, 320
_PLAIN, _FRONT, _BEST, _CURRENT, _FAINT = "#9a9a9a", "#1f6fb4", "#2a8a3e", "#b0302f", "#dddddd"
_MIB = 2**20
_TICKS = 5
_DOWN = {"best": -8, "current": 16}  # where names stand beside their dots, which are often close to each other


class Scale(Struct, frozen=True):
    """Values on a line of the drawing, from one end to the other; wide enough that noise does not fill it."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> Scale:
        low, high = min(values), max(values)
        room = max(0.08 * (high - low), 0.02 * high)
        return cls(max(0.0, low - room), high + room, begin, end)

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


def plot(told: Report) -> Drawing:
    shapes: list[DrawingShape] = [
        Label((16, 28), f"{told.model} for {told.goal}: {told.verdict}", size=15),
        Label((16, 48), f"{told.trials} trials of {told.grid} in a full grid{_noise(told.noise)}", size=11),
    ]
    if told.rows:
        shapes += _field(told.rows, told.goal)
        shapes += _key()
    shapes += _ratios(told)
    return Drawing(_WIDTH, _TOP + _HIGH + 60, tuple(shapes))


def _noise(noise: float | None) -> str:
    return "" if noise is None else f", noise {noise:.1%}"


def _field(rows: Sequence[Row], goal: Goal) -> Iterator[DrawingShape]:
    base = next((row for row in rows if row.name == "current" or not row.changes), None)
    per = gain(base or rows[0], goal)
    across = Scale.of([row.memory / _MIB for row in rows], _LEFT, _LEFT + _WIDE)
    up = Scale.of([1.0, *(gain(row, goal) / per for row in rows)], _TOP + _HIGH, _TOP)
    yield Label((16, _TOP - 14), f"{COUNTS[goal]}, {'current' if base is not None else 'the best'} = 1", size=11)
    yield from _grid(across, up)
    points = {place: (across.at(row.memory / _MIB), up.at(gain(row, goal) / per)) for place, row in enumerate(rows)}
    if len(edge := front(list(points.values()))) > 1:
        yield Polyline(tuple(edge), _FRONT)
    for place, row in sorted(enumerate(rows), key=lambda pair: bool(pair[1].name)):
        yield from _dot(row, points[place])


def gain(row: Row, goal: Goal) -> float:
    """What the goal counts; where that is memory, which stands on the other axis, the speed."""
    return row.speed if goal == "memory" else row.score


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both, from left to right. Up is less, in a drawing."""
    edge: list[Point] = []
    for point in sorted(points):
        if not edge or point[1] < edge[-1][1]:
            edge.append(point)
    return edge


def _grid(across: Scale, up: Scale) -> Iterator[DrawingShape]:
    bottom, right = _TOP + _HIGH, _LEFT + _WIDE
    for tick in up.ticks:
        yield Polyline(((_LEFT, up.at(tick)), (right, up.at(tick))), _FAINT)
        yield Label((_LEFT - 8, up.at(tick) + 4), f"{tick:g}×", "end", 10)
    for tick in across.ticks:
        yield Polyline(((across.at(tick), bottom), (across.at(tick), bottom + 4)), "#222222")
        yield Label((across.at(tick), bottom + 18), f"{tick:g}", "middle", 10)
    yield Polyline(((_LEFT, _TOP), (_LEFT, bottom), (right, bottom)), "#222222")
    yield Label((right, bottom + 36), "memory, MiB", "end", 11)


def _dot(row: Row, at: Point) -> Iterator[DrawingShape]:
    yield Circle(at, _colour(row), 5 if row.name else 3)
    if row.name:
        is_far, down = at[0] > _LEFT + 0.75 * _WIDE, _DOWN.get(row.name, 28)
        x = at[0] - 8 if is_far else at[0] + 8
        yield Label((x, at[1] + down), row.name, "end" if is_far else "start", 11, _colour(row))


def _colour(row: Row) -> str:
    return {"best": _BEST, "current": _CURRENT}.get(row.name, _FRONT if row.front else _PLAIN)


def _key() -> Iterator[DrawingShape]:
    x, y = _LEFT + _WIDE + 40, _TOP + _HIGH - 20
    yield Circle((x + 3, y - 4), _FRONT, 3)
    yield Label((x + 12, y), "not beaten in speed, first", size=11)
    yield Label((x + 12, y + 14), "token and memory at once", size=11)


def _ratios(told: Report) -> Iterator[DrawingShape]:
    x = _LEFT + _WIDE + 40
    if told.ratios:
        yield Label((x, _TOP + 10), "the best against", size=12)
    for place, (name, ratio) in enumerate(told.ratios.items()):
        y = _TOP + 34 + 40 * place
        yield Label((x, y), name, size=12)
        yield Label((x, y + 16), f"{ratio.middle:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]", size=12, colour=_BEST)
