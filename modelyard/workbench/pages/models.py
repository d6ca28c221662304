"""The models page: a card per configured model with its state and its actions, and the dialog that loads a model.

A panel finds models on the hub and fetches them: what fits, progress, cancel, resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import Stat, StateBadge, card, empty_notice, page_heading, show_notice, tags
from modelyard.workbench.session import PageSession

SUGGESTIONS = (  # repositories to start with, by what they are for
    ("Small and quick", "unsloth/Qwen3-1.7B-GGUF"),
    ("Chat and tools", "unsloth/Qwen3-8B-GGUF"),
    ("Coding agents", "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF"),
    ("Pictures", "unsloth/gemma-3-4b-it-GGUF"),
)


class GetModelsPanel:
    """Search, the variants of a repository, and the downloads. `on_chat` opens the chat with a model."""

    def __init__(self, session: PageSession, on_chat: Callable[[str], None]) -> None:
        self._session, self._on_chat = session, on_chat
        self._rows: dict[str, DownloadRow] = {}
        with card() as self._box:
            self._box.classes("get-models")
            with ui.element("div").classes("line between"):
                ui.label("Get a model").classes("name").props("role=heading aria-level=2")
                ui.label("from the Hugging Face hub, as GGUF").classes("muted small")
            with ui.element("div").classes("line no-wrap w-full"):
                self._search = ui.input(placeholder="Search, or owner/name, or a URL").props("outlined dense clearable")
                self._search.props('aria-label="Search the hub"').classes("grow").on("keydown.enter", self._find)
                ui.button("Search", icon="search", on_click=self._find).props("unelevated no-caps")
            with ui.element("div").classes("line"):
                for title, repo in SUGGESTIONS:
                    ui.button(title, on_click=lambda repo=repo: self._show_offer(repo)).props("outline no-caps size=sm")
            self._error = ui.label("").classes("error small text").props("role=alert")
            self._error.set_visibility(False)
            self._results = ui.element("div").classes("w-full")
            self._downloads = ui.element("div").classes("w-full")
        session.poll(_INTERVAL_S, self._update)

    async def _find(self) -> None:
        text = (self._search.value or "").strip()
        if "/" in text:
            await self._show_offer(text)
            return
        found = await self._ask(self._session.client.rows("hub", search=text))
        if found is None:
            return
        with self._results:
            if not found:
                ui.label("The hub has no GGUF models with these words.").classes("muted")
            for row in found:
                with ui.element("div").classes("line between result-row"):
                    with ui.column().classes("gap-0"):
                        ui.label(row["repo"]).classes("text")
                        gated = " · needs a token of the hub" if row["gated"] else ""
                        ui.label(f"{fmt.count(row['downloads'])} downloads{gated}").classes("muted small")
                    choose = ui.button("Choose", on_click=lambda repo=row["repo"]: self._show_offer(repo))
                    choose.props("outline no-caps size=sm")

    async def _show_offer(self, repo: str) -> None:
        offer = await self._ask(self._session.client.get("hub", repo))
        if offer is None:
            return
        with self._results:
            ui.label(offer["repo"]).classes("name")
            if offer["reason"]:
                ui.label(offer["reason"]).classes("muted small")
            for variant in offer["variants"]:
                self._variant_row(offer["repo"], variant)

    def _variant_row(self, repo: str, variant: Json) -> None:
        with ui.element("div").classes("line between result-row"):
            with ui.element("div").classes("line"):
                ui.label(variant["label"]).classes("mono")
                ui.label(f"{fmt.size(variant['size'])}, needs {fmt.size(variant['needed'])}").classes("muted small")
                verdict = "fits" if variant["fits"] else "too large for this machine"
                ui.label(verdict).classes("tag" + ("" if variant["fits"] else " text-negative"))
                if variant["chosen"]:
                    ui.label("best choice").classes("tag text-positive")
            style = "unelevated" if variant["chosen"] else "outline"
            get = ui.button("Get", icon="download", on_click=lambda: self._get(repo, variant["label"]))
            get.props(f"{style} no-caps size=sm").set_enabled(variant["fits"])

    async def _get(self, repo: str, quant: str) -> None:
        if await self._ask(self._session.client.post("downloads", body={"source": repo, "quant": quant})) is not None:
            await self._update()

    async def _ask(self, request: Any) -> Any:
        """The answer, or None; then the reason is shown."""
        show_notice(self._error, "")
        self._results.clear()
        try:
            return await request
        except ModelyardError as error:
            show_notice(self._error, error.message)
            return None

    async def _update(self) -> None:
        downloads = await self._session.client.rows("downloads")
        if [each["id"] for each in downloads] != list(self._rows):
            self._downloads.clear()
            with self._downloads:
                self._rows = {each["id"]: DownloadRow(self, each) for each in downloads}
        for each in downloads:
            self._rows[each["id"]].update(each)

    async def cancel(self, id: str) -> None:
        await self._session.perform(self._session.client.post("downloads", id, "cancel"))

    async def resume(self, source: str) -> None:
        await self._session.perform(self._session.client.post("downloads", body={"source": source}))

    def chat(self, model: str) -> None:
        self._on_chat(model)


class DownloadRow:
    """One download: how far it is and how fast, or how it ended."""

    def __init__(self, panel: GetModelsPanel, download: Json) -> None:
        self._download = download
        with ui.element("div").classes("download w-full").props("role=status"):
            with ui.element("div").classes("line between"):
                ui.label(download["source"]).classes("text")
                with ui.element("div").classes("line"):
                    self._cancel = ui.button("Cancel", on_click=lambda: panel.cancel(download["id"]))
                    self._resume = ui.button("Resume", on_click=lambda: panel.resume(download["source"]))
                    self._chat = ui.button("Chat", icon="forum", on_click=lambda: panel.chat(self._download["model"]))
                    for button in (self._cancel, self._resume, self._chat):
                        button.props("outline no-caps size=sm")
            self._progress = ui.linear_progress(0, show_value=False).props('rounded aria-label="Downloaded"')
            self._text = ui.label("").classes("muted small text")

    def update(self, download: Json) -> None:
        self._download, state = download, download["state"]
        self._cancel.set_visibility(state == "running")
        self._resume.set_visibility(state in ("failed", "cancelled"))
        self._chat.set_visibility(state == "finished")
        self._progress.set_visibility(state == "running")
        self._progress.set_value(download["done"] / download["total"] if download["total"] else 0.0)
        self._text.set_text(download_text(download))
        self._text.classes(add="error" if state == "failed" else "", remove="" if state == "failed" else "error")


def download_text(download: Json) -> str:
    if download["state"] == "failed":
        return str(download["error"])
    if download["state"] == "cancelled":
        return f"cancelled at {fmt.size(download['done'])}; Resume continues there"
    if download["state"] == "finished":
        return f"in the library as {download['model']}"
    if not download["total"]:
        return download["note"] or "asking the hub …"
    rate, left = download["bytes_per_s"], download["total"] - download["done"]
    speed = f" · {fmt.size(rate)}/s · {fmt.duration(left / rate)} left" if rate else ""
    return f"{fmt.size(download['done'])} of {fmt.size(download['total'])}{speed}"


# --- the page ---------------------------------------------------------------------------------------------------------

_INTERVAL_S = 1.0
_UNSET = "as configured"
_MAX_DEFINITION_CHARACTERS = 4000


def page(session: PageSession) -> None:
    with ui.element("div").classes("line between w-full"):
        page_heading("Models", "Every model that this server can run, with its present state.")
        add = ui.button("Add a model", icon="add", on_click=lambda: ui.navigate.to("/models/edit"))
        add.props("outline no-caps").tooltip("Write a model into the configuration")
    GetModelsPanel(session, lambda model: open_chat(session, model))
    empty = empty_notice("No models yet: get one above. It is ready as soon as it is here.")
    empty.set_visibility(False)
    aside = ui.label("").classes("error small text").props("role=alert")
    grid = ui.element("div").classes("grid-cards")
    panels: dict[str, ModelPanel] = {}

    async def update() -> None:
        records = await session.client.rows("models")
        set_aside = [] if not session.may("operator") else await session.client.rows("set-aside")
        why = "Not resumed, because the server died with it twice. “Load” tries a model again: "
        show_notice(aside, why + ", ".join(map(str, set_aside)) if set_aside else "")
        empty.set_visibility(not records)
        if [record["id"] for record in records] != list(panels):
            grid.clear()
            panels.clear()
            with grid:
                panels.update({record["id"]: ModelPanel(session, record) for record in records})
        for record in records:
            panels[record["id"]].update(record)

    session.poll(_INTERVAL_S, update)


class ModelPanel:
    def __init__(self, session: PageSession, record: Json) -> None:
        self._session, self._name, self._record = session, str(record["id"]), record
        self._estimated: int | None = None  # bytes, for a model that was never loaded
        box = card()
        box.props["data-model"] = self._name  # a value, so that a name never becomes markup
        with box:
            self._build_header(record)
            with ui.column().classes("w-full gap-1") as self._loading:
                self._progress = ui.linear_progress(0, show_value=False).props(
                    'rounded color=warning aria-label="Loaded"'
                )
                self._phase = ui.label("").classes("muted small")
            self._reason = ui.label("").classes("error small text")
            with ui.element("div").classes("stats"):
                self._memory, self._measured, self._running, self._waiting, self._replicas, self._used = (
                    Stat(name) for name in ("memory", "measured", "running", "waiting", "replicas", "last used")
                )
            tags(capability_tags(record))
            self._build_actions()
            self._build_details(record)
            if record["memory"]["estimate"] is None:
                ui.timer(0, self._fetch_estimate, once=True)

    async def _fetch_estimate(self) -> None:
        try:
            found = await self._session.client.post("models", self._name, "estimate", body={})
            self._estimated = found["estimate"]["total"]
        except ModelyardError:
            return  # the panel shows no estimate; a load reports the reason

    def _build_header(self, record: Json) -> None:
        with ui.element("div").classes("line between"):
            ui.label(self._name).classes("name")
            self._state = StateBadge()
        with ui.element("div").classes("line"):
            ui.label(record["backend"]).classes("tag")
            self._windows = ui.label("").classes("tag")
            for alias in record["aliases"][:4]:
                ui.label(f"= {alias}").classes("tag")
        if record["description"]:
            ui.label(record["description"]).classes("muted small")

    def _build_actions(self) -> None:
        dialog = LoadDialog(self._session, self._name)
        with ui.element("div").classes("line"):
            self._load_button = _button("Load", "play_arrow", lambda: dialog.open(self._record), "unelevated")
            self._unload_button = _button("Unload", "stop", self._unload)
            self._drain_button = _button("Drain", "hourglass_bottom", self._drain)
            self._remove_button = _button("", "remove", lambda: self._scale(-1)).props(
                'aria-label="Remove a replica" dense'
            )
            self._add_button = _button("", "add", lambda: self._scale(1)).props('aria-label="Add a replica" dense')
            self._chat_button = _button("Chat", "forum", lambda: open_chat(self._session, self._name))
            _button("Edit", "edit", lambda: ui.navigate.to(f"/models/edit?name={quote(self._name, safe='')}"))
            if self._record["in_library"]:
                _button("Remove", "delete", self._remove)

    def _build_details(self, record: Json) -> None:
        definition = "\n".join(f"{name} = {value}" for name, value in record["definition"].items())
        with ui.expansion("Details").classes("w-full muted small").props("dense"):
            self._details = ui.label("").classes("mono text")
            ui.label(definition[:_MAX_DEFINITION_CHARACTERS]).classes("mono text code-block")
        with ui.expansion("Engine log").classes("w-full muted small").props("dense") as self._log_box:
            self._log = ui.label("").classes("mono text code-block")

    def update(self, record: Json) -> None:
        self._record = record
        state, queue, replicas = record["state"], record["queue"], record["replicas"]
        self._state.set(state)
        self._loading.set_visibility(state == "loading")
        self._progress.set_value(round(record["progress"], 2))
        self._phase.set_text(f"{record['phase'] or 'waiting'} · {fmt.percent(record['progress'])}")
        show_notice(self._reason, record["reason"] if state in ("failed", "stopped") else "")
        self._windows.set_text(windows_text(record))
        estimate = record["memory"]["estimate"]
        memory = estimate["total"] if estimate else self._estimated
        self._memory.set(f"≈ {fmt.size(memory)}" if memory else fmt.MISSING)
        self._measured.set(fmt.size(record["memory"]["measured"]))
        self._running.set(f"{queue['running']} / {queue['slots']}")
        self._waiting.set(fmt.count(queue["waiting"]))
        ready = sum(replica["state"] == "ready" for replica in replicas["items"])
        self._replicas.set(f"{ready} / {replicas['max']}")
        self._used.set(fmt.ago(record["last_used"], time.time()))
        self._details.set_text("\n".join(detail_lines(record)))
        self._log.set_text("\n".join(record["log"]))
        self._log_box.set_visibility(bool(record["log"]))
        self._update_actions(state, record)

    def _update_actions(self, state: str, record: Json) -> None:
        """Show the actions that the state allows."""
        replicas = record["replicas"]
        self._load_button.set_visibility(state in ("stopped", "failed", "draining"))
        self._load_button.set_text("Resume" if state == "draining" else "Load")
        self._unload_button.set_visibility(state in ("ready", "draining", "loading"))
        self._drain_button.set_visibility(state == "ready")
        for button, enabled in (
            (self._remove_button, replicas["wanted"] > 1),
            (self._add_button, replicas["wanted"] < replicas["max"]),
        ):
            button.set_visibility(state == "ready" and replicas["max"] > 1)
            button.set_enabled(enabled)
        is_usable = state == "ready" or record["loads_on_request"]
        self._chat_button.set_visibility(is_usable and record["capabilities"]["chat"])

    async def _unload(self) -> None:
        running = self._record["queue"]["running"]
        text = f"{self._name} unloads" + (f" after {fmt.plural(running, 'running request')}" if running else "")
        await self._session.perform(
            self._session.client.post("models", self._name, "unload", wait=False, force=False), text
        )

    async def _drain(self) -> None:
        text = f"{self._name} accepts no new requests"
        await self._session.perform(self._session.client.post("models", self._name, "drain"), text)

    async def _scale(self, step: int) -> None:
        replicas = self._record["replicas"]["wanted"] + step
        text = f"{self._name}: {fmt.plural(replicas, 'replica')}"
        await self._session.perform(
            self._session.client.post("models", self._name, "replicas", body={"replicas": replicas}, wait=False), text
        )

    def _remove(self) -> None:
        with ui.dialog() as dialog, ui.card().classes("card w-96"):
            ui.label(f"Remove {self._name}?").classes("name")
            ui.label("Its files are deleted from this machine.").classes("muted small")

            async def confirm() -> None:
                dialog.close()
                await self._session.perform(
                    self._session.client.send("DELETE", "library", self._name), f"{self._name} was removed"
                )

            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
                ui.button("Remove", on_click=confirm).props("unelevated no-caps color=negative")
        dialog.open()


def open_chat(session: PageSession, model: str) -> None:
    session.chat.settings.models = [model]
    ui.navigate.to("/")


def _button(text: str, icon: str, on_click: Any, style: str = "outline") -> ui.button:
    return ui.button(text, icon=icon, on_click=on_click).props(f"{style} no-caps size=sm")


def windows_text(record: Json) -> str:
    windows = sorted({cache["window"] for cache in record["caches"].values() if cache["window"] is not None})
    return " / ".join(fmt.count(window) for window in windows) + " tokens" if windows else "no window"


def capability_tags(record: Json) -> Iterator[str]:
    capabilities = record["capabilities"]
    yield from capabilities["modalities"]
    for name in ("chat", "tools", "structured", "logprobs", "lora", "embeddings", "rerank", "infill"):
        if capabilities[name]:
            yield name
    if len(capabilities["thinking_modes"]) > 1:
        yield "thinking"


def detail_lines(record: Json) -> Iterator[str]:
    for name, cache in record["caches"].items():
        window = "an unknown number of" if cache["window"] is None else fmt.count(cache["window"])
        yield f"cache {name}: {cache['parallel']} × {window} tokens"
    for field, value in record["overrides"].items():
        yield f"override {field} = {value}"
    if record["load_s"] is not None:
        yield f"last load took {fmt.duration(record['load_s'])}; loaded {fmt.plural(record['loads'], 'time')}"
    for replica in record["replicas"]["items"]:
        pid = f", process {replica['pid']}" if replica["pid"] else ""
        yield f"replica {replica['id']}: {replica['state']}, {replica['running']} running{pid}"


# --- the load dialog --------------------------------------------------------------------------------------------------


class LoadDialog:
    """A form made from the JSON Schemas of the fields that one load may override, and whether the model will fit."""

    def __init__(self, session: PageSession, model: str) -> None:
        self._session, self._model = session, model
        self._fields: dict[str, Any] = {}
        self._schemas: Json = {}
        with ui.dialog() as self._dialog, ui.card().classes("card load-card w-full").style("max-width: 620px"):
            ui.label(f"Load {model}").classes("name")
            with ui.element("div").classes("load-body"):
                ui.label("Fields that stay empty keep what they show. Changes hold for this load only.").classes(
                    "muted small"
                )
                self._form = ui.element("div").classes("fields load-form w-full")
                with ui.expansion("More settings").classes("w-full").props("dense") as self._more_box:
                    self._more = ui.element("div").classes("fields load-form w-full")
            with ui.element("div").classes("load-foot"):
                with ui.column().classes("gap-0 grow"):
                    self._fit = ui.label("").classes("name").props("role=status")
                    self._sizes = ui.label("").classes("muted small text")
                    self._refusal = ui.label("").classes("error small text").props("role=alert")
                    self._refusal.set_visibility(False)
                with ui.element("div").classes("line no-wrap self-end"):
                    ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                    ui.button("Load", icon="play_arrow", on_click=self._load).props("unelevated no-caps")

    async def open(self, record: Json) -> None:
        self._schemas = record["load_constraints"]["overrides"]
        self._fields = {}
        known = [name for name in _WORDS if name in self._schemas]
        others = [name for name in self._schemas if name not in known]
        for box, names in ((self._form, known), (self._more, others)):
            box.clear()
            with box:
                made = {name: _field(name, self._schemas[name], record["definition"].get(name)) for name in names}
            self._fields |= made
        self._more_box.set_visibility(bool(others))
        self._more_box.set_value(not known)
        for field in self._fields.values():
            field.on_value_change(self._update_fit)
        show_notice(self._refusal, "")
        self._dialog.open()
        await self._update_fit()

    def _overrides(self) -> Json:
        values = ((name, field.value) for name, field in self._fields.items())
        return {
            name: override_value(self._schemas[name], value)
            for name, value in values
            if value not in (None, "", _UNSET)
        }

    async def _update_fit(self) -> None:
        self._fit.classes(remove="text-negative text-positive")
        try:
            estimate = await self._session.client.post("models", self._model, "estimate", body=self._overrides())
        except ModelyardError as error:
            self._fit.set_text("")
            self._sizes.set_text("")
            show_notice(self._refusal, error.message)
            return
        show_notice(self._refusal, "")
        verdict, sizes = fit_text(estimate)
        self._fit.set_text(verdict)
        self._sizes.set_text(sizes)
        self._fit.classes(add="text-positive" if estimate["fits"] else "text-negative")

    async def _load(self) -> None:
        """A refusal is shown beside the button; the card of the model shows how the load goes."""
        try:
            await self._session.client.post("models", self._model, "load", body=self._overrides(), wait=False)
        except ModelyardError as error:
            show_notice(self._refusal, error.message)
            return
        self._dialog.close()


_WORDS = {  # what most loads are about, in people's words; the hint has the setting's own name
    "n_ctx": "Tokens of a conversation",
    "vllm_max_model_len": "Tokens of a conversation",
    "parallel": "Conversations at a time",
    "n_gpu_layers": "Layers on the GPU",
    "n_threads": "Threads for answers",
    "n_threads_batch": "Threads for prompts",
    "type_k": "Precision of cached keys",
    "type_v": "Precision of cached values",
    "flash_attn": "Flash attention",
    "speculation": "Guess tokens ahead",
}


def _field(name: str, schema: Json, configured: Any) -> Any:
    """`configured` is what an empty field means."""
    kind, label = schema.get("type"), _WORDS.get(name, name)
    kept = "default" if configured is None else f"{configured} (configured)"
    if "enum" in schema or kind == "boolean":
        options = schema.get("enum", ["on", "off"])
        field: Any = ui.select({_UNSET: kept, **{one: str(one) for one in options}}, value=_UNSET, label=label)
        field.props("outlined dense stack-label")
    elif kind in ("integer", "number"):
        minimum, maximum = schema.get("minimum"), schema.get("maximum")
        field = ui.number(label, min=minimum, max=maximum, placeholder=kept)
        field.props(f"outlined dense stack-label debounce=400 step={1 if kind == 'integer' else 'any'}")
    else:
        field = ui.input(label, placeholder=kept).props("outlined dense stack-label debounce=400")
    named = f"{name}: " if name in _WORDS else ""
    field.props["hint"] = named + schema.get("description", "")  # a value, so that it never becomes markup
    field.classes("w-full")
    return field


def override_value(schema: Json, value: Any) -> Any:
    """The value of a field as the admin API takes it."""
    if schema.get("type") == "boolean":
        return value == "on"
    return int(value) if schema.get("type") == "integer" else value


def fit_text(estimate: Json) -> tuple[str, str]:
    """A verdict, and what it rests on."""
    sizes = estimate["estimate"]
    parts = ", ".join(f"{name} {fmt.size(sizes[name])}" for name in ("weights", "kv", "compute"))
    if estimate["fits"]:
        verdict = "It fits"
    elif estimate["possible"]:
        verdict = "It does not fit beside the loaded models, but idle models may be unloaded for it"
    elif estimate["limit"] is not None:
        verdict = f"It can never fit, because models may take {fmt.size(estimate['limit'])} (memory limit)"
    else:
        verdict = "It can never fit into this machine"
    return verdict, f"Needs about {fmt.size(sizes['total'])} ({parts}); {fmt.size(estimate['free'])} are free."
