"""The theme and the components that several pages use. All text is shown as text, never as HTML, except Markdown, which
is sanitized.

Colours that Python code needs are here; everything else about the appearance is in theme.css.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nicegui import ui
from nicegui.elements.label import Label

from modelyard.workbench.markdown import split_blocks, to_html

CSS = Path(__file__).with_name("theme.css")
SCRIPT = Path(__file__).with_name("page.js")
BRAND_COLOURS = {
    "primary": "#2f5bdc",
    "secondary": "#0f766e",
    "accent": "#8b5cf6",
    "positive": "#15803d",
    "negative": "#dc2626",
    "warning": "#b45309",
    "info": "#0369a1",
    "dark": "#151a21",
    "dark_page": "#0d1117",
}
SERIES_COLOURS = ("#4f7cff", "#14b8a6", "#f59e0b", "#ec4899", "#8b5cf6", "#84cc16", "#06b6d4", "#ef4444")
AXIS_COLOUR, GRID_COLOUR, NEUTRAL_COLOUR = "#8a94a3", "rgba(128,140,160,.18)", "#9aa5b4"

_STATE_COLOURS = {
    "ready": "positive",
    "loading": "warning",
    "draining": "accent",
    "failed": "negative",
    "stopped": "grey-6",
    "running": "positive",
    "reading": "positive",
    "waiting": "warning",
    "finished": "grey-6",
    "active": "positive",
    "expired": "warning",
    "revoked": "grey-6",
}
_BUSY_STATES = ("loading", "draining", "running", "reading", "waiting")
_CHUNK_CHARACTERS = 1500  # per element: appending to a long text must not send all of it again
_MAX_CHARACTERS = 400_000
_RENDER_PAUSE = 10  # times what the last rendering of Markdown took: the loop has other work


# JavaScript that formats a whole number as `formatting.count` does.
FORMAT_COUNT = "v => v == null ? '–' : v.toLocaleString('en').replaceAll(',', '\u202f')"


def page_heading(title: str, subtitle: str = "") -> None:
    ui.page_title(f"{title} · Modelyard")
    with ui.column().classes("gap-0"):
        ui.label(title).classes("title").props("role=heading aria-level=1")
        if subtitle:
            ui.label(subtitle).classes("muted")


def caption(text: str) -> Label:
    return ui.label(text).classes("caption")


def card() -> ui.element:
    return ui.element("section").classes("card")


def tags(labels: Iterable[str]) -> None:
    with ui.element("div").classes("line"):
        for label in labels:
            ui.label(label).classes("tag")


def empty_notice(text: str) -> Label:
    return ui.label(text).classes("muted").style("padding: 24px 0")


def show_notice(label: Label, text: str) -> None:
    """Show the text, or hide the label if there is none."""
    label.set_text(text)
    label.set_visibility(bool(text))


class Stat:
    """A value with its name above it."""

    def __init__(self, name: str, value: str = "–") -> None:
        with ui.column().classes("gap-0"):
            caption(name)
            self._label = ui.label(value).classes("value")

    def set(self, value: str) -> None:
        self._label.set_text(value)


class StateBadge:
    """The state of a model or request: a coloured dot and a word."""

    def __init__(self, state: str = "") -> None:
        with ui.element("div").classes("state"):
            self._dot = ui.element("div").classes("dot")
            self._label = ui.label("")
        self._state = ""
        self.set(state)

    def set(self, state: str) -> None:
        """The first word decides the colour; more may follow, such as "reading 40 %"."""
        if state == self._state:
            return
        new, old = (text.partition(" ")[0] for text in (state, self._state))
        if new != old:
            busy = " busy" if new in _BUSY_STATES else ""
            self._dot.classes(
                remove=f"bg-{_STATE_COLOURS.get(old, 'negative')} busy",
                add=f"bg-{_STATE_COLOURS.get(new, 'negative')}{busy}",
            )
        self._label.set_text(state)
        self._state = state


class StreamingText:
    """A text that grows. `append` only buffers; `flush` sends the buffer as one message. The length is limited."""

    def __init__(self, classes: str = "text") -> None:
        self._box = ui.element("div").classes(classes)
        self._tail: Label | None = None
        self._tail_text, self._buffer, self._length = "", "", 0

    def append(self, text: str) -> None:
        self._buffer += text

    def flush(self, *, at_end: bool = False) -> None:  # noqa: ARG002 (as in MarkdownText)
        if not self._buffer or self._box.is_deleted:
            return
        text, self._buffer = self._buffer, ""
        if self._length > _MAX_CHARACTERS:
            return
        self._length += len(text)
        if self._length > _MAX_CHARACTERS:
            text += "\n[the rest is too long to show]"
        if self._tail is None or len(self._tail_text) > _CHUNK_CHARACTERS:
            with self._box:
                self._tail, self._tail_text = Label(""), ""
                self._tail.style("display: inline")
        self._tail_text += text
        self._tail.set_text(self._tail_text)

    def clear(self) -> None:
        self._box.clear()
        self._tail, self._tail_text, self._buffer, self._length = None, "", "", 0


class MarkdownText:
    """Markdown that grows. Each block is an element of its own: only the last one is rendered and sent again."""

    def __init__(self) -> None:
        self._box = ui.element("div").classes("markdown answer")
        self._last: ui.html | None = None
        self._open = ""  # the text of the last block, which may go on
        self._buffer, self._length = "", 0
        self._next_flush = 0.0

    def append(self, text: str) -> None:
        self._buffer += text

    def flush(self, *, at_end: bool = False) -> None:
        """Show what was appended. A text that is slow to render is shown less often before its end."""
        started = time.perf_counter()
        if not self._buffer or self._box.is_deleted or (started < self._next_flush and not at_end):
            return
        text, self._buffer = self._buffer, ""
        if self._length > _MAX_CHARACTERS:
            return
        self._length += len(text)
        if self._length > _MAX_CHARACTERS:
            text += "\n\n[the rest is too long to show]"
        first, *others = split_blocks(self._open + text)
        self._render(first)
        for block in others:
            self._last = None
            self._render(block)
        elapsed = time.perf_counter() - started
        self._next_flush = started + elapsed * _RENDER_PAUSE

    def _render(self, block: str) -> None:
        self._open = block
        if self._last is None:
            with self._box:
                self._last = ui.html("", sanitize=False)  # to_html has sanitized it
        self._last.set_content(to_html(block))


def copy_button(text: Callable[[], str], label: str) -> ui.button:
    """Copies what `text` returns at the moment of the click."""

    async def copy() -> None:
        value = json.dumps(text()).replace("<", "\\u003c")
        if await ui.run_javascript(f"return modelyard.copy({value})", timeout=10):
            ui.notify("Copied", timeout=1200)
        else:
            ui.notify("The browser does not let this page copy: select the text and copy it.", type="negative")

    button = ui.button(icon="content_copy", on_click=copy)
    button.props(f'flat round dense size=sm color=muted aria-label="{label}"').tooltip(label)
    return button


class CodePane:
    """Monospaced text with a copy button."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        with ui.element("div").classes("w-full").style("position: relative"):
            with ui.element("div").classes("code-block mono").props("tabindex=0"):
                self._label = ui.label(text).classes("text")
            copy_button(lambda: self.text, "Copy").style("position: absolute; top: 6px; right: 6px")

    def set(self, text: str) -> None:
        self.text = text
        self._label.set_text(text)


