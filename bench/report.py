"""Comparisons of two servers as a table, as JSON, and as a drawing with an interval for each ratio."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from modelyard_bench.drawing import Circle, Drawing, DrawingShape, Label, Polyline
from modelyard_bench.statistics import Interval, ratio_interval

_ROW, _LEFT, _WIDTH, _TOP, _RIGHT = 26, 330, 460, 56, 150
_MARKS = {None: "", True: " [green]✓[/green]", False: " [red]✗[/red]"}


class Comparison(Struct, frozen=True):
    """One quantity of two servers, round by round. `bound` is the target of the ratio of ours to theirs."""

    name: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    bound: float | None = None
    at_most: bool = False  # the ratio must not exceed the bound; otherwise it must reach it

    @property
    def ratio(self) -> Interval:
        return ratio_interval(self.ours, self.theirs)

    @property
    def target(self) -> str:
        return "" if self.bound is None else f"{'≤' if self.at_most else '≥'} {self.bound:g}×"

    @property
    def met(self) -> bool | None:
        """Whether the estimate meets the target; None without one."""
        if self.bound is None:
            return None
        excess = self.ratio.middle - self.bound
        return (excess <= 1e-9) if self.at_most else (excess >= -1e-9)  # the logarithms round


def console(width: int = 130) -> Console:
    """A console that does not wrap lines when it writes to a file."""
    made = Console()
    if not made.is_terminal:
        made.width = width
    return made


def machine() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def mark(met: bool | None) -> str:
    return _MARKS[met]


def show(
    title: str, comparisons: Sequence[Comparison], names: tuple[str, str], notes: Sequence[str], out: Console
) -> None:
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("")
    for name in (*names, "ratio [95 %]", "target"):
        table.add_column(name, justify="right")
    for one in comparisons:
        means = [fmean(side) for side in (one.ours, one.theirs)]
        sides = [f"{mean:,.{0 if mean >= 100 else 1 if mean >= 10 else 3}f} {one.unit}" for mean in means]
        table.add_row(one.name, *sides, str(one.ratio).replace("[", r"\["), one.target + mark(one.met))
    out.print(table)
    show_notes((machine(), *notes), out)


def show_notes(notes: Sequence[str], out: Console) -> None:
    for note in notes:
        out.print(f"[dim]· {note}[/dim]", highlight=False)


def save_json(comparisons: Sequence[Comparison], notes: Sequence[str], file: Path) -> None:
    rows = [
        {**msgspec.to_builtins(one), "ratio": msgspec.to_builtins(one.ratio), "met": one.met} for one in comparisons
    ]
    values = {"notes": [machine(), *notes], "comparisons": rows}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=2))


def draw(title: str, comparisons: Sequence[Comparison]) -> Drawing:
    """One row per ratio: its interval, the line of 1×, and a tick at the target."""
    ends = [end for one in comparisons for end in (one.ratio.middle, one.ratio.high, one.bound or 0.0) if end < 1e3]
    most = max(1.2, *ends) * 1.05
    height = _TOP + _ROW * len(comparisons) + 30

    def x(value: float) -> float:
        return _LEFT + _WIDTH * min(value, most) / most

    shapes: list[DrawingShape] = [
        Label((12, 26), title, size=16),
        Polyline(((x(1), _TOP - 10), (x(1), height - 24)), "#555555", 2),
        Label((x(1), height - 8), "1×", "middle"),
    ]
    for number, one in enumerate(comparisons):
        y, ratio = _TOP + _ROW * number + 10, one.ratio
        colour = {None: "#444466", True: "#117711", False: "#bb2222"}[one.met]
        shapes.append(Label((_LEFT - 12, y + 4), one.name, "end", 13))
        if one.bound is not None:
            shapes.append(Polyline(((x(one.bound), y - 8), (x(one.bound), y + 8)), "#ee9900", 3))
        shapes.append(Polyline(((x(ratio.low), y), (x(ratio.high), y)), colour, 2))
        shapes.append(Circle((x(ratio.middle), y), colour, 4.5))
        shapes.append(Label((_LEFT + _WIDTH + 10, y + 4), f"{ratio.middle:.2f}× {one.target}", size=13))
    return Drawing(_LEFT + _WIDTH + _RIGHT, height, tuple(shapes))
