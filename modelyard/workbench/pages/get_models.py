"""The panel of the models page that finds models on the hub and fetches them: what fits, progress, cancel, resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import card, show_notice
from modelyard.workbench.session import PageSession

_INTERVAL_S = 1.0
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
        found = await self._ask(self._session.client.search_hub(text))
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
        offer = await self._ask(self._session.client.offer(repo))
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
        if await self._ask(self._session.client.start_download(repo, quant)) is not None:
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
        downloads = await self._session.client.downloads()
        if [each["id"] for each in downloads] != list(self._rows):
            self._downloads.clear()
            with self._downloads:
                self._rows = {each["id"]: DownloadRow(self, each) for each in downloads}
        for each in downloads:
            self._rows[each["id"]].update(each)

    async def cancel(self, id: str) -> None:
        await self._session.perform(self._session.client.cancel_download(id))

    async def resume(self, source: str) -> None:
        await self._session.perform(self._session.client.start_download(source))

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
