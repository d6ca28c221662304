"""Each cache: its conversations, how full they are and whose they are, and how much of what is asked it had already."""

from __future__ import annotations

import time
from collections import deque

from nicegui import ui

from modelyard.workbench import words
from modelyard.workbench.charts import Line, chart, points
from modelyard.workbench.client import Json
from modelyard.workbench.parts import Figure, caps, card, heading, nothing
from modelyard.workbench.session import Session

_EVERY_S = 2.0
_SAMPLES = 300  # ten minutes


def page(session: Session) -> None:
    heading("Caches", "Isolated KV caches: who is in them, and how much they spare.")
    box = ui.element("div").classes("grid-cards")
    empty = nothing("No model has caches.")
    cards: dict[tuple[str, str, object], CacheCard] = {}

    async def look() -> None:
        rows = await session.client.caches()
        empty.set_visibility(not rows)
        keys = [(row["model"], row["cache"], row["replica"]) for row in rows]
        if keys != list(cards):
            box.clear()
            cards.clear()
            with box:
                cards.update({key: CacheCard(row) for key, row in zip(keys, rows, strict=True)})
        for key, row in zip(keys, rows, strict=True):
            cards[key].show(row, time.time())

    session.watch(_EVERY_S, look)


class CacheCard:
    def __init__(self, row: Json) -> None:
        self._window = int(row["window"])
        self._samples: deque[tuple[float, float | None]] = deque(maxlen=_SAMPLES)
        self._before: tuple[int, int] | None = None
        replica = f" · replica {row['replica'] + 1}" if row["replica"] else ""
        with card():
            with ui.element("div").classes("line between"):
                ui.label(f"{row['cache']}").classes("name")
                ui.label(f"{row['model']}{replica}").classes("tag")
            with ui.element("div").classes("figures"):
                self._reuse, self._reused, self._read, self._evictions = (
                    Figure(name) for name in ("reuse", "reused", "read", "evictions")
                )
            self._sequences = ui.column().classes("w-full gap-1")
            with ui.column().classes("w-full gap-0") as drawn:
                caps("reuse since this page was opened")
                self._chart = chart([Line("reuse", "share")], height=110)
            drawn.set_visibility(row["replica"] is not None)

    def show(self, row: Json, now: float) -> None:
        reused, read = row.get("reused_tokens", 0), row.get("evaluated_tokens", 0)
        self._reuse.show(words.share(row["reuse"]))
        self._reused.show(f"{words.count(reused)}")
        self._read.show(f"{words.count(read)}")
        self._evictions.show(words.count(row.get("evictions", 0)))
        self._sample(reused, read, now)
        self._show_sequences(row, now)

    def _sample(self, reused: int, read: int, now: float) -> None:
        """The share of what was asked since the last look; nothing where nothing was."""
        before, self._before = self._before, (reused, read)
        if before is None:
            return
        more, new = reused - before[0], read - before[1]
        if more + new > 0:
            self._samples.append((now, more / (more + new)))
            points(self._chart, [list(self._samples)])

    def _show_sequences(self, row: Json, now: float) -> None:
        self._sequences.clear()
        with self._sequences:
            if not row["sequences"]:
                told = "not loaded" if row["replica"] is None else "no conversation is in it"
                ui.label(f"{row['parallel']} places of {words.count(self._window)} tokens; {told}").classes(
                    "faint small"
                )
            for one in row["sequences"]:
                self._sequence(one, now)

    def _sequence(self, one: Json, now: float) -> None:
        share = min(1.0, one["tokens"] / self._window)
        with ui.element("div").classes("w-full"):
            with ui.element("div").classes("line between small"):
                who = one["session"] or "no session"
                ui.label(f"{one['id']} · {who}" + (" · running" if one["running"] else ""))
                used = words.ago(one["used"], now) if one["used"] else "unused"
                ui.label(f"{words.count(one['tokens'])} tokens · {used}").classes("faint")
            ui.linear_progress(round(share, 3), show_value=False).props("rounded size=6px")
