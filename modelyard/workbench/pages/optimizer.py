"""What the optimizer has found, below the plots: each run with its verdict, a chart of all settings, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from nicegui import ui

from modelyard.workbench import findings
from modelyard.workbench.client import Json
from modelyard.workbench.findings import Spot
from modelyard.workbench.parts import Figure, Pane, caps

# kind → colour and size; the last ones are drawn on top
_KINDS = {
    "tried": ("#9aa5b4", 7),
    "not beaten": ("#4f7cff", 8),
    "engine default": ("#8b5cf6", 13),
    "current": ("#ef4444", 13),
    "best": ("#16a34a", 14),
}
_OTHER = ("#06b6d4", 13)  # another baseline
_COLUMNS = {
    "setting": "Setting",
    "against": "Against current",
    "speed": "Tokens/s",
    "first": "First token",
    "memory": "Memory",
    "trials": "Trials",
    "front": "Not beaten",
}
_FAINT = "#8a94a3"


def show(runs: Sequence[Json]) -> None:
    caps("Optimizer")
    for place, run in enumerate(runs):
        with ui.expansion(findings.headline(run), value=place == 0).classes("w-full card"):
            _run(run)


def _run(run: Json) -> None:
    with ui.column().classes("w-full gap-4 items-stretch"):
        ui.label(str(run["verdict"])).classes("name")
        with ui.element("div").classes("line").style("gap: 12px 32px; align-items: flex-start"):
            for name, text in findings.figures(run):
                Figure(name).show(text)
        if spots := findings.spots(run):
            caps(findings.upward(run))
            ui.echart(options(spots)).classes("w-full").style("height: 340px")
            _table(run)
        with ui.column().classes("gap-0"):
            for line in findings.remarks(run):
                ui.label(line).classes("faint small")
        if run["toml"]:
            Pane(str(run["toml"]))
        with ui.expansion("All of it").classes("w-full"):
            Pane(msgspec.json.format(msgspec.json.encode(run), indent=2).decode())


def options(spots: Sequence[Spot]) -> dict[str, Any]:
    """Tooltips are drawn as text: a setting never becomes HTML. Axes fit what was measured, since settings differ by
    little; a margin keeps dots off the edge."""
    axis = {"type": "value", "scale": True, "boundaryGap": ["8%", "8%"], "axisLabel": {"color": _FAINT}}
    named = {"nameTextStyle": {"color": _FAINT}}
    grid = {"splitLine": {"lineStyle": {"color": "rgba(128,140,160,.18)"}}}
    known = list(_KINDS)
    kinds = sorted({spot.kind for spot in spots}, key=lambda kind: known.index(kind) if kind in known else -1)
    return {
        "animation": False,
        "grid": {"left": 56, "right": 24, "top": 36, "bottom": 44},
        "legend": {"top": 0, "right": 8, "textStyle": {"color": _FAINT}, "itemHeight": 8},
        "tooltip": {"renderMode": "richText", "confine": True, ":formatter": "p => p.data.name"},
        "xAxis": axis | grid | {"name": "memory, MiB", "nameLocation": "middle", "nameGap": 28, **named},
        "yAxis": axis | grid | {"axisLabel": {":formatter": "v => v.toFixed(2) + '×'", "color": _FAINT}},
        "series": [_series(kind, [spot for spot in spots if spot.kind == kind]) for kind in kinds],
    }


def _series(kind: str, spots: Sequence[Spot]) -> dict[str, Any]:
    colour, size = _KINDS.get(kind, _OTHER)
    data = [{"value": [spot.memory, spot.gain], "name": _words(spot)} for spot in spots]
    return {"name": kind, "type": "scatter", "symbolSize": size, "itemStyle": {"color": colour}, "data": data}


def _words(spot: Spot) -> str:
    """A line for each value: the tooltip does not break lines by itself."""
    return "\n".join([*spot.name.split(", "), f"{spot.gain:.2f}×, {spot.memory:.0f} MiB"])


def _table(run: Json) -> None:
    columns = [{"name": key, "label": label, "field": key, "align": "left"} for key, label in _COLUMNS.items()]
    table = ui.table(columns=columns, rows=findings.table(run), row_key="id", pagination=10)
    table.classes("w-full").props("flat dense wrap-cells")