class DiffPane:
    """A difference of two texts: added and removed lines in their colours."""

    def __init__(self) -> None:
        self._box = (
            ui.element("div").classes("code-block mono diff").props('tabindex=0 role=group aria-label="Difference"')
        )
        self._box.set_visibility(False)

    def set(self, diff: str) -> None:
        self._box.set_visibility(bool(diff))
        self._box.clear()
        with self._box:
            for line in diff.splitlines()[2:]:  # without the names of the files
                kind = {"+": "added", "-": "removed", "@": "muted"}.get(line[:1], "")
                ui.label(line).classes(f"text {kind}")


# --- line charts ------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float | None]]  # unix time, value

# Three significant digits at least, so that the labels of an axis differ whatever its range.
_SHORT = "(x => x >= 100 ? Math.round(x) : Number(x.toPrecision(3)))"
_UNIT_FORMATTERS = {
    "seconds": f"v => v < 1 ? {_SHORT}(v * 1000) + ' ms' : {_SHORT}(v) + ' s'",
    "share": "v => Math.round(v * 100) + ' %'",
    "count": f"v => {_SHORT}(v)",
    "whole": f"v => {_SHORT}(v)",
}
_CLOCK = "{HH}:{mm}"  # the time of day has one format on all pages


def line_chart(names: Sequence[str], unit: str, height: int = 220) -> ui.echart:
    """A chart over time with one line per name. Tooltips are drawn as text, so a name never becomes HTML."""
    formatter = _UNIT_FORMATTERS[unit]
    axis: dict[str, Any] = {
        "type": "value",
        "min": 0,
        "axisLabel": {":formatter": formatter, "color": AXIS_COLOUR},
        "splitLine": {"lineStyle": {"color": GRID_COLOUR}},
    }
    if unit == "whole":
        axis |= {"minInterval": 1}
    if unit == "share":
        axis |= {"max": 1, "splitNumber": 2}
    series = {
        "type": "line",
        "showSymbol": True,
        "symbolSize": 3,
        "lineStyle": {"width": 2},
        "areaStyle": {"opacity": 0.08},
    }
    several = len(names) > 1
    options = {
        "animation": False,
        "color": list(SERIES_COLOURS),
        "grid": {"left": 56, "right": 14, "top": 28 if several else 12, "bottom": 24},
        "legend": {"show": several, "top": 0, "right": 8, "textStyle": {"color": AXIS_COLOUR}, "itemHeight": 8},
        "tooltip": {
            "trigger": "axis",
            "renderMode": "richText",
            ":valueFormatter": f"v => v == null ? '–' : ({formatter})(v)",
        },
        "xAxis": {
            "type": "time",
            "minInterval": 60_000,  # a minute, as the labels: two ticks never have the same one
            "axisLabel": {"color": AXIS_COLOUR, "hideOverlap": True, "formatter": _CLOCK},
        },
        "yAxis": axis,
        "series": [{**series, "name": name, "data": []} for name in names],
    }
    return ui.echart(options).classes("w-full").style(f"height: {height}px")


def set_points(chart: ui.echart, lines: Sequence[Points], span: tuple[float, float] | None = None) -> None:
    """Replace the points of each line. `span` is the time range of the axis. The chart's options are changed in place,
    so that a redraw, such as after a change of the theme, keeps the points."""
    for index, line in enumerate(lines):
        chart.options["series"][index]["data"] = [[at * 1000, value] for at, value in line]
    if span is not None:
        chart.options["xAxis"] |= {"min": span[0] * 1000, "max": span[1] * 1000}
    chart.update()
