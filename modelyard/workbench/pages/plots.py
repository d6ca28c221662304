"""The plots page: the last hour as line charts, and the runs of the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable

from nicegui import ui

from modelyard.workbench.api_client import Json
from modelyard.workbench.components import Points, caption, card, line_chart, page_heading, set_points
from modelyard.workbench.pages import optimizer
from modelyard.workbench.session import PageSession

_INTERVAL_S = 5.0
_HOUR_S = 3600.0
_MAX_GAP_SLICES = 6  # a line is interrupted where slices are missing for longer

Getter = Callable[[Json], float | None]  # a value of one slice


def _percentile(name: str, percentile: str) -> Getter:
    return lambda slice: slice[name][percentile] if slice[name] else None


_CHARTS: tuple[tuple[str, str, dict[str, Getter]], ...] = (  # title, unit, lines
    ("First token", "seconds", {name: _percentile("first_token_s", name) for name in ("p50", "p95")}),
    ("Between tokens", "seconds", {name: _percentile("inter_token_s", name) for name in ("p50", "p95")}),
    ("Tokens per second, one answer", "count", {"p50": _percentile("tokens_per_s", "p50")}),
    ("Tokens per second, total", "count", {"output": lambda slice: slice["output_tokens"] / slice["slice_s"]}),
    ("Longest queue", "count", {"waiting": lambda slice: slice["waiting"]}),
    ("Cache reuse", "share", {"reuse": lambda slice: slice["reuse"]}),
    (
        "Requests per ten seconds",
        "count",
        {"all": lambda slice: slice["requests"], "failed": lambda slice: slice["failures"]},
    ),
)


def page(session: PageSession) -> None:
    page_heading("Plots", "The last hour, in slices of ten seconds.")
    charts = []
    with ui.element("div").classes("grid-cards"):
        for title, unit, lines in _CHARTS:
            with card():
                caption(title)
                charts.append(line_chart(list(lines), unit))
    runs_box = ui.column().classes("w-full gap-4 items-stretch")

    async def show_optimizer_runs() -> None:
        runs: list[Json] = []

        async def fetch() -> None:
            runs.extend(await session.client.optimizer_runs())

        if await session.perform(fetch()) and runs:
            with runs_box:
                optimizer.show_runs(runs)

    async def update() -> None:
        history = await session.client.history()
        now, slices = time.time(), history["slices"]
        start = max(now - _HOUR_S, slices[0]["at"] - 60) if slices else now - _HOUR_S
        for chart, (_, _, lines) in zip(charts, _CHARTS, strict=True):
            set_points(chart, [line_points(history, getter) for getter in lines.values()], (start, now))

    ui.timer(0, show_optimizer_runs, once=True)
    session.poll(_INTERVAL_S, update)


def line_points(history: Json, getter: Getter) -> Points:
    """Slices without requests are missing in the history: the line is interrupted there."""
    points: list[tuple[float, float | None]] = []
    slice_s, last = history["slice_s"], None
    for slice in history["slices"]:
        if last is not None and slice["at"] - last > _MAX_GAP_SLICES * slice_s:
            points.append((last + slice_s, None))
        points.append((slice["at"], getter({**slice, "slice_s": slice_s})))
        last = slice["at"]
    return points
