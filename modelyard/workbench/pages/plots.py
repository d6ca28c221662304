"""The plots page: the last hour as line charts, and the runs of the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from nicegui import ui

from modelyard.core.knobs import COUNTS
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import (
    AXIS_COLOUR,
    GRID_COLOUR,
    NEUTRAL_COLOUR,
    CodePane,
    Points,
    Stat,
    caption,
    card,
    line_chart,
    page_heading,
    set_points,
)
from modelyard.workbench.session import PageSession

_INTERVAL_S = 5.0
_HOUR_S = 3600.0

Getter = Callable[[Json], float | None]  # a value of one slice


def _percentile(name: str, percentile: str) -> Getter:
    return lambda slice: slice[name][percentile] if slice[name] else None


_CHARTS: tuple[tuple[str, str, dict[str, Getter]], ...] = (  # title, unit, lines
    ("First token", "seconds", {name: _percentile("first_token_s", name) for name in ("p50", "p95")}),
    ("Between tokens", "seconds", {name: _percentile("inter_token_s", name) for name in ("p50", "p95")}),
    ("tok/s, one answer", "count", {"p50": _percentile("tokens_per_s", "p50")}),
    ("tok/s, all answers", "count", {"output": lambda slice: slice["output_tokens"] / slice["slice_s"]}),
    ("Longest queue", "whole", {"waiting": lambda slice: slice["waiting"]}),
    ("Cache reuse", "share", {"reuse": lambda slice: slice["reuse"]}),
    (
        "Requests per ten seconds",
        "whole",
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
        if runs := await session.client.rows("tune"):
            with runs_box:
                show_runs(runs)

    async def update() -> None:
        history = await session.client.get("history")
        now = time.time()
        for chart, (_, _, lines) in zip(charts, _CHARTS, strict=True):
            set_points(chart, [line_points(history, getter) for getter in lines.values()], (now - _HOUR_S, now))

    ui.timer(0, lambda: session.perform(show_optimizer_runs()), once=True)
    session.poll(_INTERVAL_S, update)


def line_points(history: Json, getter: Getter) -> Points:
    """Slices without requests are missing in the history: the line is interrupted wherever one is."""
    points: list[tuple[float, float | None]] = []
    slice_s, last = history["slice_s"], None
    for slice in history["slices"]:
        if last is not None and slice["at"] - last > 1.5 * slice_s:
            points.append((last + slice_s, None))
        points.append((slice["at"], getter({**slice, "slice_s": slice_s})))
        last = slice["at"]
    return points


# --- runs of the optimizer: a verdict, a chart and a table of all settings, and remarks -------------------------------

# Kind of a point → colour and size, in drawing order: the last is drawn on top.
_KINDS = {
    "tried": (NEUTRAL_COLOUR, 7),
    "not beaten": ("#4f7cff", 8),
    "engine default": ("#8b5cf6", 13),
    "current": ("#ef4444", 13),
    "best": ("#16a34a", 14),
}
_OTHER_KIND = ("#06b6d4", 13)  # another baseline
_COLUMNS = {
    "setting": "Setting",
    "against": "Against current",
    "speed": "tok/s",
    "first": "First token",
    "memory": "Memory",
    "trials": "Trials",
    "front": "Not beaten",
}


def show_runs(runs: Sequence[Json]) -> None:
    caption("Optimizer")
    for index, run in enumerate(runs):
        with ui.expansion(headline(run), value=index == 0).classes("w-full card"):
            _show_run(run)


def _show_run(run: Json) -> None:
    with ui.column().classes("w-full gap-4 items-stretch"):
        ui.label(str(run["verdict"])).classes("name")
        with ui.element("div").classes("line").style("gap: 12px 32px; align-items: flex-start"):
            for name, value in stats(run):
                Stat(name, value)
        if points := chart_points(run):
            caption(y_axis_label(run))
            ui.echart(chart_options(points)).classes("w-full").style("height: 340px")
            columns = [{"name": key, "label": label, "field": key, "align": "left"} for key, label in _COLUMNS.items()]
            table = ui.table(columns=columns, rows=table_rows(run), row_key="id", pagination=10)
            table.classes("w-full").props("flat dense wrap-cells")
        with ui.column().classes("gap-0"):
            for line in remarks(run):
                ui.label(line).classes("muted small")
        if run["toml"]:
            CodePane(str(run["toml"]))
        with ui.expansion("Full report").classes("w-full"):
            CodePane(msgspec.json.format(msgspec.json.encode(run), indent=2).decode())


# --- text -------------------------------------------------------------------------------------------------------------


def headline(run: Json) -> str:
    day, _, time = str(run["at"]).partition("T")
    if not run["better"]:
        outcome = "nothing better" if run["finished"] else "cut off"
    elif run.get("gain"):  # reports of older versions lack it
        outcome = str(run["gain"])
    else:
        outcome = f"{run['ratio']['middle']:.2f} times as good" if run["ratio"] else "the current settings do not run"
    return f"{run['model']} for {run['goal']} · {outcome} · {day} {time[:5]}"


def stats(run: Json) -> list[tuple[str, str]]:
    ratios = [
        (f"against {name}", f"{ratio['middle']:.2f}× [{ratio['low']:.2f}, {ratio['high']:.2f}]")
        for name, ratio in run["ratios"].items()
    ]
    return [
        *ratios,
        ("trials", f"{fmt.count(run['trials'])} of {fmt.count(run['grid'])}"),
        ("time", fmt.duration(run["spent_s"])),
        ("noise of a trial", fmt.MISSING if run["noise"] is None else f"{run['noise']:.1%}"),
    ]


def remarks(run: Json) -> list[str]:
    """The quality loss of quantized values, failures, settings that were not tried, and written files."""
    return [
        *(f"{_settings_text(loss['values'])}: {_loss_text(loss)}" for loss in run["losses"]),
        *(f"{_settings_text(failure['changes'])} failed: {failure['reason']}" for failure in run["failures"]),
        *(f"not tried: {skipped}" for skipped in run["left_out"]),
        *(f"written to {file}" for file in run.get("applied", [])),
    ]


def _loss_text(loss: Json) -> str:
    verdict = "within the bound" if loss["within"] else "too much, never recommended"
    divergence = "" if loss["divergence"] is None else f", divergence {loss['divergence']:.4f}"
    return f"perplexity {loss['rise']:+.2%}{divergence}: {verdict}"


def _settings_text(changes: Json) -> str:
    return ", ".join(f"{name} = {value}" for name, value in changes.items()) or "the current settings"


def _row_name(row: Json) -> str:
    settings = _settings_text(row["changes"])
    return f"{row['name']}: {settings}" if row["name"] and row["changes"] else row["name"] or settings


def _current_row(rows: list[Json]) -> Json | None:
    return next((row for row in rows if row["name"] == "current" or not row["changes"]), None)


def table_rows(run: Json) -> list[dict[str, Any]]:
    current = _current_row(run["rows"])
    return [
        {
            "id": index,
            "setting": _row_name(row),
            "against": _ratio_text(row, current, run["goal"]),
            "speed": fmt.rate(row["speed"]),
            "first": fmt.duration(row["ttft_s"]),
            "memory": fmt.size(row["memory"]),
            "trials": fmt.count(row["trials"]),
            "front": "•" if row["front"] else "",
        }
        for index, row in enumerate(run["rows"])
    ]


def _ratio_text(row: Json, current: Json | None, goal: str) -> str:
    if row.get("slow"):
        return "too slow"
    if current is None:
        return fmt.MISSING
    return f"{current['memory'] / row['memory'] if goal == 'memory' else row['score'] / current['score']:.2f}×"


# --- the chart --------------------------------------------------------------------------------------------------------


class SettingPoint(Struct, frozen=True):
    """A setting in the chart: memory in MiB on the x axis, gain on the y axis. `kind` is its entry in the legend."""

    kind: str
    name: str
    memory: float
    gain: float


def y_axis_label(run: Json) -> str:
    return f"{COUNTS.get(run['goal'], 'score')}, {'current' if _current_row(run['rows']) else 'the best'} = 1"


def chart_points(run: Json) -> list[SettingPoint]:
    """The y axis shows the score; for the goal memory, which is on the x axis, it shows the speed."""
    rows, measure = run["rows"], "speed" if run["goal"] == "memory" else "score"
    if not rows:
        return []
    base = (_current_row(rows) or rows[0])[measure]
    return [
        SettingPoint(
            row["name"] or ("not beaten" if row["front"] else "tried"),
            _row_name(row),
            row["memory"] / 2**20,
            row[measure] / base,
        )
        for row in rows
    ]


def chart_options(points: Sequence[SettingPoint]) -> dict[str, Any]:
    """Tooltips are drawn as text, so a setting never becomes HTML. The axes fit the points, because settings differ
    little; a margin keeps points off the edges."""
    axis = {
        "type": "value",
        "scale": True,
        "boundaryGap": ["8%", "8%"],
        "axisLabel": {"color": AXIS_COLOUR},
        "splitLine": {"lineStyle": {"color": GRID_COLOUR}},
    }
    order = list(_KINDS)
    kinds = sorted({point.kind for point in points}, key=lambda kind: order.index(kind) if kind in order else -1)
    return {
        "animation": False,
        "grid": {"left": 56, "right": 24, "top": 36, "bottom": 44},
        "legend": {"top": 0, "right": 8, "textStyle": {"color": AXIS_COLOUR}, "itemHeight": 8},
        "tooltip": {"renderMode": "richText", "confine": True, ":formatter": "p => p.data.name"},
        "xAxis": axis
        | {"name": "memory, MiB", "nameLocation": "middle", "nameGap": 28, "nameTextStyle": {"color": AXIS_COLOUR}},
        "yAxis": axis | {"axisLabel": {":formatter": "v => v.toFixed(2) + '×'", "color": AXIS_COLOUR}},
        "series": [_series(kind, [point for point in points if point.kind == kind]) for kind in kinds],
    }


def _series(kind: str, points: Sequence[SettingPoint]) -> dict[str, Any]:
    colour, size = _KINDS.get(kind, _OTHER_KIND)
    data = [{"value": [point.memory, point.gain], "name": _tooltip(point)} for point in points]
    return {"name": kind, "type": "scatter", "symbolSize": size, "itemStyle": {"color": colour}, "data": data}


def _tooltip(point: SettingPoint) -> str:
    """One line per value, because the tooltip does not wrap."""
    return "\n".join([*point.name.split(", "), f"{point.gain:.2f}×, {point.memory:.0f} MiB"])
