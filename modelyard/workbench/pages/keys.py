"""The keys page: who may use the server, how much, and how much was used; keys are created, changed and revoked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import (
    FORMAT_COUNT,
    Stat,
    StateBadge,
    card,
    copy_button,
    page_heading,
    show_notice,
)
from modelyard.workbench.session import PageSession

_INTERVAL_S = 5.0
_PERIODS = {"day": "a day", "month": "a month", "total": "in all"}
_REMOTE = {"": "on routes that allow it", "yes": "always", "no": "never"}
_LIMITS = {  # field: label, hint, whether it is a whole number
    "requests_per_minute": ("Requests a minute", "More are answered 429.", True),
    "tokens_per_minute": ("Tokens a minute", "Of prompts and answers together.", True),
    "max_concurrent": ("Requests at a time", "Waiting and running ones.", True),
    "token_budget": ("Token budget", "Of prompts and answers, in one period.", True),
    "cost_budget": ("Cost budget", "By the prices of the models, in one period.", False),
}
_NO_KEYS = (
    "This server has no keys: everyone on this machine may use it. The first key is an operator's or an owner's; from "
    "then on every request needs a key."
)
_ROLES = {
    "member": "Member: uses models",
    "operator": "Operator: also manages models and keys, and reads logs",
    "owner": "Owner: also changes the configuration",
}
_GROUPS = {"key": "Key", "model": "Model", "day": "Day"}
_COUNTS = {
    "requests": "Requests",
    "failed": "Failed",
    "prompt": "Prompt tokens",
    "cached": "Cached tokens",
    "output": "Output tokens",
    "cost": "Cost",
}


def page(session: PageSession) -> None:
    with ui.element("div").classes("line between w-full"):
        page_heading("Keys", "Who may use this server, how much, and how much they have used.")
        create = ui.button("Create a key", icon="add", on_click=lambda: KeyDialog(session, update).open())
        create.props("outline no-caps")
    notice = ui.label("").classes("muted text")
    notice.set_visibility(False)
    with ui.element("div").classes("line"):
        revoked = ui.switch("Show revoked keys", on_change=lambda: session.perform(update()))
    grid = ui.element("div").classes("grid-cards")
    panels: dict[str, KeyPanel] = {}

    async def update() -> None:
        found = await session.client.get("keys", revoked=bool(revoked.value))
        keys, currency = found["data"], found["currency"]
        show_notice(notice, "" if any(key["state"] == "active" for key in keys) else _NO_KEYS)
        if [key["id"] for key in keys] != list(panels):
            grid.clear()
            panels.clear()
            with grid:
                panels.update({key["id"]: KeyPanel(session, key, update) for key in keys})
        for key in keys:
            panels[key["id"]].update(key, currency)

    session.poll(_INTERVAL_S, update)
    UsageTable(session)


def usage_page(session: PageSession) -> None:
    """What a member sees: its own key, without the buttons."""
    page_heading("Usage", "What you have used, and what is left.")
    box, panels = ui.element("div").classes("grid-cards"), dict[str, KeyPanel]()

    async def update() -> None:
        found = await session.client.get("keys")
        with box:
            for key in found["data"]:
                panels.setdefault(key["id"], KeyPanel(session, key, update)).update(key, found["currency"])

    session.poll(_INTERVAL_S, update)
    UsageTable(session)


class KeyPanel:
    def __init__(self, session: PageSession, key: Json, on_change: Any) -> None:
        self._session, self._key, self._on_change = session, key, on_change
        box = card()
        box.props["data-key"] = key["name"]  # a value, so that a name never becomes markup
        with box:
            with ui.element("div").classes("line between"):
                ui.label(key["name"]).classes("name")
                self._state = StateBadge()
            with ui.element("div").classes("line"):
                if key["role"] != "member":
                    ui.label(key["role"]).classes("tag")
                ui.label("from the configuration" if key["source"] == "config" else "created here").classes("tag")
                if key["hint"]:
                    ui.label(f"ends with {key['hint'].lstrip('…')}").classes("tag mono")
            with ui.element("div").classes("stats"):
                self._requests, self._prompt, self._output, self._cost, self._used = (
                    Stat(name) for name in ("requests", "prompt", "output", "cost", "last used")
                )
            self._rules = ui.label("").classes("muted small text")
            with ui.column().classes("w-full gap-1") as self._budget_box:
                self._budget = ui.label("").classes("small")
                self._bar = ui.linear_progress(0, show_value=False).props('rounded size=6px aria-label="Budget in use"')
            self._actions = ui.element("div").classes("line")
            if key["source"] == "created" and session.may("operator"):
                self._build_actions()

    def _build_actions(self) -> None:
        with self._actions:
            edit = ui.button("Limits", icon="tune", on_click=self._edit)
            revoke = ui.button("Revoke", icon="block", on_click=self._confirm)
            for button in (edit, revoke):
                button.props("outline no-caps size=sm")

    def _edit(self) -> None:
        KeyDialog(self._session, self._on_change, self._key).open()

    def update(self, key: Json, currency: str) -> None:
        self._key, used = key, key["usage"]
        self._state.set(key["state"])
        self._requests.set(fmt.count(used["requests"]))
        self._prompt.set(fmt.count(used["prompt"]))
        self._output.set(fmt.count(used["output"]))
        self._cost.set(fmt.cost(used["cost"], currency))
        self._used.set(fmt.ago(key["last_used"], time.time()))
        self._rules.set_text("\n".join(rule_lines(key, self._session.utc_offset_s)))
        share, text = budget_use(key, currency)
        self._budget_box.set_visibility(bool(text))
        self._budget.set_text(text)
        self._bar.set_value(share)
        self._bar.props(f"color={'negative' if share >= 1 else 'primary'}")
        if key["source"] == "created":
            self._actions.set_visibility(key["state"] != "revoked")

    def _confirm(self) -> None:
        name = self._key["name"]
        with ui.dialog() as dialog, ui.card().classes("card w-96"):
            ui.label(f"Revoke {name}?").classes("name")
            ui.label("It stops working at once, and its running requests end. Its usage stays.").classes("muted small")

            async def confirm() -> None:
                dialog.close()
                if await self._session.perform(
                    self._session.client.send("DELETE", "keys", self._key["id"]), f"{name} is revoked"
                ):
                    await self._session.perform(self._on_change())

            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
                ui.button("Revoke", on_click=confirm).props("unelevated no-caps color=negative")
        dialog.open()


class KeyDialog:
    """The form of a new key, or of the limits of one. The secret of a new key is shown once."""

    def __init__(self, session: PageSession, on_change: Any, key: Json | None = None) -> None:
        self._session, self._on_change, self._key = session, on_change, key
        known = key or {}
        with ui.dialog() as self._dialog, ui.card().classes("card w-full").style("max-width: 620px") as self._card:
            ui.label(f"Limits of {known['name']}" if key else "Create a key").classes("name")
            if key is None:
                self._name = ui.input("Name").props("outlined dense autofocus").classes("w-full")
                self._name.props["hint"] = "Logs, requests and usage call the key so."
            self._role = ui.select(_ROLES, value=known.get("role", "member"), label="Role").props("outlined dense")
            self._role.classes("w-full")
            self._models = ui.textarea("Models", value="\n".join(known.get("models", ())), placeholder="all")
            self._models.props("outlined dense autogrow stack-label rows=1").classes("w-full")
            self._models.props["hint"] = "One per line: names of models and caches, with * for any letters."
            with ui.element("div").classes("fields load-form w-full"):
                self._limits = {name: _limit_field(name, known.get(name)) for name in _LIMITS}
                self._period = ui.select(_PERIODS, value=known.get("budget_period", "month"), label="Budget is for")
                self._expires = ui.input("Expires", value=fmt.day(known.get("expires")))
                self._expires.props('type=date stack-label hint="At the start of this day, UTC; empty: never"')
                allowed = known.get("allow_remote")
                remote = "" if allowed is None else "yes" if allowed else "no"
                self._remote = ui.select(_REMOTE, value=remote, label="Models on other servers")
                for field in (self._period, self._expires, self._remote):
                    field.props("outlined dense").classes("w-full")
            self._refusal = ui.label("").classes("error small text").props("role=alert")
            self._refusal.set_visibility(False)
            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                ui.button("Save" if key else "Create", on_click=self._submit).props("unelevated no-caps")

    def open(self) -> None:
        self._dialog.open()

    def _values(self) -> Json:
        limits = {name: limit_value(name, field.value) for name, field in self._limits.items()}
        return {
            "role": self._role.value,
            "models": [line.strip() for line in (self._models.value or "").splitlines() if line.strip()],
            **limits,
            "budget_period": self._period.value,
            "expires": self._expires.value or None,
            "allow_remote": {"yes": True, "no": False}.get(self._remote.value),
        }

    async def _submit(self) -> None:
        values, client = self._values(), self._session.client
        try:
            if self._key is None:
                given = {name: value for name, value in values.items() if value not in (None, [])}
                made = await client.post("keys", body={"name": (self._name.value or "").strip(), **given})
            else:
                made = await client.send("PATCH", "keys", self._key["id"], body=changed_rules(self._key, values))
        except ModelyardError as error:
            show_notice(self._refusal, error.message)
            if error.kind == "unauthenticated":
                self._session.show_error(error)
            return
        for warning in made.get("warnings", ()):
            ui.notify(warning, type="warning", multi_line=True, close_button="Close")
        if self._key is None:
            await self._show_secret(made)
        else:
            self._dialog.close()
        await self._session.perform(self._on_change())

    async def _show_secret(self, made: Json) -> None:
        client = self._session.client
        if made["admin"] and not client.key and not client.owner:  # the first key: from now on this page needs one, too
            await self._session.unlock(made["secret"])
        self._dialog.props("persistent")
        self._card.clear()
        with self._card:
            ui.label(f"The key {made['name']}").classes("name")
            ui.label("Copy it now: it is shown only here.").classes("muted small")
            with ui.element("div").classes("line no-wrap w-full code-block"):
                ui.label(made["secret"]).classes("mono text grow secret")
                copy_button(lambda: str(made["secret"]), "Copy the key")
            ui.button("Done", on_click=self._dialog.close).props("unelevated no-caps").classes("self-end")


def _limit_field(name: str, value: Any) -> ui.number:
    label, hint, is_whole = _LIMITS[name]
    field = ui.number(label, value=value, min=0, placeholder="no limit")
    field.props(f"outlined dense stack-label step={1 if is_whole else 'any'}").classes("w-full")
    field.props["hint"] = hint
    return field


class UsageTable:
    """Requests, tokens and cost of the last 30 days, by key, model or day."""

    def __init__(self, session: PageSession) -> None:
        self._session = session
        with card() as box:
            box.style("max-width: none")
            with ui.element("div").classes("line between"):
                ui.label("Usage").classes("name").props("role=heading aria-level=2")
                groups = _GROUPS if session.may("operator") else {name: _GROUPS[name] for name in ("day", "model")}
                self._by = ui.toggle(groups, value=next(iter(groups)), on_change=lambda: session.perform(self._load()))
                self._by.props('no-caps unelevated dense toggle-color=primary aria-label="Usage by"')
            self._span = ui.label("").classes("muted small")
            self._table = ui.table(rows=[], columns=[], row_key="group", pagination=10)
            self._table.props("flat dense wrap-cells").classes("w-full usage")
        ui.timer(0, lambda: session.perform(self._load()), once=True)

    async def _load(self) -> None:
        by = str(self._by.value)
        found = await self._session.client.get("usage", by=by)
        self._table.columns = usage_columns(by, found["currency"])
        self._table.rows = [{**row, "group": row[by] or "without a key"} for row in found["data"]]
        total = found["total"]
        self._span.set_text(
            f"{found['from']} to {found['to']} (UTC): {fmt.plural(total['requests'], 'request')}, "
            f"{fmt.count(total['prompt'])} prompt and {fmt.count(total['output'])} output tokens, "
            f"{fmt.cost(total['cost'], found['currency'])}"
        )


# --- pure -------------------------------------------------------------------------------------------------------------


def usage_columns(by: str, currency: str) -> list[Json]:
    """The browser formats the numbers, so that it can sort by them."""
    unit = json.dumps(f" {currency}").replace("<", "\\u003c")
    formats = dict.fromkeys(_COUNTS, FORMAT_COUNT) | {"cost": f"v => v.toFixed(v === 0 || v >= 0.1 ? 2 : 4) + {unit}"}
    group = {"name": "group", "label": _GROUPS[by], "field": "group", "align": "left", "sortable": True}
    counts = [
        {"name": name, "label": label, "field": name, "align": "right", "sortable": True, ":format": formats[name]}
        for name, label in _COUNTS.items()
    ]
    return [group, *counts]


def limit_value(name: str, value: float | None) -> float | None:
    """None: no limit."""
    if value is None:
        return None
    return int(value) if _LIMITS[name][2] and float(value).is_integer() else value


def changed_rules(key: Json, values: Json) -> Json:
    """A date that was not changed keeps its time of day."""
    changed = {name: value for name, value in values.items() if value != key[name]}
    if values["expires"] == (fmt.day(key["expires"]) or None):
        changed.pop("expires", None)
    return changed


def rule_lines(key: Json, utc_offset_s: float) -> Iterator[str]:
    yield f"models: {', '.join(key['models']) or 'all'}"
    limits = [
        f"{fmt.plural(key[name], noun)} {when}"
        for name, noun, when in (
            ("requests_per_minute", "request", "a minute"),
            ("tokens_per_minute", "token", "a minute"),
            ("max_concurrent", "request", "at a time"),
        )
        if key[name] is not None
    ]
    yield f"limits: {', '.join(limits) or 'none'}"
    if key["expires"] is not None:
        yield f"expires {fmt.moment(key['expires'], utc_offset_s)}"
    if key["revoked"] is not None:
        yield f"revoked {fmt.moment(key['revoked'], utc_offset_s)}"


def budget_use(key: Json, currency: str) -> tuple[float, str]:
    """The share of the budget that is used, and a sentence; empty without a budget."""
    left, used = key["budget"], key["usage"]
    shares, texts = [], []
    if left["tokens_left"] is not None:
        shares.append(1 - left["tokens_left"] / key["token_budget"])
        texts.append(f"{fmt.count(used['prompt'] + used['output'])} of {fmt.count(key['token_budget'])} tokens")
    if left["cost_left"] is not None:
        shares.append(1 - left["cost_left"] / key["cost_budget"])
        texts.append(f"{fmt.cost(used['cost'], currency)} of {fmt.cost(key['cost_budget'], currency)}")
    if not shares:
        return 0.0, ""
    return round(min(1.0, max(shares)), 3), f"{' and '.join(texts)} {_PERIODS[key['budget_period']]}"
