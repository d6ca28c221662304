"""RAM and each GPU as a bar of what fills it, and whether the models that are not loaded would fit."""

from __future__ import annotations

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import words
from modelyard.workbench.bars import OTHER, Bar, Piece, bars
from modelyard.workbench.client import Json
from modelyard.workbench.pages.load import LoadDialog, fit
from modelyard.workbench.parts import caps, card, heading
from modelyard.workbench.session import Session

_EVERY_S = 2.0


def page(session: Session) -> None:
    heading("Memory", "What fills this machine now. Models are shown by their estimates, beside what was measured.")
    box = ui.column().classes("w-full gap-4 items-stretch")
    fits = ui.column().classes("w-full gap-4 items-stretch")
    seen: list[object] = [None, None]

    async def look() -> None:
        memory, models = await session.client.memory(), await session.client.models()
        made = bars(memory, models)
        if made != seen[0]:
            seen[0] = made
            box.clear()
            with box:
                for bar in made:
                    _bar(bar)
                _measured(models, memory)
        stopped = [record for record in models if not record["loaded"]]
        if [record["id"] for record in stopped] != seen[1]:
            seen[1] = [record["id"] for record in stopped]
            fits.clear()
            with fits:
                await _fits(session, stopped)

    session.watch(_EVERY_S, look)


def _bar(bar: Bar) -> None:
    with card():
        with ui.element("div").classes("line between"):
            ui.label(bar.name).classes("name")
            ui.label(f"{words.size(max(0, bar.free))} free of {words.size(bar.total)}").classes("faint")
        whole = max(bar.total, sum(piece.bytes for piece in bar.pieces)) or 1
        with ui.element("div").classes("stack memory"):
            for piece in bar.pieces:
                part = ui.element("div").style(f"width: {piece.bytes / whole * 100:.3f}%; {_paint(piece)}")
                part.tooltip(f"{piece.name}: {words.size(piece.bytes)}")
        with ui.element("div").classes("line").style("gap: 8px 20px"):
            for piece in bar.pieces:
                if piece.bytes:
                    with ui.element("div").classes("line small"):
                        ui.element("span").classes("key").style(_paint(piece))
                        ui.label(f"{piece.name} {words.size(piece.bytes)}")


def _paint(piece: Piece) -> str:
    return f"background: {piece.colour}; opacity: {piece.opacity if piece.colour != OTHER else 0.7}"


def _measured(models: list[Json], memory: Json) -> None:
    up = [record for record in models if record["loaded"] and record["memory"]["estimate"]]
    with card():
        ui.label(f"This server's process takes {words.size(memory['ram']['used_here'])} of RAM.")
        for record in up:
            told = record["memory"]
            ui.label(
                f"{record['id']}: estimated {words.size(told['estimate']['total'])}, "
                f"measured {words.size(told['measured']) if told['measured'] else 'nothing yet'}"
            ).classes("faint small")
        for limit in memory["limits"]:
            if limit["limit"] is not None:
                told_limit = f"{words.size(limit['taken'])} of {words.size(limit['limit'])}"
                ui.label(f"limit on {limit['device']}: {told_limit} taken").classes("faint small")


async def _fits(session: Session, stopped: list[Json]) -> None:
    if not stopped:
        return
    caps("Will it fit?")
    with ui.element("div").classes("grid-cards"):
        for record in stopped:
            await _fit(session, record)


async def _fit(session: Session, record: Json) -> None:
    try:
        told = await session.client.estimate(record["id"], {})
        text, good = fit(told), bool(told["fits"])
    except ModelyardError as error:
        if error.kind in ("unauthenticated", "forbidden"):
            raise
        text, good = error.message, False
    with card():
        with ui.element("div").classes("line between"):
            ui.label(record["id"]).classes("name")
            ui.icon("check_circle" if good else "error").classes("text-positive" if good else "text-negative text-lg")
        ui.label(text).classes("small text")
        dialog = LoadDialog(session, record["id"])
        button = ui.button("Load…", on_click=lambda: dialog.open(record)).props("outline no-caps size=sm")
        button.classes("self-start")
