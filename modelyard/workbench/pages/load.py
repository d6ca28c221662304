"""The form before a load: the fields that one load may set, made from their schemas, and whether it will fit."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import words
from modelyard.workbench.client import Json
from modelyard.workbench.session import Session

_UNSET = "as configured"


class LoadDialog:
    def __init__(self, session: Session, model: str) -> None:
        self._session, self._model = session, model
        self._fields: dict[str, Any] = {}
        self._schemas: Json = {}
        with ui.dialog() as self._dialog, ui.card().classes("card w-full").style("max-width: 520px"):
            ui.label(f"Load {model}").classes("name")
            ui.label("Empty fields stay as configured. What is set holds for this load only.").classes("faint small")
            self._form = ui.element("div").classes("fields w-full")
            self._fit = ui.label("").classes("small text")
            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                ui.button("Load", icon="play_arrow", on_click=self._load).props("unelevated no-caps")

    async def open(self, record: Json) -> None:
        self._schemas = record["load_constraints"]["overrides"]
        self._form.clear()
        with self._form:
            self._fields = {name: _field(name, schema) for name, schema in self._schemas.items()}
        for field in self._fields.values():
            field.on_value_change(self._appraise)
        self._dialog.open()
        await self._appraise()

    def _chosen(self) -> Json:
        given = ((name, field.value) for name, field in self._fields.items())
        return {name: chosen(self._schemas[name], value) for name, value in given if value not in (None, "", _UNSET)}

    async def _appraise(self) -> None:
        """Will it fit? Asked anew with every change, as it would be loaded now."""
        self._fit.classes(remove="text-negative text-positive")
        try:
            told = await self._session.client.estimate(self._model, self._chosen())
        except ModelyardError as error:
            self._fit.set_text(error.message)
            return
        self._fit.set_text(fit(told))
        self._fit.classes(add="text-positive" if told["fits"] else "text-negative")

    async def _load(self) -> None:
        if await self._session.act(self._session.client.load(self._model, self._chosen()), f"{self._model} is loading"):
            self._dialog.close()


def _field(name: str, schema: Json) -> Any:
    if "enum" in schema:
        return ui.select([_UNSET, *schema["enum"]], value=_UNSET, label=name).props("outlined dense").classes("w-full")
    kind = schema.get("type")
    if kind == "boolean":
        return ui.select([_UNSET, "on", "off"], value=_UNSET, label=name).props("outlined dense").classes("w-full")
    if kind in ("integer", "number"):
        hint = f"{schema.get('minimum', '…')} to {schema.get('maximum', '…')}"
        field = ui.number(name, min=schema.get("minimum"), max=schema.get("maximum"), placeholder=hint)
        return field.props(f"outlined dense debounce=400 step={1 if kind == 'integer' else 'any'}").classes("w-full")
    return ui.input(name).props("outlined dense debounce=400").classes("w-full")


def chosen(schema: Json, value: Any) -> Any:
    """As the admin API takes it."""
    if schema.get("type") == "boolean":
        return value == "on"
    return int(value) if schema.get("type") == "integer" else value


def fit(told: Json) -> str:
    taken, free = told["estimate"]["total"], told["free"]
    parts = ", ".join(f"{name} {words.size(told['estimate'][name])}" for name in ("weights", "kv", "compute"))
    verdict = "it fits" if told["fits"] else "it does not fit beside what is loaded now; idle models may make room"
    return f"Takes about {words.size(taken)} ({parts}); {words.size(free)} are free: {verdict}."
