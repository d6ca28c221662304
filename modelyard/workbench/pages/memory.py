"""The memory page: RAM and each GPU as a stacked bar, and whether the models that are not loaded would fit."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace
from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import NEUTRAL_COLOUR, SERIES_COLOURS, caption, card, page_heading
from modelyard.workbench.pages.models import LoadDialog, fit_text
from modelyard.workbench.session import PageSession

_INTERVAL_S = 2.0


# --- the bars ---------------------------------------------------------------------------------------------------------


class BarSegment(Struct, frozen=True):
    name: str
    bytes: int
    colour: str
    opacity: float = 1.0


class MemoryBar(Struct, frozen=True):
    name: str
    total: int
    segments: tuple[BarSegment, ...]

    @property
    def free(self) -> int:
        return self.total - sum(segment.bytes for segment in self.segments)


def memory_bars(memory: Json, models: list[Json]) -> list[MemoryBar]:
    """The RAM's bar and one per GPU. Estimates are per model, not per GPU: with several GPUs each bar gets a share of
    them in proportion to what the GPU has in use."""
    colours = {record["id"]: SERIES_COLOURS[index % len(SERIES_COLOURS)] for index, record in enumerate(models)}
    ram, gpus = memory["ram"], memory["gpus"]
    on_cpu = [segment for record in models for segment in _segments(record, "cpu", colours[record["id"]])]
    bars = [_bar("RAM", ram["total"], ram["total"] - ram["free"], on_cpu)]
    on_gpu = [segment for record in models for segment in _segments(record, "gpu", colours[record["id"]])]
    used = sum(gpu["used"] for gpu in gpus) or 1
    for gpu in gpus:
        share = gpu["used"] / used
        segments = [replace(segment, bytes=int(segment.bytes * share)) for segment in on_gpu]
        bars.append(_bar(gpu["name"], gpu["total"], gpu["used"], segments))
    return bars


def _bar(name: str, total: int, used: int, segments: list[BarSegment]) -> MemoryBar:
    """Estimates may exceed what is in use, because pages are allocated when they are first touched."""
    other = max(0, used - sum(segment.bytes for segment in segments))
    return MemoryBar(name, total, (*segments, BarSegment("everything else", other, NEUTRAL_COLOUR, 0.7)))


def _segments(record: Json, device: str, colour: str) -> Iterator[BarSegment]:
    estimate, name = record["memory"]["estimate"], record["id"]
    replicas = sum(replica["state"] in ("ready", "draining") for replica in record["replicas"]["items"])
    if estimate is None or not replicas or (estimate["device"] == "cpu") != (device == "cpu"):
        return
    yield BarSegment(f"{name} weights", estimate["weights"] * replicas, colour)
    tokens = {cache: settings["window"] * settings["parallel"] for cache, settings in record["caches"].items()}
    kv, all_tokens = estimate["kv"] * replicas, sum(tokens.values()) or 1
    for cache, count in tokens.items():
        yield BarSegment(f"{name} KV {cache}", int(kv * count / all_tokens), colour, 0.65)
    if estimate["compute"]:
        yield BarSegment(f"{name} compute", estimate["compute"] * replicas, colour, 0.35)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(session: PageSession) -> None:
    page_heading("Memory", "Memory in use on this machine. The parts of models are estimates.")
    bars_box = ui.column().classes("w-full gap-4 items-stretch")
    fits_box = ui.column().classes("w-full gap-4 items-stretch")
    shown_bars: list[MemoryBar] | None = None
    shown_stopped: list[str] | None = None

    async def update() -> None:
        nonlocal shown_bars, shown_stopped
        memory, models = await session.client.get("gpu-memory"), await session.client.rows("models")
        bars = memory_bars(memory, models)
        if bars != shown_bars:
            shown_bars = bars
            bars_box.clear()
            with bars_box:
                for bar in bars:
                    _show_bar(bar)
                _show_measured(models, memory)
        stopped = [record for record in models if not record["loaded"]]
        names = [record["id"] for record in stopped]
        if names != shown_stopped:
            shown_stopped = names
            fits_box.clear()
            with fits_box:
                await _show_fits(session, stopped)

    session.poll(_INTERVAL_S, update)


def _show_bar(bar: MemoryBar) -> None:
    with card():
        with ui.element("div").classes("line between"):
            ui.label(bar.name).classes("name")
            ui.label(f"{fmt.size(max(0, bar.free))} free of {fmt.size(bar.total)}").classes("muted")
        total = max(bar.total, sum(segment.bytes for segment in bar.segments)) or 1
        with ui.element("div").classes("stacked-bar memory"):
            for segment in bar.segments:
                part = ui.element("div").style(f"width: {segment.bytes / total * 100:.3f}%; {_css(segment)}")
                part.tooltip(f"{segment.name}: {fmt.size(segment.bytes)}")
        with ui.element("div").classes("line").style("gap: 8px 20px"):
            for segment in bar.segments:
                if segment.bytes:
                    with ui.element("div").classes("line small"):
                        ui.element("span").classes("swatch").style(_css(segment))
                        ui.label(f"{segment.name} {fmt.size(segment.bytes)}")


def _css(segment: BarSegment) -> str:
    return f"background: {segment.colour}; opacity: {segment.opacity}"


def _show_measured(models: list[Json], memory: Json) -> None:
    with card():
        ui.label(f"The server process uses {fmt.size(memory['ram']['used_here'])} of RAM.")
        for record in models:
            estimate, measured = record["memory"]["estimate"], record["memory"]["measured"]
            if record["loaded"] and estimate:
                text = f"measured {fmt.size(measured)}" if measured else "not measured yet"
                ui.label(f"{record['id']}: estimated {fmt.size(estimate['total'])}, {text}").classes("muted small")
        for limit in memory["limits"]:
            if limit["limit"] is not None:
                used = f"{fmt.size(limit['taken'])} of {fmt.size(limit['limit'])}"
                ui.label(f"limit on {limit['device']}: {used} used").classes("muted small")


async def _show_fits(session: PageSession, stopped: list[Json]) -> None:
    if not stopped:
        return
    caption("Will it fit?")
    with ui.element("div").classes("grid-cards"):
        for record in stopped:
            await _show_fit(session, record)


async def _show_fit(session: PageSession, record: Json) -> None:
    try:
        estimate = await session.client.post("models", record["id"], "estimate", body={})
        text, fits = ". ".join(fit_text(estimate)), bool(estimate["fits"])
    except ModelyardError as error:
        if error.kind in ("unauthenticated", "forbidden"):
            raise
        text, fits = error.message, False
    with card():
        with ui.element("div").classes("line between"):
            ui.label(record["id"]).classes("name")
            ui.icon("check_circle" if fits else "error").classes("text-positive" if fits else "text-negative text-lg")
        ui.label(text).classes("small text")
        dialog = LoadDialog(session, record["id"])
        button = ui.button("Load…", on_click=lambda: dialog.open(record)).props("outline no-caps size=sm")
        button.classes("self-start")
