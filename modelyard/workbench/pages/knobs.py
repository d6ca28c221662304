"""What stands beside the conversation: model, protocol, system prompt, sampling, tools."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from modelyard.core.request import Request
from modelyard.workbench.session import Session
from modelyard.workbench.talk import THINKING, WIRES

_TOOLS = '[{"name": "weather", "description": "…", "parameters": {"type": "object", "properties": {…}}}]'


class Settings:
    """Each field writes straight into the conversation's knobs, which outlive this page."""

    def __init__(self, session: Session) -> None:
        self._session, knobs = session, session.talk.knobs
        self._model = ui.select([], label="Model", with_input=True, new_value_mode="add-unique")
        self._model.props("outlined dense").classes("w-full model").on_value_change(self._set("model"))
        wires = ui.select(WIRES, value=knobs.wire, label="Protocol").props("outlined dense").classes("w-full wire")
        wires.on_value_change(self._set("wire"))
        self._text("system", "System prompt", knobs.system)
        with ui.element("div").classes("fields w-full").style("grid-template-columns: 1fr 1fr"):
            self._number("temperature", "Temperature", 0.1, whole=False)
            self._number("top_p", "Top p", 0.05, whole=False)
            self._number("top_k", "Top k", 1)
            self._number("max_tokens", "Max tokens", 1)
            self._number("seed", "Seed", 1)
            modes = ui.select(list(THINKING), value=knobs.thinking, label="Thinking").props("outlined dense")
            modes.on_value_change(self._set("thinking"))
        with ui.expansion("Stop strings").classes("w-full").props("dense"):
            self._text("stop", "One a line", knobs.stop)
        with ui.expansion("Tools").classes("w-full").props("dense"):
            self._text("tools", "JSON", knobs.tools, _TOOLS)
        ui.timer(0, self._list_models, once=True)

    async def _list_models(self) -> None:
        await self._session.act(self._listed())

    async def _listed(self) -> None:
        records = await self._session.client.models()
        names = [record["id"] for record in sorted(records, key=lambda one: not one["loaded"])]
        chosen = self._session.talk.knobs.model or (names[0] if names else "")
        self._model.set_options([*names, *([chosen] if chosen and chosen not in names else [])], value=chosen)

    def _set(self, name: str, whole: bool = False) -> Any:
        def changed(event: Any) -> None:
            value = event.value
            if whole and value is not None:
                value = int(value)
            setattr(self._session.talk.knobs, name, value)

        return changed

    def _number(self, name: str, label: str, step: float, *, whole: bool = True) -> None:
        value = getattr(self._session.talk.knobs, name)
        field = ui.number(label, value=value, step=step, placeholder="default")
        field.props("outlined dense").on_value_change(self._set(name, whole))

    def _text(self, name: str, label: str, value: str, hint: str = "") -> None:
        field = ui.textarea(label, value=value, placeholder=hint).props("outlined dense autogrow")
        field.classes(f"w-full {name}").on_value_change(self._set(name))

    def request(self) -> Request:
        return self._session.talk.request()
