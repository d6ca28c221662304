"""Lines over time, as the charts of the workbench draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from nicegui import ui

from modelyard.workbench.look import SERIES

Points = Sequence[tuple[float, float | None]]  # unix time, value

_FORMATS = {
    "seconds": "v => v < 1 ? Math.round(v * 1000) + ' ms' : v.toFixed(1) + ' s'",
    "share": "v => Math.round(v * 100) + ' %'",
    "count": "v => v >= 100 ? Math.round(v) : Math.round(v * 10) / 10",
}


class Line(Struct, frozen=True):
    name: str
    unit: str = "count"


def chart(lines: Sequence[Line], height: int = 220) -> ui.echart:
    """Tooltips are drawn as text: a name never becomes HTML."""
    return ui.echart(_options(lines)).classes("w-full").style(f"height: {height}px")


def _options(lines: Sequence[Line]) -> dict[str, Any]:
    shown = _FORMATS[lines[0].unit]
    axis: dict[str, Any] = {
        "type": "value",
        "min": 0,
        "axisLabel": {":formatter": shown, "color": "#8a94a3"},
        "splitLine": {"lineStyle": {"color": "rgba(128,140,160,.18)"}},
    }
    if lines[0].unit == "share":
        axis |= {"max": 1, "splitNumber": 2}
    return {
        "animation": False,
        "color": list(SERIES),
        "grid": {"left": 56, "right": 14, "top": 28 if len(lines) > 1 else 12, "bottom": 24},
        "legend": {"show": len(lines) > 1, "top": 0, "right": 8, "textStyle": {"color": "#8a94a3"}, "itemHeight": 8},
        "tooltip": {
            "trigger": "axis",
            "renderMode": "richText",
            ":valueFormatter": f"v => v == null ? '–' : ({shown})(v)",
        },
        "xAxis": {"type": "time", "axisLabel": {"color": "#8a94a3", "hideOverlap": True}},
        "yAxis": axis,
        "series": [_series(line.name) for line in lines],
    }


def _series(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "showSymbol": True,
        "symbolSize": 3,
        "lineStyle": {"width": 2},
        "areaStyle": {"opacity": 0.08},
        "data": [],
    }


def points(made: ui.echart, series: Sequence[Points], span: tuple[float, float] | None = None) -> None:
    """The chart's own options are changed: one that is drawn anew, in another theme say, shows the same."""
    for place, line in enumerate(series):
        made.options["series"][place]["data"] = [[at * 1000, value] for at, value in line]
    if span is not None:
        made.options["xAxis"] |= {"min": span[0] * 1000, "max": span[1] * 1000}
    made.update()
