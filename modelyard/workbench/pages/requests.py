"""The live table of requests: those that wait and run on top, then those that ended, the newest first."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from nicegui import ui

from modelyard.workbench import words
from modelyard.workbench.parts import Figure, heading
from modelyard.workbench.rows import Changes, Table
from modelyard.workbench.session import Session

_EVERY_S = 1.0
_LIMIT = 1000
_AT_ONCE = 100  # where more end in a second nobody reads them all: the newest are shown, the others left out
_OVERLAP_S = 2.0  # records of one moment may come in two looks

# The grid's own functions: they only ever see numbers and our own words, and what they return is shown as text.
_SECONDS = (
    "p => p.value == null ? '–' : p.value < 0.001 ? '<1 ms' : p.value < 1 ? Math.round(p.value * 1000) + ' ms' : "
    "p.value.toFixed(p.value < 10 ? 1 : 0) + ' s'"
)
_COUNT = "p => p.value == null ? '–' : p.value.toLocaleString('en').replaceAll(',', '\u202f')"
_RATE = "p => p.value == null ? '–' : p.value.toFixed(p.value < 100 ? 1 : 0)"
_WHEN = "p => p.data.live ? 'now' : new Date(p.value * 1000).toLocaleTimeString()"
_TELL = "p => emitEvent('modelyard-request', {id: p.data.id, act: p.column.getColId() === 'act' && p.data.live})"


def page(session: Session) -> None:
    heading("Requests", "What waits and runs, and what ended lately. Enter or a click opens a request.")
    with ui.element("div").classes("line between w-full"):
        with ui.element("div").classes("line").style("gap: 28px"):
            running, waiting, ended, failed = (Figure(name) for name in ("running", "waiting", "ended", "failed"))
        with ui.element("div").classes("line"):
            search = ui.input(placeholder="Filter").props('outlined dense clearable aria-label="Filter"')
            TextSwitch(session)
    grid = ui.aggrid(_options(), auto_size_columns=False).classes("grid")
    search.on_value_change(lambda: grid.run_grid_method("setGridOption", "quickFilterText", search.value or ""))
    table = Table(_LIMIT)

    async def look() -> None:
        limit = _AT_ONCE if table.newest else _LIMIT
        told = await session.client.requests(limit, max(0.0, table.newest - _OVERLAP_S))
        apply(grid, table.take(told["live"], told["ended"], time.time()))
        states = [one["state"] for one in told["live"]]
        running.show(str(states.count("running")))
        waiting.show(str(states.count("waiting")))
        gone = [row for row in table.rows if not row["live"]]
        ended.show(words.count(len(gone)))
        failed.show(words.count(sum(row["failed"] for row in gone)))

    session.watch(_EVERY_S, look)


def apply(grid: ui.aggrid, changes: Changes) -> None:
    if changes:
        grid.run_grid_method("applyTransaction", msgspec.to_builtins(changes))


class TextSwitch:
    """Whether the texts of requests are kept in the server's memory. Off unless somebody wants to look."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._switch = ui.switch("Keep texts").tooltip(
            "Keeps prompts and answers in the server's memory, so that a request's page can show them"
        )
        self._switch.on("click", self._turned)
        ui.timer(0, self._recall, once=True)

    async def _recall(self) -> None:
        await self._session.act(self._recalled())

    async def _recalled(self) -> None:
        self._switch.set_value(bool((await self._session.client.history())["texts"]))

    async def _turned(self) -> None:
        on = bool(self._switch.value)
        await self._session.act(self._session.client.keep_texts(on), "Texts are kept" if on else "Texts are forgotten")


def _options() -> dict[str, Any]:
    return {
        "columnDefs": [
            _column("status", "Status", 96, cellClassRules={"text-negative": "x => x.data.failed"}),
            _column("model", "Model", 96, flex=1, minWidth=96),
            _column("cache", "Cache", 84),
            _column("client", "Client", 104),
            _column("session", "Session", 92),
            _number("queue", "Queue", _SECONDS),
            _number("first", "First token", _SECONDS, 92),
            _number("rate", "tok/s", _RATE),
            _number("prompt", "Prompt", _COUNT),
            _number("cached", "Cached", _COUNT),
            _number("output", "Output", _COUNT),
            _number("total", "Total", _SECONDS),
            _column("at", "When", 94, **{":valueFormatter": _WHEN, "sort": "desc"}),
            _column("act", "", 66, sortable=False),
        ],
        "rowData": [],
        ":getRowId": "p => p.data.id",
        "defaultColDef": {"sortable": True, "resizable": True, "suppressMovable": True},
        "rowHeight": 34,
        "headerHeight": 38,
        "animateRows": False,
        "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
        "overlayNoRowsTemplate": "<span>No requests yet</span>",
        ":onCellClicked": _TELL,
        ":onCellKeyDown": f"p => {{ if (p.event.key === 'Enter') ({_TELL})(p) }}",
    }


def _column(field: str, name: str, width: int, **more: Any) -> dict[str, Any]:
    rules = more.pop("cellClassRules", None)
    if rules is not None:
        more["cellClassRules"] = {f":{css}": rule for css, rule in rules.items()}
    return {"field": field, "headerName": name, "width": width, "cellDataType": False, **more}


def _number(field: str, name: str, shown: str, width: int = 76) -> dict[str, Any]:
    return _column(field, name, width, **{":valueFormatter": shown, "type": "rightAligned"})
