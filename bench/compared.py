"""Comparisons as a table for people, as JSON, and as a drawing with an interval for each ratio."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from bench.ratios import Comparison

_ROW, _LEFT, _WIDTH, _TOP, _RIGHT = 26, 330, 460, 56, 150


def show(title: str, found: Sequence[Comparison], names: tuple[str, str], notes: Sequence[str], to: Console) -> None:
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("")
    for name in (*names, "ratio [95 %]", "target"):
        table.add_column(name, justify="right")
    for one in found:
        mark = {None: "", True: " [green]✓[/green]", False: " [red]✗[/red]"}[one.met]
        sides = [f"{median(side):,.{_digits(median(side))}f} {one.unit}" for side in (one.ours, one.theirs)]
        table.add_row(one.what, *sides, str(one.ratio).replace("[", r"\["), one.target + mark)
    to.print(table)
    for note in (machine(), *notes):
        to.print(f"[dim]· {note}[/dim]", highlight=False)


def machine() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def keep(found: Sequence[Comparison], notes: Sequence[str], file: Path) -> None:
    held = [{**msgspec.to_builtins(one), "ratio": msgspec.to_builtins(one.ratio), "met": one.met} for one in found]
    file.write_bytes(msgspec.json.format(msgspec.json.encode({"notes": [machine(), *notes], "found": held}), indent=2))


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 3


# --- the drawing ------------------------------------------------------------------------------------------------------


def draw(title: str, found: Sequence[Comparison]) -> str:
    """SVG: a dot and its whiskers a line, 1× as a thick line, the target as a tick; the scale ends at the widest."""
    most = max(1.2, *(max(one.ratio.high, one.bound or 0) for one in found)) * 1.05
    height = _TOP + _ROW * len(found) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="26" font-size="16">{escape(title)}</text>',
        _line(_x(1, most), _TOP - 10, _x(1, most), height - 24, "#555", 2),
        f'<text x="{_x(1, most):.0f}" y="{height - 8}" text-anchor="middle">1×</text>',
        *(_row(one, _TOP + _ROW * n + 10, most) for n, one in enumerate(found)),
        "</svg>",
    ]
    return "\n".join(parts)


def _row(one: Comparison, y: float, most: float) -> str:
    ratio, colour = one.ratio, {None: "#446", True: "#171", False: "#b22"}[one.met]
    target = "" if one.bound is None else _line(_x(one.bound, most), y - 8, _x(one.bound, most), y + 8, "#e90", 3)
    return (
        f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(one.what)}</text>{target}'
        + _line(_x(ratio.low, most), y, _x(ratio.high, most), y, colour, 2)
        + f'<circle cx="{_x(ratio.middle, most):.1f}" cy="{y}" r="4.5" fill="{colour}"/>'
        f'<text x="{_LEFT + _WIDTH + 10}" y="{y + 4}">{ratio.middle:.2f}× {escape(one.target)}</text>'
    )


def _x(value: float, most: float) -> float:
    return _LEFT + _WIDTH * value / most


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'
