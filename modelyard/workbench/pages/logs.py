"""The logs page: the server's last log lines, filtered by level, text and request."""

from __future__ import annotations

from nicegui import ui

from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import card, page_heading
from modelyard.workbench.session import PageSession

_INTERVAL_S = 1.0
_MAX_LINES = 500
_LEVELS = ["debug", "info", "warning", "error"]
_HIDDEN = ("at", "time", "level", "logger", "message", "request_id")
_COLOURS = {"warning": "text-warning", "error": "text-negative", "critical": "text-negative"}


def page(session: PageSession) -> None:
    page_heading("Logs", "The server's last lines, newest at the end.")
    LogView(session)


class LogView:
    def __init__(self, session: PageSession) -> None:
        self._session, self._since = session, 0.0
        self._lines: list[Json] = []
        with card() as box:
            box.style("max-width: none")
            with ui.element("div").classes("fields w-full"):
                self._level = ui.select(_LEVELS, value="info", label="Least level").props("outlined dense")
                self._text = ui.input("Contains").props("outlined dense clearable debounce=250")
                self._id = ui.input("Request").props("outlined dense clearable debounce=250")
            self._output = (
                ui.element("div").classes("code-block mono log-lines").props('role=log aria-label="Log lines"')
            )
            self._output.props("tabindex=0")
        for field in (self._level, self._id):
            field.on_value_change(self._restart)
        self._text.on_value_change(self._show_all)
        ui.run_javascript(f"modelyard.follow(getHtmlElement({self._output.id}))")
        session.poll(_INTERVAL_S, self._update)

    async def _restart(self) -> None:
        self._since, self._lines = 0.0, []
        self._output.clear()
        await self._update()

    async def _update(self) -> None:
        new = (
            await self._session.client.get(
                "logs", limit=_MAX_LINES, since=self._since, level=self._level.value, id=self._id.value or ""
            )
        )["lines"]
        if new:
            self._since = new[-1]["at"]
            self._lines = [*self._lines, *new][-_MAX_LINES:]
            self._append(new)

    def _show_all(self) -> None:
        self._output.clear()
        self._append(self._lines)

    def _append(self, lines: list[Json]) -> None:
        wanted = (self._text.value or "").lower()
        with self._output:
            for line in lines:
                text = line_text(line, self._session.utc_offset_s)
                if wanted in text.lower():
                    ui.label(text).classes(f"text {_COLOURS.get(line['level'], '')}")
        children = self._output.default_slot.children
        for surplus in children[: max(0, len(children) - _MAX_LINES)]:
            surplus.delete()


def line_text(line: Json, utc_offset_s: float) -> str:
    """Time, level, message, and what else the line says."""
    clock = fmt.clock(line["at"], utc_offset_s)
    details = " ".join(f"{name}={value}" for name, value in line.items() if name not in _HIDDEN)
    request = f"  [{line['request_id'][-8:]}]" if line.get("request_id") else ""
    return f"{clock} {line['level']:<7} {line['message']}{request}" + (f"  {details}" if details else "")
