"""A run as a drawing: every setting by speed and memory, the front joined, and the proof's ratios. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from modelyard.measuring.drawing import Dot, Drawing, Shape, Stroke, Words
from modelyard.tune.report import Report, Row

_WIDTH, _LEFT, _TOP, _WIDE, _HIGH = 900, 80, 70, 560, 320
_PLAIN, _FRONT, _BEST, _CURRENT = "#9a9a9a", "#1f6fb4", "#2a8a3e", "#b0302f"
_MIB = 2**20


def plot(told: Report) -> Drawing:
    shapes: list[Shape] = [
        Words((16, 28), f"{told.model} for {told.goal}: {told.verdict}", size=15),
        Words((16, 48), f"{told.trials} trials of {told.grid} in a full grid, noise {told.noise:.1%}", size=11),
    ]
    if told.rows:
        shapes += _field(told.rows)
    shapes += _ratios(told)
    return Drawing(_WIDTH, _TOP + _HIGH + 60, tuple(shapes))


def _field(rows: Sequence[Row]) -> Iterator[Shape]:
    fastest, largest = max(row.speed for row in rows), max(row.memory for row in rows)

    def at(row: Row) -> tuple[float, float]:
        return _LEFT + _WIDE * row.memory / (1.1 * largest), _TOP + _HIGH * (1 - row.speed / (1.1 * fastest))

    yield Stroke(((_LEFT, _TOP), (_LEFT, _TOP + _HIGH), (_LEFT + _WIDE, _TOP + _HIGH)), "#222222")
    yield Words((_LEFT - 8, _TOP + 10), f"{1.1 * fastest:.0f}", "end", 10)
    yield Words((_LEFT - 8, _TOP + _HIGH / 2), "tok/s", "end", 11)
    yield Words((_LEFT + _WIDE, _TOP + _HIGH + 18), f"{1.1 * largest / _MIB:.0f} MiB", "end", 10)
    front = sorted((row for row in rows if row.front), key=lambda row: row.memory)
    if len(front) > 1:
        yield Stroke(tuple(map(at, front)), _FRONT)
    for row in rows:
        yield Dot(at(row), _colour(row), 5 if row.name else 3)
        if row.name:
            x, y = at(row)
            yield Words((x + 8, y - 6), row.name, size=11, colour=_colour(row))


def _colour(row: Row) -> str:
    return {"best": _BEST, "current": _CURRENT}.get(row.name, _FRONT if row.front else _PLAIN)


def _ratios(told: Report) -> Iterator[Shape]:
    x = _LEFT + _WIDE + 40
    yield Words((x, _TOP + 10), "the best against", size=12)
    for place, (name, ratio) in enumerate(told.ratios.items()):
        y = _TOP + 34 + 40 * place
        yield Words((x, y), name, size=12)
        yield Words((x, y + 16), f"{ratio.middle:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]", size=12, colour=_BEST)
