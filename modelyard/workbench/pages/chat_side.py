"""Beside a chat: its settings, and the request and events on the wire."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.core.protocol import WireProtocol
from modelyard.workbench.api_client import ApiClient
from modelyard.workbench.chat_request import PROTOCOLS, THINKING_MODES, curl_snippet, format_body, python_snippet
from modelyard.workbench.components import CodePane, StreamingText
from modelyard.workbench.session import PageSession

_TOOLS_EXAMPLE = '[{"name": "weather", "description": "…", "parameters": {"type": "object", "properties": {…}}}]'
_NUMBERS = {  # field: label, step, whether it is a whole number, its name among a model's defaults
    "temperature": ("Temperature", 0.1, False),
    "top_p": ("Top p", 0.05, False),
    "top_k": ("Top k", 1, True),
    "max_tokens": ("Max tokens", 1, True),
    "seed": ("Seed", 1, True),
}
_RANDOM_SEED = 4294967295


class SettingsForm:
    """System prompt, sampling and tools. Each field writes to the chat's settings, and shows what it is without it."""

    def __init__(self, session: PageSession, on_change: Callable[[], None]) -> None:
        self._session, self._settings, self._on_change = session, session.chat.settings, on_change
        self._text("system", "System prompt", "You are …")
        self._numbers: dict[str, ui.number] = {}
        with ui.element("div").classes("fields w-full").style("grid-template-columns: 1fr 1fr"):
            for name, (label, step, _) in _NUMBERS.items():
                self._number(name, label, step)
            thinking = ui.select(list(THINKING_MODES), value=self._settings.thinking, label="Thinking")
            thinking.props("outlined dense").on_value_change(self._setter("thinking"))
        self._text("stop", "Stop strings", "none; one per line")
        if session.mcp_servers:
            self._build_servers()
        with ui.expansion("Tools of your own", value=bool(self._settings.tools)).classes("w-full").props("dense"):
            self._text("tools", "JSON", _TOOLS_EXAMPLE)
        protocol = ui.select(PROTOCOLS, value=self._settings.protocol, label="Protocol").props("outlined dense")
        protocol.classes("w-full protocol").on_value_change(self._setter("protocol"))

    def _build_servers(self) -> None:
        with ui.element("fieldset").classes("servers w-full"):
            ui.label("Tools that the server runs").classes("caption")
            for name in self._session.mcp_servers:
                box = ui.checkbox(name, value=name in self._settings.mcp).props("dense")
                box.on_value_change(lambda event, name=name: self._tick(name, bool(event.value)))

    def _tick(self, name: str, is_on: bool) -> None:
        others = [each for each in self._settings.mcp if each != name]
        self._settings.mcp = [*others, name] if is_on else others
        self._on_change()

    async def show_defaults(self) -> None:
        """Of the first model: what a field that is empty means."""
        found = {}
        if self._settings.models:
            try:
                found = await self._session.client.default_sampling(self._settings.models[0])
            except ModelyardError:
                found = {}  # an engine elsewhere has its own
        for name, field in self._numbers.items():
            if not field.is_deleted:
                field.props["placeholder"] = default_text(name, found.get(name))
                field.update()

    def _setter(self, name: str, integer: bool = False) -> Any:
        def changed(event: Any) -> None:
            value = event.value
            setattr(self._settings, name, int(value) if integer and value is not None else value)
            self._on_change()

        return changed

    def _number(self, name: str, label: str, step: float) -> None:
        field = ui.number(label, value=getattr(self._settings, name), step=step, placeholder="default")
        field.props("outlined dense stack-label clearable").on_value_change(self._setter(name, _NUMBERS[name][2]))
        self._numbers[name] = field

    def _text(self, name: str, label: str, hint: str = "") -> None:
        field = ui.textarea(label, value=getattr(self._settings, name), placeholder=hint)
        field.props("outlined dense autogrow stack-label").classes(f"w-full {name}").on_value_change(self._setter(name))


def default_text(name: str, value: Any) -> str:
    if name == "seed" and value in (None, _RANDOM_SEED, -1):
        return "random"
    if name == "max_tokens" and value in (None, -1):
        return "up to the window"
    if name == "top_k" and value == 0:
        return "off"
    return "default" if value is None else f"{value:g}"


class WireInspector:
    """The request as it was sent, the events as they arrive, and the request as code. Of several answers that are
    streamed at once, the last one that began is shown."""

    PANES = ("Request", "Events", "curl", "Python")

    def __init__(self) -> None:
        with ui.tab_panel("Request").classes("px-0"):
            self._request = CodePane("No request was sent yet.")
        with (
            ui.tab_panel("Events").classes("px-0"),
            ui.element("div").classes("code-block mono sse").props("tabindex=0"),
        ):
            self._events = StreamingText()
        with ui.tab_panel("curl").classes("px-0"):
            self._curl = CodePane()
        with ui.tab_panel("Python").classes("px-0"):
            self._python = CodePane()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._answer = ""  # the id of the answer that is shown

    def start(self, answer: str, client: ApiClient, protocol: WireProtocol, body: bytes) -> None:
        self._answer = answer
        path, needs_key = protocol.PATHS[0], bool(client.key)
        self._request.set(f"POST {path}\n\n{format_body(body)}")
        self._curl.set(curl_snippet(client.url, path, body, needs_key))
        self._python.set(python_snippet(client.url, path, body, needs_key))
        self._events.clear()
        self._decoder.reset()

    def feed(self, answer: str, data: bytes) -> None:
        if answer == self._answer:
            self._events.append(self._decoder.decode(data))

    def flush(self) -> None:
        self._events.flush()
