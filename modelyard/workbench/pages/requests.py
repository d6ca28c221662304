"""The requests page, a live table of requests, and the page of one request: its timeline, cache use and texts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import SERIES_COLOURS, CodePane, Stat, StateBadge, caption, card, page_heading
from modelyard.workbench.request_view import RequestTable, event_lines, explain_cache_use, time_to_first_token, timeline
from modelyard.workbench.session import PageSession

_INTERVAL_S = 1.0
_MAX_ROWS = 1000
_MAX_ROWS_PER_UPDATE = 100  # if more requests end in a second, only the newest are shown
_OVERLAP_S = 2.0  # requests that end at the same moment may arrive in two updates
_PHASE_COLOURS = dict(zip(("queue", "prefill", "decode", "tokenize", "other"), SERIES_COLOURS, strict=False))

# JavaScript functions for the grid. They get only numbers and constants of ours, and their results are shown as text.
_FORMAT_SECONDS = (
    "p => p.value == null ? '–' : p.value < 0.001 ? '<1 ms' : p.value < 1 ? Math.round(p.value * 1000) + ' ms' : "
    "p.value.toFixed(p.value < 10 ? 1 : 0) + ' s'"
)
_FORMAT_COUNT = "p => p.value == null ? '–' : p.value.toLocaleString('en').replaceAll(',', '\u202f')"
_FORMAT_RATE = "p => p.value == null ? '–' : p.value.toFixed(p.value < 100 ? 1 : 0)"
_FORMAT_TIME = "p => p.data.live ? 'now' : new Date(p.value * 1000).toLocaleTimeString()"
_EMIT_CLICK = "p => emitEvent('modelyard-request', {id: p.data.id, act: p.column.getColId() === 'act' && p.data.live})"


# --- the table --------------------------------------------------------------------------------------------------------


def page(session: PageSession) -> None:
    page_heading("Requests", "Waiting, running and recently ended requests. Click a request or press Enter to open it.")
    with ui.element("div").classes("line between w-full"):
        with ui.element("div").classes("line").style("gap: 28px"):
            running, waiting, ended, failed = (Stat(name) for name in ("running", "waiting", "ended", "failed"))
        with ui.element("div").classes("line"):
            search = ui.input(placeholder="Filter").props('outlined dense clearable aria-label="Filter"')
            _keep_texts_switch(session)
    grid = ui.aggrid(_grid_options(), auto_size_columns=False).classes("request-grid")
    search.on_value_change(lambda: grid.run_grid_method("setGridOption", "quickFilterText", search.value or ""))
    table = RequestTable(_MAX_ROWS)

    async def update() -> None:
        limit = _MAX_ROWS_PER_UPDATE if table.newest else _MAX_ROWS
        found = await session.client.requests(limit, max(0.0, table.newest - _OVERLAP_S))
        if changes := table.update(found["live"], found["ended"], time.time()):
            grid.run_grid_method("applyTransaction", msgspec.to_builtins(changes))
        states = [record["state"] for record in found["live"]]
        running.set(str(states.count("running")))
        waiting.set(str(states.count("waiting")))
        ended_rows = [row for row in table.rows if not row["live"]]
        ended.set(fmt.count(len(ended_rows)))
        failed.set(fmt.count(sum(row["failed"] for row in ended_rows)))

    session.poll(_INTERVAL_S, update)


def _keep_texts_switch(session: PageSession) -> None:
    """Turns the recording of texts on and off. It is off by default."""
    switch = ui.switch("Keep texts")
    switch.tooltip("Keeps prompts and answers in the server's memory, so that the page of a request can show them")

    async def fetch() -> None:
        switch.set_value(bool((await session.client.history())["texts"]))

    async def toggle() -> None:
        enabled = bool(switch.value)
        await session.perform(
            session.client.keep_texts(enabled), "Texts are kept" if enabled else "Kept texts were deleted"
        )

    switch.on("click", toggle)
    ui.timer(0, lambda: session.perform(fetch()), once=True)


def _grid_options() -> dict[str, Any]:
    return {
        "columnDefs": [
            _column("status", "Status", 96, cellClassRules={":text-negative": "x => x.data.failed"}),
            _column("model", "Model", 96, flex=1, minWidth=96),
            _column("cache", "Cache", 84),
            _column("client", "Client", 104),
            _column("session", "Session", 92),
            _number_column("queue", "Queue", _FORMAT_SECONDS),
            _number_column("first", "First token", _FORMAT_SECONDS, 92),
            _number_column("rate", "tok/s", _FORMAT_RATE),
            _number_column("prompt", "Prompt", _FORMAT_COUNT),
            _number_column("cached", "Cached", _FORMAT_COUNT),
            _number_column("output", "Output", _FORMAT_COUNT),
            _number_column("total", "Total", _FORMAT_SECONDS),
            _column("at", "Time", 94, **{":valueFormatter": _FORMAT_TIME, "sort": "desc"}),
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
        ":onCellClicked": _EMIT_CLICK,
        ":onCellKeyDown": f"p => {{ if (p.event.key === 'Enter') ({_EMIT_CLICK})(p) }}",
    }


def _column(field: str, name: str, width: int, **options: Any) -> dict[str, Any]:
    return {"field": field, "headerName": name, "width": width, "cellDataType": False, **options}


def _number_column(field: str, name: str, formatter: str, width: int = 76) -> dict[str, Any]:
    return _column(field, name, width, **{":valueFormatter": formatter, "type": "rightAligned"})


# --- one request ------------------------------------------------------------------------------------------------------


def detail_page(session: PageSession, id: str) -> None:
    with ui.element("div").classes("line between w-full"):
        page_heading(f"Request {id}")
        ui.button("All requests", icon="arrow_back", on_click=lambda: ui.navigate.to("/requests")).props("flat no-caps")
    box = ui.column().classes("w-full gap-4 items-stretch")
    shown: Json = {}

    async def update() -> None:
        nonlocal shown
        if shown.get("ended"):
            return
        try:
            found = await session.client.request(id)
        except ModelyardError as error:
            if error.kind != "not_found":
                raise
            box.clear()
            with box:
                ui.label(error.message).classes("error")
            return
        if found != shown:
            shown = found
            box.clear()
            with box:
                await _show_request(session, found)

    session.poll(_INTERVAL_S, update)


async def _show_request(session: PageSession, found: Json) -> None:
    for record in found["live"]:
        _show_live(session, record)
    for choice, record in enumerate(found["ended"], 1):
        if len(found["ended"]) > 1:
            caption(f"choice {choice}")
        _show_ended(record)
        await _show_cache_use(session, record, found["texts"])
    _show_texts(session, found)


def _show_live(session: PageSession, record: Json) -> None:
    cancel = lambda: session.perform(session.client.cancel(record["id"]), "Cancelled")  # noqa: E731
    with card():
        with ui.element("div").classes("line between"):
            StateBadge(record["state"])
            ui.button("Cancel", icon="close", on_click=cancel).props("unelevated no-caps color=negative size=sm")
        with ui.element("div").classes("stats"):
            Stat("model", record["model"])
            Stat("cache", record["cache"])
            Stat("prompt", f"{fmt.count(record['tokens'])} tokens")
            Stat("waited", fmt.duration(record["waited"]))
            Stat("position", str(record["position"] or fmt.MISSING))


def _show_ended(record: Json) -> None:
    usage, timings = record["usage"], record["timings"]
    with card():
        with ui.element("div").classes("line between"):
            ui.label(f"{record['model']} · {record['cache']}").classes("name")
            ui.label(record["status"]).classes("tag" + (" text-negative" if record["failed"] else ""))
        with ui.element("div").classes("stats"):
            Stat("first token", fmt.duration(time_to_first_token(timings)))
            Stat("tok/s", fmt.rate(record["tokens_per_s"]))
            Stat("total", fmt.duration(timings["total"]))
            Stat("prompt", fmt.count(usage["prompt"]))
            Stat("cached", fmt.count(usage["cached"]))
            Stat("output", fmt.count(usage["output"]))
            Stat("client", record["key"] or fmt.MISSING)
            Stat("session", record["session"] or fmt.MISSING)
        phases = timeline(timings)
        total = sum(seconds for _, seconds in phases) or 1.0
        caption("timeline")
        with ui.element("div").classes("stacked-bar timeline"):
            for name, seconds in phases:
                style = f"width: {seconds / total * 100:.2f}%; background: {_PHASE_COLOURS[name]}"
                ui.element("div").style(style).tooltip(f"{name} {fmt.duration(seconds)}")
        with ui.element("div").classes("line").style("gap: 18px"):
            for name, seconds in phases:
                with ui.element("div").classes("line small"):
                    ui.element("span").classes("swatch").style(f"background: {_PHASE_COLOURS[name]}")
                    ui.label(f"{name} {fmt.duration(seconds)}")


async def _show_cache_use(session: PageSession, record: Json, texts: Json | None) -> None:
    with card():
        caption("cache")
        for sentence in explain_cache_use(record):
            ui.label(sentence)
        if record["divergence"] and texts and texts["prompt"]:
            await _show_divergence(session, record, texts["prompt"])


async def _show_divergence(session: PageSession, record: Json, prompt: str) -> None:
    """The text around the first token that was not cached."""
    try:
        prefix = await session.client.prompt_prefix(record["model"], prompt, record["divergence"])
    except ModelyardError:
        return  # the model's tokenizer is not available any more; the sentences above must do
    if prompt.startswith(prefix):
        with ui.element("div").classes("code-block mono text"):
            ui.label(f"… {prefix[-200:]}").classes("muted").style("display: inline")
            ui.label("▸").classes("text-primary").style("display: inline")
            ui.label(f"{prompt[len(prefix) : len(prefix) + 200]} …").style("display: inline")


def _show_texts(session: PageSession, found: Json) -> None:
    texts = found["texts"]
    if texts is None:
        _offer_to_keep_texts(session)
        return
    endpoint = found["ended"][0]["endpoint"] if found["ended"] else ""
    with ui.element("div").classes("text-columns"):
        _show_text("Rendered prompt", texts["prompt"])
        _show_text("Raw output", texts["output"])
        _show_text("Parsed events", "\n".join(event_lines(endpoint, texts["response"])))
    with ui.element("div").classes("text-columns"):
        _show_text("Request", texts["request"])
        _show_text("Reply", texts["response"])


def _show_text(title: str, text: str) -> None:
    with card():
        caption(title)
        CodePane(text)


def _offer_to_keep_texts(session: PageSession) -> None:
    keep = lambda: session.perform(session.client.keep_texts(True), "Texts of new requests are kept")  # noqa: E731
    with card():
        ui.label("The texts of this request were not kept.")
        button = ui.button("Keep the texts of new requests", on_click=keep)
        button.props("outline no-caps size=sm").classes("self-start")
