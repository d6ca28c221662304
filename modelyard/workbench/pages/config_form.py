"""The form that adds, changes and removes a model, a cache or a route in the configuration files.

Every change of a field is previewed by the server: the difference of the file and what is wrong, beside its field. Only
Save writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import DiffPane, card, page_heading, show_notice
from modelyard.workbench.session import PageSession

UNSET = "not set"
_WORDS = {"models": "model", "caches": "cache", "routes": "route"}
_PATHS = {"models": "/models", "caches": "/caches", "routes": "/routes"}
_DECIDE_FIELDS = ("backend", "path", "model")  # the engine, and so the fields, depend on them
_DELAY_S = 0.05  # for changes that come together; the fields themselves wait for the last key
_LONG_TEXTS = ("chat_template", "system_prompt")
_SHOWN_GROUPS = ("basic",)


def page(session: PageSession, section: str, name: str = "", index: str = "") -> None:
    word, number = _WORDS[section], int(index) if index.isdecimal() else None
    is_new = not name and number is None
    what = name or (f"{word} {number + 1}" if number is not None else "")
    page_heading(f"New {word}" if is_new else f"Edit {what}", f"A {word} of the configuration.")
    with ui.element("div").classes("config-page"):
        form = ConfigForm(session, section, name, number)
    ui.timer(0, form.open, once=True)


class ConfigForm:
    def __init__(self, session: PageSession, section: str, name: str, index: int | None) -> None:
        self._session, self._section, self._index = session, section, index
        self._is_new = not name and index is None
        self._rows: dict[str, FieldRow] = {}
        self._fields: dict[str, Json] = {}
        self._entry: Json = {"values": {}, "inherited": {}, "overridden": {}}
        self._dropped: set[str] = set()  # fields that the user has unset
        self._timer: ui.timer | None = None
        self._preview: Json | None = None
        self._previewed: Json = {}  # the change that it is of
        self._backend: str | None = None
        self._may_write = False
        with card().classes("config-form"):
            self._place = ui.label("").classes("muted small text")
            self._files = ui.select({}, label="File").props("outlined dense").classes("w-full")
            self._files.set_visibility(False)
            self._name = ui.input("Name", value=name).props("outlined dense debounce=300").classes("w-full name-field")
            self._name.set_visibility(section != "routes")
            self._name.set_enabled(self._is_new)
            self._form = ui.element("div").classes("fields load-form w-full")
            self._position = ui.number("Place", min=1, step=1).props("outlined dense debounce=300").classes("w-full")
            self._position.props["hint"] = "The first route that matches applies."
            self._position.set_visibility(section == "routes" and not self._is_new)
            self._note = ui.label("").classes("muted small text")
            self._more = ui.select({}, label="Add a setting", with_input=True, on_change=self._add)
            self._more.props("outlined dense").classes("w-full add-setting")
        with card().classes("config-form written"):
            ui.label("What will be written").classes("name").props("role=heading aria-level=2")
            self._target = ui.label("").classes("muted small text")
            self._diff = DiffPane()
            self._problems = ui.element("div").classes("w-full")
            self._refusal = ui.label("").classes("error small text").props("role=alert")
            self._refusal.set_visibility(False)
            with ui.element("div").classes("line"):
                self._save = ui.button("Save", icon="save", on_click=lambda: self._apply(force=False))
                self._save.props("unelevated no-caps")
                self._force = ui.button("Save anyway", on_click=lambda: self._apply(force=True))
                self._force.props("outline no-caps color=negative")
                ui.button("Cancel", on_click=self._leave).props("flat no-caps")
                ui.space()
                self._remove = ui.button("Remove", icon="delete", on_click=self._confirm_removal)
                self._remove.props("outline no-caps color=negative")
        for button in (self._save, self._force):
            button.set_visibility(False)
        self._remove.set_visibility(False)
        self._timers = ui.element("div").classes("hidden")

    # --- building -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            config = await self._session.client.get("config")
            self._read(config)
            await self._load_fields()
        except ModelyardError as error:
            self._refuse(error)
            return
        for each in (self._name, self._files, self._position):
            each.on_value_change(self._changed)
        await self._update()

    def _read(self, config: Json) -> None:
        if self._section == "routes":
            routes = config["routes"]
            values = routes["entries"][self._index] if self._index is not None else {}
            self._entry = {"values": values, "inherited": {}, "overridden": {}, "file": routes["file"]}
            self._position.value = None if self._index is None else self._index + 1
        elif not self._is_new:
            found = [each for each in config[self._section] if each["name"] == self._name.value]
            if not found:
                self._place.set_text(f"There is no {_WORDS[self._section]} {self._name.value}.")
                return
            self._entry = found[0]
        own = self._entry.get("file")
        self._files.set_options(
            {each["path"]: f"{each['path']} ({each['title']})" for each in config["files"]},
            value=own or config["target"],
        )
        self._files.set_visibility(len(config["files"]) > 1 and not own)
        self._place.set_text(place_text(self._entry, self._is_new, config))
        self._remove.set_visibility(not self._is_new and bool(own) and config["editable"])
        self._may_write = bool(config["editable"])
        if not config["editable"]:
            show_notice(self._refusal, "This server does not change its files over HTTP (http.edit_config = false).")

    async def _load_fields(self) -> None:
        """Offer the fields of the engine, and keep what was entered."""
        entered = {name: row.value for name, row in self._rows.items()}
        deciding = {name: entered[name] for name in _DECIDE_FIELDS if entered.get(name)}
        found = await self._session.client.post(
            "config", "fields", body={"section": self._section, "name": self._name.value or "", "values": deciding}
        )
        if self._rows and found["backend"] == self._backend:
            return
        self._backend = found["backend"]
        self._fields = {field["name"]: field for field in found["fields"]}
        show_notice(self._note, found.get("note", ""))
        self._form.clear()
        self._rows.clear()
        shown = [name for name, field in self._fields.items() if field["group"] in _SHOWN_GROUPS]
        names = dict.fromkeys([*shown, *self._entry["values"], *entered])
        with self._form:
            for name in names:
                if name not in self._dropped:
                    self._add_row(name, entered.get(name))
        self._offer_more()

    def _add_row(self, name: str, value: Any = None) -> None:
        field = self._fields.get(name) or unknown_field(name)
        present = self._entry["values"].get(name)
        row = FieldRow(
            field,
            present if value is None else value,
            placeholder=placeholder(field, self._entry["inherited"].get(name)),
            note=overridden_text(self._entry["overridden"].get(name)),
            on_change=self._changed,
            on_drop=None if field["group"] in _SHOWN_GROUPS else self._drop,
        )
        self._rows[name] = row

    def _offer_more(self) -> None:
        left = [field for name, field in self._fields.items() if name not in self._rows]
        self._more.set_options({field["name"]: f"{field['name']}: {field['description']}" for field in left})
        self._more.set_value(None)
        self._more.set_visibility(bool(left))

    def _add(self, event: Any) -> None:
        if not event.value:
            return
        name = str(event.value)
        self._dropped.discard(name)
        with self._form:
            self._add_row(name)
        self._offer_more()
        self._rows[name].focus()

    def _drop(self, name: str) -> None:
        self._dropped.add(name)
        self._rows.pop(name).delete()
        self._offer_more()
        self._changed()

    # --- the preview --------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._timers:  # not in the form, which the update may build again
            self._timer = ui.timer(_DELAY_S, self._update, once=True)

    def change(self) -> Json:
        """What the form changes, for the admin API."""
        present = self._entry["values"]
        entered = {name: row.value for name, row in self._rows.items()}
        given = {name: value for name, value in entered.items() if value is not None}
        change: Json = {
            "section": self._section,
            "set": {name: value for name, value in given.items() if value != present.get(name)},
            "unset": [name for name in present if name in self._dropped or (name in entered and name not in given)],
        }
        if self._section == "routes":
            change["index"] = self._index
            place = self._position.value
            if self._index is not None and place and int(place) - 1 != self._index:
                change["to"] = int(place) - 1
        else:
            change["name"] = (self._name.value or "").strip()
        return {**change, "new": self._is_new, "file": self._files.value or ""}

    async def _update(self) -> None:
        if self._form.is_deleted:
            return
        try:
            await self._load_fields()
            change = self.change()
            if not (change["set"] or change["unset"] or "to" in change) or (self._is_new and not _is_named(change)):
                self._show(None)
                return
            self._show(await self._session.client.post("config", "preview", body=change))
            self._previewed = change
        except ModelyardError as error:
            self._show(None)
            self._refuse(error)

    def _refuse(self, error: ModelyardError) -> None:
        show_notice(self._refusal, error.message)
        if error.kind in ("unauthenticated", "forbidden"):
            self._session.show_error(error)

    def _show(self, preview: Json | None) -> None:
        self._preview = preview
        problems = preview["problems"] if preview else []
        self._diff.set(preview["diff"] if preview else "")
        self._target.set_text(target_text(preview) if preview else "Nothing is changed yet.")
        if self._may_write:
            show_notice(self._refusal, "")
        by_field: dict[str, list[Json]] = {}
        for problem in problems:
            by_field.setdefault(problem["field"] if problem["field"] in self._rows else "", []).append(problem)
        for name, row in self._rows.items():
            row.show_problems(by_field.get(name, []))
        self._problems.clear()
        with self._problems:
            for problem in by_field.get("", []):
                style = "error" if problem["level"] == "error" else "muted"
                ui.label(f"{problem['path']}: {problem['message']}").classes(f"{style} small text").props("role=alert")
            for note in preview["notes"] if preview else ():
                ui.label(note).classes("muted small text")
        writable = bool(preview and preview["changed"] and self._may_write)
        self._save.set_visibility(writable and bool(preview and preview["valid"]))
        self._force.set_visibility(writable and bool(preview and not preview["valid"] and preview["can_force"]))

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _apply(self, *, force: bool) -> None:
        """Only what was previewed is written: what was typed since is shown first."""
        if self._preview is None:
            return
        change = self.change()
        if change != self._previewed:
            await self._update()
            return
        await self._write({**change, "revision": self._preview["revision"], "force": force})

    async def _write(self, change: Json) -> None:
        self._save.props("loading")
        try:
            done = await self._session.client.post("config", "apply", body=change)
        except ModelyardError as error:
            if error.code == "file_changed":
                await self._update()
            self._refuse(error)
            return
        finally:
            self._save.props(remove="loading")
        ui.notify(done_text(done), type="positive", multi_line=True)
        for warning in done["reload"]["warnings"]:
            ui.notify(warning, type="warning", multi_line=True, close_button="Close")
        self._leave()

    async def _confirm_removal(self) -> None:
        removal: Json = {"section": self._section, "remove": True}
        removal |= {"index": self._index} if self._section == "routes" else {"name": self._name.value}
        try:
            seen = await self._session.client.post("config", "preview", body=removal)
        except ModelyardError as error:
            self._refuse(error)
            return
        with ui.dialog() as dialog, ui.card().classes("card w-full").style("max-width: 620px"):
            ui.label(f"Remove this {_WORDS[self._section]}?").classes("name")
            ui.label(target_text(seen)).classes("muted small text")
            DiffPane().set(seen["diff"])
            for problem in seen["problems"]:
                style = "error" if problem["level"] == "error" else "muted"
                ui.label(f"{problem['path']}: {problem['message']}").classes(f"{style} small text").props("role=alert")

            async def confirm() -> None:
                dialog.close()
                await self._write({**removal, "revision": seen["revision"]})

            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
                button = ui.button("Remove", on_click=confirm).props("unelevated no-caps color=negative")
                button.set_enabled(seen["valid"])
        dialog.open()

    def _leave(self) -> None:
        ui.navigate.to(_PATHS[self._section])


class FieldRow:
    """One setting: its field, what it is for, and what is wrong with it."""

    def __init__(
        self,
        field: Json,
        value: Any,
        *,
        placeholder: str,
        note: str,
        on_change: Callable[[], None],
        on_drop: Callable[[str], None] | None,
    ) -> None:
        self._field, self._present = field, value
        with ui.element("div").classes("setting") as self._box:
            with ui.element("div").classes("line no-wrap w-full"):
                self._input = _make_input(field, value, placeholder)
                self._input.props["hint"] = field["description"]  # a value, so that it never becomes markup
                self._input.classes("grow").on_value_change(lambda _: on_change())
                if on_drop is not None:
                    drop = ui.button(icon="close", on_click=lambda: on_drop(field["name"]))
                    drop.props("flat round dense size=sm color=muted").props["aria-label"] = f"Unset {field['name']}"
            if note:
                ui.label(note).classes("text-warning small text")
            self._problem = ui.label("").classes("error small text").props("role=alert")
            self._problem.set_visibility(False)

    @property
    def value(self) -> Any:
        """As JSON; None: not set. A secret that was not entered again stays."""
        entered = entered_value(self._field, self._input.value)
        return self._present if entered is None and self._field.get("is_secret") else entered

    def show_problems(self, problems: list[Json]) -> None:
        show_notice(self._problem, " ".join(problem["message"] for problem in problems))
        is_error = any(problem["level"] == "error" for problem in problems)
        self._problem.classes(add="error" if is_error else "muted", remove="muted" if is_error else "error")

    def focus(self) -> None:
        self._input.run_method("focus")

    def delete(self) -> None:
        self._box.delete()


def _make_input(field: Json, value: Any, placeholder: str) -> Any:
    name, kind = field["name"], field["kind"]
    if kind in ("choice", "boolean"):
        options = [UNSET, *(field.get("choices") or ("on", "off"))]
        shown = UNSET if value is None else ("on" if value else "off") if kind == "boolean" else str(value)
        made: Any = ui.select(list(dict.fromkeys([*options, shown])), value=shown, label=name)
        return made.props("outlined dense options-dense")
    if kind in ("integer", "number") and not isinstance(value, str | list | dict):
        made = ui.number(name, value=value, placeholder=placeholder)
        return made.props(f"outlined dense debounce=300 stack-label step={1 if kind == 'integer' else 'any'}")
    text = shown_value(field, value)
    if kind == "list" or name in _LONG_TEXTS or "\n" in text:
        made = ui.textarea(name, value=text, placeholder=placeholder)
        return made.props("outlined dense autogrow debounce=300 stack-label rows=1")
    is_secret = bool(field.get("is_secret"))
    kept = "set; leave empty to keep it" if is_secret and value is not None else placeholder
    made = ui.input(name, value="" if is_secret else text, placeholder=kept, password=is_secret)
    return made.props("outlined dense debounce=300 stack-label")


# --- pure -------------------------------------------------------------------------------------------------------------


def _is_named(change: Json) -> bool:
    return change["section"] == "routes" or bool(change["name"])


def unknown_field(name: str) -> Json:
    """One that the engine does not have, but the file does."""
    return {"name": name, "kind": "value", "group": "more", "description": "This engine has no such setting."}


def shown_value(field: Json, value: Any) -> str:
    if value is None:
        return ""
    if field["kind"] == "list" and isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def entered_value(field: Json, value: Any) -> Any:
    """The value of an input as JSON; None: not set. What does not fit is passed on: the server says why."""
    if value is None or value == UNSET or (isinstance(value, str) and not value.strip()):
        return None
    kind = field["kind"]
    if kind == "boolean":
        return {"on": True, "off": False}.get(value, value)
    if kind == "list":
        return _list_value(str(value))
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "value" and isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _list_value(text: str) -> Any:
    """One entry per line, or JSON."""
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            pass
    return [line.strip() for line in text.splitlines() if line.strip()]


def placeholder(field: Json, inherited: Json | None) -> str:
    if inherited is not None:
        return f"{shown_value(field, inherited['value'])} (from {inherited['source']})"
    if field["kind"] == "list":
        return "one per line"
    default = field.get("default")
    low, high = field.get("minimum"), field.get("maximum")
    if default is not None and default != "":
        return f"default: {shown_value(field, default)}"
    if low is not None or high is not None:
        return f"{'…' if low is None else f'{low:g}'} to {'…' if high is None else f'{high:g}'}"
    return ", ".join(field.get("suggestions", ())[:4])


def overridden_text(source: str | None) -> str:
    return f"{source} decides; a value in the file has no effect." if source else ""


def place_text(entry: Json, is_new: bool, config: Json) -> str:
    """Where it is now."""
    if is_new:
        return "It is written to the file below." if len(config["files"]) > 1 else ""
    if entry.get("file"):
        title = next((each["title"] for each in config["files"] if each["path"] == entry["file"]), "")
        return f"In {entry['file']}, {title}."
    return f"It comes from the {entry.get('source', 'defaults')}; what you change is written to a file."


def target_text(preview: Json) -> str:
    exists = "" if preview["exists"] else ", which is created"
    effect = preview["effect"] or {}
    parts = [
        f"{', '.join(effect[key])} {words}"
        for key, words in (
            ("added", "is added"),
            ("changed", "is loaded again after its requests, if it is loaded"),
            ("removed", "is removed after its requests"),
        )
        if effect.get(key)
    ]
    return f"{preview['file']} ({preview['title']}){exists}." + (f" Then {'; '.join(parts)}." if parts else "")


def done_text(done: Json) -> str:
    backup = f" The old version is {done['backup']}." if done["backup"] else ""
    return f"{done['file']} was written.{backup}"
