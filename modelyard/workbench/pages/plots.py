"""The last hour as lines, and what the optimizer has found."""

from __future__ import annotations

import time
from collections.abc import Callable

from nicegui import ui

from modelyard.workbench.charts import Line, Points, chart, points
from modelyard.workbench.client import Json
from modelyard.workbench.pages import optimizer
from modelyard.workbench.parts import caps, card, heading
from modelyard.workbench.session import Session

_EVERY_S = 5.0
_HOUR_S = 3600.0

Pick = Callable[[Json], float | None]


def _spread(name: str, part: str) -> Pick:
    return lambda one: one[name][part] if one[name] else None


_CHARTS: tuple[tuple[str, str, dict[str, Pick]], ...] = (
    ("First token", "seconds", {"p50": _spread("first_token_s", "p50"), "p95": _spread("first_token_s", "p95")}),
    ("Between tokens", "seconds", {"p50": _spread("inter_token_s", "p50"), "p95": _spread("inter_token_s", "p95")}),
    ("Tokens a second, one answer", "count", {"p50": _spread("tokens_per_s", "p50")}),
    ("Tokens a second, all together", "count", {"output": lambda one: one["output_tokens"] / one["slice_s"]}),
    ("Longest queue", "count", {"waiting": lambda one: one["waiting"]}),
    ("Cache reuse", "share", {"reuse": lambda one: one["reuse"]}),
    ("Requests in ten seconds", "count", {"all": lambda one: one["requests"], "failed": lambda one: one["failures"]}),
)


def page(session: Session) -> None:
    heading("Plots", "The last hour, in slices of ten seconds.")
    charts = []
    with ui.element("div").classes("grid-cards"):
        for title, unit, picks in _CHARTS:
            with card():
                caps(title)
                charts.append(chart([Line(name, unit) for name in picks]))
    found = ui.column().classes("w-full gap-4 items-stretch")
    ui.timer(0, lambda: _tuned(session, found), once=True)

    async def look() -> None:
        told = await session.client.history()
        now = time.time()
        begin = max(now - _HOUR_S, told["slices"][0]["at"] - 60) if told["slices"] else now - _HOUR_S
        for made, (_, _, picks) in zip(charts, _CHARTS, strict=True):
            points(made, [line(told, pick) for pick in picks.values()], (begin, now))

    session.watch(_EVERY_S, look)


def line(told: Json, pick: Pick) -> Points:
    """A slice in which nothing happened is missing: the line breaks there."""
    made: list[tuple[float, float | None]] = []
    before: float | None = None
    for one in told["slices"]:
        if before is not None and one["at"] - before > 6 * told["slice_s"]:
            made.append((before + told["slice_s"], None))
        made.append((one["at"], pick({**one, "slice_s": told["slice_s"]})))
        before = one["at"]
    return made


async def _tuned(session: Session, box: ui.column) -> None:
    runs: list[Json] = []

    async def ask() -> None:
        runs.extend(await session.client.tune())

    if not await session.act(ask()) or not runs:
        return
    with box:
        optimizer.show(runs)
