"""The routes page: where a model name leads, as a client would send it, and the rules that decide it."""

from __future__ import annotations

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import Json
from modelyard.workbench.components import Stat, card, page_heading, show_notice
from modelyard.workbench.session import PageSession

_ENDPOINTS = {
    "/v1/chat/completions": "OpenAI Chat Completions",
    "/v1/responses": "OpenAI Responses",
    "/v1/messages": "Anthropic Messages",
}


def page(session: PageSession) -> None:
    page_heading("Routes", "Enter a model name as a client would send it to see where it leads.")
    with card():
        with ui.element("div").classes("fields w-full"):
            name = ui.input("Model name", placeholder="claude-haiku-4-5").props("outlined autofocus debounce=250")
            endpoint = ui.select(_ENDPOINTS, value="/v1/chat/completions", label="Protocol").props("outlined")
        error_label = ui.label("").classes("error text")
        error_label.set_visibility(False)
        with ui.element("div").classes("stats") as stats:
            labels = ("model", "cache", "why", "window", "engine", "too long", "leaves this machine")
            model, cache, why, window, backend, overflow, remote = map(Stat, labels)
        stats.set_visibility(False)

    async def resolve() -> None:
        stats.set_visibility(False)
        show_notice(error_label, "")
        requested = (name.value or "").strip()
        if not requested:
            return
        try:
            route = await session.client.get("route", model=requested, endpoint=endpoint.value or "")
        except ModelyardError as error:
            show_notice(error_label, error.message)
            if error.kind in ("unauthenticated", "forbidden"):
                session.show_error(error)  # opens the key dialog
            return
        model.set(route["model"])
        cache.set(route["cache"])
        why.set(", ".join(filter(None, (_REASONS.get(route["why"]), " | ".join(route["route"])))))
        window.set(f"{fmt.count(route['window'])} tokens")
        backend.set(route["backend"])
        overflow.set("refused" if route["strict"] else "answer shortened")
        remote.set("with consent" if route["allow_remote"] else "no")
        stats.set_visibility(True)

    name.on_value_change(resolve)
    endpoint.on_value_change(resolve)
    with card():
        with ui.element("div").classes("line between"):
            ui.label("Rules").classes("name").props("role=heading aria-level=2")
            add = ui.button("Add a route", icon="add", on_click=lambda: ui.navigate.to("/routes/edit"))
            add.props("outline no-caps size=sm")
        ui.label(_ORDER).classes("muted")
        table = ui.table(rows=[], columns=_COLUMNS, row_key="number").props("flat dense wrap-cells").classes("w-full")
        table.add_slot("body-cell-edit", _EDIT_CELL)
        table.on("edit", lambda event: ui.navigate.to(f"/routes/edit?index={int(event.args)}"))

    async def list_rules() -> None:
        table.rows = [rule_row(number, rule) for number, rule in enumerate(await session.client.rows("routes"), 1)]

    ui.timer(0, lambda: session.perform(list_rules()), once=True)


_REASONS = {
    "id": "its name",
    "alias": "its alias",
    "cache": "its cache",
    "default": "default model",
    "unnamed": "only model",
}
_ORDER = (
    "The first one that matches applies. A pattern chooses among the caches of a model that was named, and leaves the "
    "names of other models alone, unless it overrides them."
)
_EDIT_CELL = """<q-td :props="props"><q-btn v-if="props.row.index != null" flat round dense size="sm" icon="edit"
  color="grey" :aria-label="'Edit route ' + (props.row.index + 1)"
  @click="$parent.$emit('edit', props.row.index)" /></q-td>"""
_COLUMNS = [
    {"name": name, "label": label, "field": name, "align": "left"}
    for name, label in (
        ("kind", "Kind"),
        ("match", "Model name"),
        ("endpoint", "Endpoint"),
        ("target", "Leads to"),
        ("edit", ""),
    )
]


def rule_row(number: int, rule: Json) -> Json:
    target = " · ".join(str(rule[part]) for part in ("model", "cache") if rule.get(part))
    return {
        "number": number,
        "index": rule["index"],
        "kind": rule["kind"] + (" (override)" if rule["override"] else ""),
        "match": ", ".join(rule["match"]),
        "endpoint": rule["endpoint"] or "any",
        "target": target or fmt.MISSING,
    }
