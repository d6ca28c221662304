"""What stands around every page: header, ways to the others, the question for a key, and word of a lost server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui

from modelyard.workbench import look
from modelyard.workbench.mount import Address
from modelyard.workbench.pages import caches, memory, models, playground, plots, request, requests, routes
from modelyard.workbench.session import Session

PLACES = (
    ("/", "Models", "view_in_ar"),
    ("/playground", "Playground", "forum"),
    ("/requests", "Requests", "list_alt"),
    ("/memory", "Memory", "memory"),
    ("/caches", "Caches", "layers"),
    ("/plots", "Plots", "insights"),
    ("/routes", "Routes", "alt_route"),
)
_DARK = "modelyard-dark"
_ICONS = {"auto": "brightness_auto", "dark": "dark_mode", "light": "light_mode"}
_VALUES = {"auto": None, "dark": True, "light": False}


def frame(address: Address) -> None:
    """The contents come when the browser has connected: only then is the tab's key known, and a mere visit is cheap."""
    session = Session(address)
    ui.context.client.on_delete(session.forget)
    ui.colors(**look.BRAND)
    ui.add_css(look.CSS)
    mood = _header(session, _drawer())
    _banner(session)
    content = ui.column().classes("w-full gap-0 items-stretch")
    ui.timer(0, lambda: _begin(session, content, mood), once=True)


async def _begin(session: Session, content: ui.column, mood: Mood) -> None:
    await session.recall()
    await mood.recall()
    _key_dialog(session)
    _visibility(session)
    _table_clicks(session)
    with content:
        ui.sub_pages(_pages(session))


def _pages(session: Session) -> dict[str, Callable[..., None]]:
    return {
        "/": lambda: models.page(session),
        "/playground": lambda model="": playground.page(session, model),
        "/requests": lambda: requests.page(session),
        "/requests/{id}": lambda id: request.page(session, id),
        "/memory": lambda: memory.page(session),
        "/caches": lambda: caches.page(session),
        "/plots": lambda: plots.page(session),
        "/routes": lambda: routes.page(session),
    }


# --- header and drawer ------------------------------------------------------------------------------------------------


def _header(session: Session, drawer: ui.left_drawer) -> Mood:
    with ui.header().classes("items-center gap-3 px-4 py-2 no-wrap"):
        ui.button(icon="menu", on_click=drawer.toggle).props('flat round dense color=grey aria-label="Menu"')
        ui.label("Modelyard").classes("text-lg font-bold")
        ui.label("workbench").classes("faint gt-xs")
        ui.space()
        ui.label(session.client.url.partition("://")[2]).classes("faint gt-xs")
        return Mood()


class Mood:
    """Light, dark, or as the system has it; the browser remembers."""

    def __init__(self) -> None:
        self._now = "auto"
        self._dark = ui.dark_mode(None)
        self._button = ui.button(icon=_ICONS["auto"], on_click=self._turn)
        self._button.props('flat round dense color=grey aria-label="Light or dark"')
        self._button.tooltip("Light, dark, or as the system has it")

    async def recall(self) -> None:
        found = str(await ui.run_javascript(f"return localStorage.getItem('{_DARK}')", timeout=10))
        if found in _VALUES:
            self._set(found)

    def _turn(self) -> None:
        names = list(_VALUES)
        self._set(names[(names.index(self._now) + 1) % len(names)])
        ui.run_javascript(f"localStorage.setItem('{_DARK}', '{self._now}')")

    def _set(self, mood: str) -> None:
        self._now = mood
        self._dark.value = _VALUES[mood]
        self._button.props(f"icon={_ICONS[mood]}")


def _banner(session: Session) -> None:
    banner = ui.label("").classes("banner").props("role=alert")
    banner.set_visibility(False)

    def told(trouble: str) -> None:
        banner.set_text(f"{trouble}. Trying again…" if trouble else "")
        banner.set_visibility(bool(trouble))

    session.on_state = told


def _drawer() -> ui.left_drawer:
    links: dict[str, ui.link] = {}
    with ui.left_drawer(value=None, bordered=True).props("width=216 breakpoint=820") as drawer:
        drawer.classes("px-0 py-3 gap-0")
        with ui.element("nav").props('aria-label="Pages"'):
            for path, name, icon in PLACES:
                with ui.link(target=path).classes("nav") as links[path]:
                    ui.icon(icon).classes("text-lg")
                    ui.label(name)
    router = ui.context.client.sub_pages_router

    def mark(path: str) -> None:
        head = "/" + path.partition("?")[0].strip("/").partition("/")[0]
        for target, link in links.items():
            link.classes(remove="here", add="here" if target == head else "")

    router.on_path_changed(mark)
    mark(router.current_path)
    return drawer


# --- the key ----------------------------------------------------------------------------------------------------------


def _key_dialog(session: Session) -> None:
    with ui.dialog().props("persistent") as dialog, ui.card().classes("card w-96"):
        ui.label("This server wants a key").classes("name")
        ui.label("Type in an API key that has admin = true. It stays in this tab.").classes("faint small")
        field = ui.input("Admin key", password=True).props("outlined autofocus").classes("w-full")
        why = ui.label("").classes("trouble small text")
        why.set_visibility(False)

        def told(reason: str) -> None:
            why.set_text(reason)
            why.set_visibility(bool(reason))

        async def offer() -> None:
            refused = await session.unlock(field.value or "")
            told(refused)
            if not refused:
                field.value = ""
                dialog.close()
                await ui.context.client.sub_pages_router.refresh()

        field.on("keydown.enter", offer)
        ui.button("Unlock", on_click=offer).props("unelevated no-caps").classes("self-end")

    def locked(reason: str) -> None:
        told(reason)
        dialog.open()

    session.on_locked = locked


def _visibility(session: Session) -> None:
    """A tab that nobody looks at costs the server nothing."""

    def changed(event: Any) -> None:
        session.hidden = bool(event.args)

    ui.on("seen", changed)
    ui.run_javascript("document.addEventListener('visibilitychange', () => emitEvent('seen', document.hidden))")


def _table_clicks(session: Session) -> None:
    """The table of requests tells of its clicks here, once for all visits to its page."""

    async def clicked(event: Any) -> None:
        id = str(event.args["id"])
        if event.args["act"]:
            await session.act(session.client.cancel(id), "Cancelled")
        else:
            ui.navigate.to(f"/requests/{id}")

    ui.on("modelyard-request", clicked)
