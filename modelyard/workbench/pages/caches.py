"""The caches page: the sequences in each cache, how full they are, and how much of the prompts was reused."""

from __future__ import annotations

import time
from collections import deque
from urllib.parse import quote

from nicegui import ui

from modelyard.telemetry.prefix_tree import tree_lines
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import Stat, caption, card, empty_notice, line_chart, page_heading, set_points
from modelyard.workbench.session import PageSession

_INTERVAL_S = 2.0
_MAX_SAMPLES = 300  # ten minutes


def page(session: PageSession) -> None:
    with ui.element("div").classes("line between w-full"):
        page_heading("Caches", "Isolated KV caches: the conversations in them and how much they save.")
        ui.button("Add a cache", icon="add", on_click=lambda: ui.navigate.to("/caches/edit")).props("outline no-caps")
    box = ui.element("div").classes("grid-cards")
    empty = empty_notice("No model has caches.")
    cards: dict[tuple[str, str, object], CacheCard] = {}

    async def update() -> None:
        rows = await session.client.rows("caches")
        empty.set_visibility(not rows)
        keys = [(row["model"], row["cache"], row["replica"]) for row in rows]
        if keys != list(cards):
            box.clear()
            cards.clear()
            with box:
                cards.update({key: CacheCard(session, row) for key, row in zip(keys, rows, strict=True)})
        for key, row in zip(keys, rows, strict=True):
            cards[key].update(row, time.time())

    session.poll(_INTERVAL_S, update)


class CacheCard:
    def __init__(self, session: PageSession, row: Json) -> None:
        self._session, self._cache, self._model = session, str(row["cache"]), str(row["model"])
        self._window: int | None = row["window"]  # that of a remote model may not be known
        self._samples: deque[tuple[float, float | None]] = deque(maxlen=_MAX_SAMPLES)
        self._last_counts: tuple[int, int] | None = None
        replica = f" · replica {row['replica'] + 1}" if row["replica"] else ""
        with card():
            with ui.element("div").classes("line between"):
                ui.label(row["cache"]).classes("name")
                with ui.element("div").classes("line"):
                    ui.label(f"{row['model']}{replica}").classes("tag")
                    edit = ui.button(icon="edit", on_click=lambda: session.perform(self._edit()))
                    edit.props("flat round dense size=sm color=muted").tooltip("Edit")
                    edit.props["aria-label"] = f"Edit {row['cache']}"
            with ui.element("div").classes("stats"):
                self._reuse, self._reused, self._evaluated, self._evictions = (
                    Stat(name) for name in ("reuse", "reused", "evaluated", "evictions")
                )
            self._sequences = ui.column().classes("w-full gap-1")
            with ui.column().classes("w-full gap-0") as history:
                caption("reuse since this page was opened")
                self._chart = line_chart(["reuse"], "share", height=110)
            history.set_visibility(row["replica"] is not None)

    async def _edit(self) -> None:
        """A model without caches has one of its own, whose window is the model's."""
        configured = [each["name"] for each in (await self._session.client.get("config"))["caches"]]
        section, name = ("caches", self._cache) if self._cache in configured else ("models", self._model)
        ui.navigate.to(f"/{section}/edit?name={quote(name, safe='')}")

    def update(self, row: Json, now: float) -> None:
        reused, evaluated = row.get("reused_tokens", 0), row.get("evaluated_tokens", 0)
        self._reuse.set(fmt.percent(row["reuse"]))
        self._reused.set(fmt.count(reused))
        self._evaluated.set(fmt.count(evaluated))
        self._evictions.set(fmt.count(row.get("evictions", 0)))
        self._add_sample(reused, evaluated, now)
        self._sequences.clear()
        with self._sequences:
            if not row["sequences"]:
                state = "not loaded" if row["replica"] is None else "empty"
                window = f" of {fmt.count(self._window)} tokens" if self._window else ""
                ui.label(f"{fmt.plural(row['parallel'], 'slot')}{window}; {state}").classes("muted small")
            for sequence in row["sequences"]:
                self._show_sequence(sequence, now)
            for line in tree_lines(row.get("prefixes", ())):
                ui.label(line).classes("muted small").style("white-space: pre")

    def _add_sample(self, reused: int, evaluated: int, now: float) -> None:
        """The share of reused tokens since the last update; no sample if there were no tokens."""
        last, self._last_counts = self._last_counts, (reused, evaluated)
        if last is None:
            return
        new_reused, new_evaluated = reused - last[0], evaluated - last[1]
        if new_reused + new_evaluated > 0:
            self._samples.append((now, new_reused / (new_reused + new_evaluated)))
            set_points(self._chart, [list(self._samples)])

    def _show_sequence(self, sequence: Json, now: float) -> None:
        with ui.element("div").classes("w-full"):
            with ui.element("div").classes("line between small"):
                session, running = sequence["session"] or "no session", " · running" if sequence["running"] else ""
                ui.label(f"{sequence['id']} · {session}{running}")
                used = fmt.ago(sequence["used"], now) if sequence["used"] else "unused"
                ui.label(f"{fmt.count(sequence['tokens'])} tokens · {used}").classes("muted")
            share = min(1.0, sequence["tokens"] / self._window) if self._window else 0.0
            ui.linear_progress(round(share, 3), show_value=False).props('rounded size=6px aria-label="Filled"')
