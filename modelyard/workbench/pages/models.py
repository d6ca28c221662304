"""All configured models as cards: their state, what they take, and the orders that can be given."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from typing import Any

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import words
from modelyard.workbench.client import Json
from modelyard.workbench.pages.load import LoadDialog
from modelyard.workbench.parts import Figure, State, card, heading, nothing, tags
from modelyard.workbench.session import Session

_EVERY_S = 1.0


def page(session: Session) -> None:
    heading("Models", "Everything this server can run, and what it is doing now.")
    empty = nothing("No models are configured.")
    empty.set_visibility(False)
    grid = ui.element("div").classes("grid-cards")
    cards: dict[str, ModelCard] = {}

    async def look() -> None:
        records = await session.client.models()
        empty.set_visibility(not records)
        names = [record["id"] for record in records]
        if names != list(cards):
            grid.clear()
            cards.clear()
            with grid:
                cards.update({record["id"]: ModelCard(session, record) for record in records})
        for record in records:
            cards[record["id"]].show(record)

    session.watch(_EVERY_S, look)


class ModelCard:
    def __init__(self, session: Session, record: Json) -> None:
        self._session, self._name, self._record = session, str(record["id"]), record
        self._expected: int | None = None  # bytes, of a model that nobody has loaded yet
        box = card()
        box.props["data-model"] = self._name  # as a value, never as a piece of markup
        with box:
            self._head(record)
            self._progress()
            self._reason = ui.label("").classes("trouble small text")
            self._figures()
            tags(abilities(record))
            self._orders()
            self._details(record)
            if record["memory"]["estimate"] is None:
                ui.timer(0, self._estimate, once=True)

    async def _estimate(self) -> None:
        try:
            self._expected = (await self._session.client.estimate(self._name, {}))["estimate"]["total"]
        except ModelyardError:
            return  # a load would say why; the card shows that it is not known

    # --- what it is made of -------------------------------------------------------------------------------------------

    def _head(self, record: Json) -> None:
        with ui.element("div").classes("line between"):
            ui.label(self._name).classes("name")
            self._state = State()
        with ui.element("div").classes("line"):
            ui.label(record["backend"]).classes("tag")
            self._context = ui.label("").classes("tag")
            for alias in record["aliases"][:4]:
                ui.label(f"= {alias}").classes("tag")
        if record["description"]:
            ui.label(record["description"]).classes("faint small")

    def _progress(self) -> None:
        with ui.column().classes("w-full gap-1") as self._loading:
            self._bar = ui.linear_progress(0, show_value=False).props("rounded color=warning")
            self._doing = ui.label("").classes("faint small")

    def _figures(self) -> None:
        with ui.element("div").classes("figures"):
            self._memory = Figure("memory")
            self._measured = Figure("measured")
            self._queue = Figure("running")
            self._waiting = Figure("waiting")
            self._replicas = Figure("replicas")
            self._used = Figure("last used")

    def _orders(self) -> None:
        dialog = LoadDialog(self._session, self._name)
        with ui.element("div").classes("line"):
            self._load = _button("Load", "play_arrow", lambda: dialog.open(self._record), "unelevated")
            self._unload = _button("Unload", "stop", self._do_unload)
            self._drain = _button("Drain", "hourglass_bottom", self._do_drain)
            self._less = _button("", "remove", lambda: self._scale(-1)).props('aria-label="One replica less" dense')
            self._more = _button("", "add", lambda: self._scale(1)).props('aria-label="One replica more" dense')
            self._chat = _button("Chat", "forum", self._open_chat)

    def _details(self, record: Json) -> None:
        with ui.expansion("Details").classes("w-full faint small").props("dense"):
            self._facts = ui.label("").classes("mono text")
            ui.label(_definition(record)).classes("mono text well")
        with ui.expansion("Engine log").classes("w-full faint small").props("dense") as self._log_box:
            self._log = ui.label("").classes("mono text well")

    # --- what is shown ------------------------------------------------------------------------------------------------

    def show(self, record: Json) -> None:
        self._record = record
        state, queue, replicas = record["state"], record["queue"], record["replicas"]
        self._state.show(state)
        self._loading.set_visibility(state == "loading")
        self._bar.set_value(round(record["progress"], 2))
        self._doing.set_text(f"{record['doing'] or 'waiting'} · {words.share(record['progress'])}")
        self._reason.set_text(record["reason"])
        self._reason.set_visibility(bool(record["reason"]) and state in ("failed", "stopped"))
        self._context.set_text(context(record))
        estimate = record["memory"]["estimate"]
        taken = estimate["total"] if estimate else self._expected
        self._memory.show(f"≈ {words.size(taken)}" if taken else words.NOTHING)
        self._measured.show(words.size(record["memory"]["measured"]))
        self._queue.show(f"{queue['running']} / {queue['places']}")
        self._waiting.show(words.count(queue["waiting"]))
        up = sum(one["state"] == "ready" for one in replicas["items"])
        self._replicas.show(f"{up} / {replicas['max']}")
        self._used.show(words.ago(record["last_used"], time.time()))
        self._facts.set_text("\n".join(facts(record)))
        self._log.set_text("\n".join(record["log"]))
        self._log_box.set_visibility(bool(record["log"]))
        self._permit(state, record)

    def _permit(self, state: str, record: Json) -> None:
        replicas = record["replicas"]
        self._load.set_visibility(state in ("stopped", "failed", "draining"))
        self._load.set_text("Open again" if state == "draining" else "Load")
        self._unload.set_visibility(state in ("ready", "draining", "loading"))
        self._drain.set_visibility(state == "ready")
        several = state == "ready" and replicas["max"] > 1
        for button, possible in (
            (self._less, replicas["wanted"] > 1),
            (self._more, replicas["wanted"] < replicas["max"]),
        ):
            button.set_visibility(several)
            button.set_enabled(possible)
        self._chat.set_visibility(state == "ready" or record["loads_on_request"])

    # --- orders -------------------------------------------------------------------------------------------------------

    async def _order(self, work: Awaitable[Any], done: str) -> None:
        await self._session.act(work, done)

    async def _do_unload(self) -> None:
        running = self._record["queue"]["running"]
        told = f"{self._name} is unloaded" + (f" when its {running} requests are done" if running else "")
        await self._order(self._session.client.unload(self._name), told)

    async def _do_drain(self) -> None:
        await self._order(self._session.client.drain(self._name), f"{self._name} takes no new requests")

    async def _scale(self, step: int) -> None:
        wanted = self._record["replicas"]["wanted"] + step
        await self._order(self._session.client.scale(self._name, wanted), f"{self._name}: {wanted} replicas")

    def _open_chat(self) -> None:
        self._session.talk.knobs.model = self._name
        ui.navigate.to("/playground")


def _button(text: str, icon: str, click: Any, look: str = "outline") -> ui.button:
    return ui.button(text, icon=icon, on_click=click).props(f"{look} no-caps size=sm")


# --- words ------------------------------------------------------------------------------------------------------------


def context(record: Json) -> str:
    windows = sorted({cache["window"] for cache in record["caches"].values()})
    return " / ".join(words.count(window) for window in windows) + " tokens" if windows else "no window"


def abilities(record: Json) -> Iterator[str]:
    can = record["capabilities"]
    yield from can["modalities"]
    for name in ("tools", "structured", "logprobs", "lora", "embeddings"):
        if can[name]:
            yield name
    if len(can["thinking_modes"]) > 1:
        yield "thinking"


def facts(record: Json) -> Iterator[str]:
    for name, cache in record["caches"].items():
        yield f"cache {name}: {cache['parallel']} × {words.count(cache['window'])} tokens"
    for field, value in record["overrides"].items():
        yield f"override {field} = {value}"
    if record["load_s"] is not None:
        yield f"last load took {words.seconds(record['load_s'])}; loaded {record['loads']} times"
    for one in record["replicas"]["items"]:
        pid = f", process {one['pid']}" if one["pid"] else ""
        yield f"replica {one['id']}: {one['state']}, {one['running']} running{pid}"


def _definition(record: Json) -> str:
    return "\n".join(f"{name} = {value}" for name, value in record["definition"].items())[:4000]
