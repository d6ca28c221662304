"""What a server holds over time: memory, open files, threads and processes, their slopes, and a drawing of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import NamedTuple

import psutil

from modelyard_bench.drawing import Drawing, DrawingShape, Label, Polyline

_LEFT, _WIDTH, _PANEL, _GAP, _TOP = 150, 640, 74, 26, 48


class Usage(NamedTuple):
    """Of a process and its children, at one moment."""

    rss_mb: float
    files: int
    threads: int
    processes: int


def usage(process: psutil.Process) -> Usage:
    rss, files, threads, processes = 0.0, 0, 0, 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a child that has just ended
            rss, files = rss + one.memory_info().rss / 2**20, files + one.num_fds()
            threads += one.num_threads()
            processes += 1
    return Usage(rss, files, threads, processes)


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Per unit of `at`, by least squares; 0 of fewer than two moments."""
    return linear_regression(at, values).slope if len(set(at)) > 1 else 0.0


def draw_series(title: str, unit: str, at: Sequence[float], series: Mapping[str, Sequence[float]]) -> Drawing:
    """One panel per series, each from zero to its largest value; `unit` is that of the time axis."""
    height = _TOP + (_PANEL + _GAP) * len(series) + 24
    shapes: list[DrawingShape] = [Label((12, 26), title, size=16)]
    begin, end = at[0], max(at[-1], at[0] + 1e-9)
    for number, (name, values) in enumerate(series.items()):
        top = _TOP + (_PANEL + _GAP) * number
        most = max(*values, 1e-9) * 1.05
        points = tuple(
            (_LEFT + _WIDTH * (t - begin) / (end - begin), top + _PANEL * (1 - value / most))
            for t, value in zip(at, values, strict=True)
        )
        shapes.append(Polyline(((_LEFT, top + _PANEL), (_LEFT + _WIDTH, top + _PANEL)), "#999999", 1))
        shapes.append(Polyline(points, "#225588", 2))
        shapes.append(Label((_LEFT - 12, top + _PANEL / 2 + 4), name, "end", 13))
        shapes.append(Label((_LEFT + _WIDTH + 8, top + 12), f"max {max(values):,.0f}", size=12))
        shapes.append(Label((_LEFT + _WIDTH + 8, top + _PANEL), f"last {values[-1]:,.0f}", size=12))
    shapes.append(Label((_LEFT + _WIDTH, height - 10), f"{end - begin:,.0f} {unit}", "end", 13))
    return Drawing(_LEFT + _WIDTH + 110, height, tuple(shapes))
