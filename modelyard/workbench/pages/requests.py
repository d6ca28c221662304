"""The requests page, a live table of requests, and the page of one request: its timeline, cache use and texts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import (
    FORMAT_COUNT,
    SERIES_COLOURS,
    CodePane,
    Stat,
    StateBadge,
    StreamingText,
    caption,
    card,
    page_heading,
)
from modelyard.workbench.request_view import (
    RequestTable,
    event_lines,
    explain_cache_use,
    live_client,
    live_state,
    time_to_first_token,
    timeline,
    tool_run,
)
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
_FORMAT_COUNT = f"p => ({FORMAT_COUNT})(p.value)"
_FORMAT_RATE = "p => p.value == null ? '–' : p.value.toFixed(p.value < 100 ? 1 : 0)"
_FORMAT_TIME = "p => p.data.live ? 'now' : new Date(p.value * 1000).toTimeString().slice(0, 8)"
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
        found = await session.client.get("requests", limit=limit, since=max(0.0, table.newest - _OVERLAP_S))
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
        switch.set_value(bool((await session.client.get("history"))["texts"]))

    async def toggle() -> None:
        enabled = bool(switch.value)
        await session.perform(
            session.client.post("history", body={"texts": enabled}),
            "Texts are kept" if enabled else "Kept texts were deleted",
        )

    switch.on("click", toggle)
    ui.timer(0, lambda: session.perform(fetch()), once=True)


def _grid_options() -> dict[str, Any]:
    return {
        "columnDefs": [
            _column(
                "status", "Status", 96, tooltipField="status", cellClassRules={":text-negative": "x => x.data.failed"}
            ),
            _column("model", "Model", 96, flex=1, minWidth=96, tooltipField="model"),
            _column("cache", "Cache", 80, tooltipField="cache"),
            _column("client", "Client", 98, tooltipField="client"),
            _column("session", "Session", 88, tooltipField="session"),
            _number_column("queue", "Queue", _FORMAT_SECONDS),
            _number_column("first", "First token", _FORMAT_SECONDS, 92),
            _number_column("rate", "tok/s", _FORMAT_RATE),
            _number_column("prompt", "Prompt", _FORMAT_COUNT),
            _number_column("cached", "Cached", _FORMAT_COUNT),
            _number_column("output", "Output", _FORMAT_COUNT),
            _number_column("total", "Total", _FORMAT_SECONDS),
            _column("at", "Time", 94, **{":valueFormatter": _FORMAT_TIME, "sort": "desc"}),
            _column("act", "Action", 72, sortable=False),
        ],
        "rowData": [],
        ":getRowId": "p => p.data.id",
        "defaultColDef": {"sortable": True, "resizable": True, "suppressMovable": True},
        "rowHeight": 34,
        "headerHeight": 38,
        "animateRows": False,
        "enableBrowserTooltips": True,
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
    live: LiveRequestView | None = None
    is_over = False

    async def update() -> None:
        nonlocal live, is_over
        if is_over:
            return
        try:
            found = await session.client.get("requests", id)
        except ModelyardError as error:
            if error.kind != "not_found":
                raise
            box.clear()
            with box:
                ui.label(error.message).classes("error")
            return
        if found["ended"]:
            is_over = True
            box.clear()
            with box:
                await _show_ended_request(session, found)
        elif found["live"]:
            if live is None:
                with box:
                    live = LiveRequestView(session)
            live.update(found)

    session.poll(_INTERVAL_S, update)


async def _show_ended_request(session: PageSession, found: Json) -> None:
    for choice, record in enumerate(found["ended"], 1):
        if len(found["ended"]) > 1:
            caption(f"choice {choice}")
        _show_ended(record)
        await _show_cache_use(session, record, found["texts"])
    _show_texts(session, found)


class LiveRequestView:
    """A running or waiting request: where it is, its prompt, and its output so far."""

    def __init__(self, session: PageSession) -> None:
        self._session, self._id, self._shown = session, "", ""
        with card():
            with ui.element("div").classes("line between"):
                self._state = StateBadge()
                button = ui.button("Cancel", icon="close", on_click=self._cancel)
                button.props("unelevated no-caps color=negative size=sm")
            self._read = ui.linear_progress(0, show_value=False).props('rounded aria-label="Prompt read"')
            with ui.element("div").classes("stats"):
                names = ("model", "cache", "client", "waited", "running", "prompt", "cached", "output")
                self._stats = {name: Stat(name) for name in names}
        with ui.element("div").classes("text-columns"):
            with card():
                caption("Rendered prompt")
                self._prompt = CodePane("")
            with card():
                self._output_caption = caption("Raw output")
                with ui.element("div").classes("code-block mono live-output").props("tabindex=0"):
                    self._output = StreamingText()

    async def _cancel(self) -> None:
        await self._session.perform(self._session.client.post("requests", self._id, "cancel"), "Cancelled")

    def update(self, found: Json) -> None:
        record, texts = found["live"][0], found["texts"]
        self._id, progress = record["id"], record["progress"]
        state = live_state(record)
        self._state.set(state)
        reading = progress is not None and state.startswith("reading")
        self._read.set_visibility(reading)
        if reading:
            self._read.set_value(min(1.0, progress["read"] / progress["prompt"]))
        values = {
            "model": record["model"],
            "cache": record["cache"],
            "client": live_client(record) or fmt.MISSING,
            "waited": fmt.duration(record["waited"]),
            "running": fmt.duration(max(0.0, time.time() - record["since"] - record["waited"])),
            "prompt": fmt.count(progress["prompt"] if progress else record["tokens"]),
            "cached": fmt.count(progress["cached"] if progress else None),
            "output": fmt.count(progress["output"] if progress else None),
        }
        for name, value in values.items():
            self._stats[name].set(value)
        if texts is None:
            return
        if texts["prompt"] and not self._prompt.text:
            self._prompt.set(texts["prompt"])
        # Without kept texts the server has the output since this page was opened.
        self._output_caption.set_text("Raw output" if texts["request"] is not None else "Raw output from now on")
        new = texts["output"]
        if not new.startswith(self._shown):
            self._output.clear()
            self._shown = ""
        self._output.append(new[len(self._shown) :])
        self._output.flush()
        self._shown = new


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
        if record.get("calls"):
            caption("tools of MCP servers")
        for call in record.get("calls", ()):
            ui.label(tool_run(call)).classes("small mono")


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
    async def keep() -> None:
        await session.perform(session.client.post("history", body={"texts": True}), "Texts of new requests are kept")

    with card():
        ui.label("The texts of this request were not kept.")
        button = ui.button("Keep the texts of new requests", on_click=keep)
        button.props("outline no-caps size=sm").classes("self-start")
