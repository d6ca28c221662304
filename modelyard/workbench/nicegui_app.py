"""The NiceGUI application: starts NiceGUI inside the running server and lays out every page.

The layout is what surrounds a page's content: header, navigation, key dialog, and the banner for a lost connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI
from nicegui import Client, app, core, ui
from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard.accounts.owner import Role
from modelyard.core.errors import Overloaded
from modelyard.workbench.app import USER_KEY, cookie_name, key_cookie
from modelyard.workbench.components import BRAND_COLOURS, CSS, SCRIPT, page_heading, show_notice
from modelyard.workbench.markdown import code_css
from modelyard.workbench.pages import caches, chat, config_form, keys, logs, memory, models, plots, requests, routes
from modelyard.workbench.peer_proxy import ServerAddress
from modelyard.workbench.session import PageSession

NAVIGATION: tuple[tuple[str, str, str, Role], ...] = (  # path, title, icon, and who sees it: the admin API decides
    ("/", "Chat", "forum", "member"),
    ("/models", "Models", "view_in_ar", "local"),
    ("/requests", "Requests", "list_alt", "operator"),
    ("/memory", "Memory", "memory", "local"),
    ("/caches", "Caches", "layers", "local"),
    ("/plots", "Plots", "insights", "local"),
    ("/routes", "Routes", "alt_route", "local"),
    ("/usage", "Usage", "data_usage", "member"),
    ("/keys", "Keys", "key", "operator"),
    ("/logs", "Logs", "notes", "operator"),
)
# Open pages and connections; NiceGUI forgets a disconnected page after a minute.
_MAX_PAGES, _MAX_PAGES_PER_CLIENT = 200, 40
_VISITOR = (
    "You are a visitor: configuration, keys, logs and requests are the owner's, who opens this page with the link that "
    "`modelyard workbench` prints on the server's machine."
)
_LOGIN = (
    "This server needs a key: ask whoever runs it. This browser stays logged in for 30 days, until you log out or the "
    "key is revoked."
)
_REFUSED: dict[Role, str] = {
    "member": "This page is for administrators. Your key may chat, and see its own usage.",
    "local": _VISITOR,
}
_THEME_ITEM = "modelyard-dark"  # in localStorage
_THEME_ICONS = {"auto": "brightness_auto", "dark": "dark_mode", "light": "light_mode"}
_THEME_VALUES = {"auto": None, "dark": True, "light": False}


@asynccontextmanager
async def open_app(address: ServerAddress, prefix: str) -> AsyncIterator[ASGIApp]:
    if address.socket:  # several processes share the port: a WebSocket could end up in any of them
        app.config.socket_io_js_transports = ["polling"]
    fastapi = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(
        fastapi,
        root=lambda: _layout(address),
        title="Modelyard",
        favicon="🏗️",
        dark=None,
        mount_path=prefix,
        binding_refresh_interval=None,
        reconnect_timeout=10,
        show_welcome_message=False,
    )
    async with fastapi.router.lifespan_context(fastapi):
        yield PageLimit(fastapi)
        # End the polls of open pages; the pages reconnect when the server is back.
        for socket in list(core.sio.eio.sockets.values()):
            await socket.close(wait=False)  # waiting would never end for a page that is gone


class PageLimit:
    """Limits the open pages and their connections, of all visitors and of each address: they need memory, and anyone
    who reaches the port can open them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, path = scope["client"][0], scope["path"]
        if "/_nicegui" not in path:
            check_limit([client.ip for client in Client.instances.values()], address)
        elif "/_nicegui_ws/" in path and "sid" not in parse_qs(scope["query_string"].decode("latin-1")):
            try:
                check_limit([one["asgi.scope"]["client"][0] for one in core.sio.environ.values()], address)
            except Overloaded:
                if scope["type"] == "http":
                    raise
                await send({"type": "websocket.close", "code": 1013})
                return
        await self._app(scope, receive, send)


def check_limit(addresses: Sequence[str], address: str) -> None:
    """`addresses` has one entry for each open page."""
    if len(addresses) >= _MAX_PAGES:
        raise Overloaded(f"{_MAX_PAGES} pages of the workbench are open; close some", retry_after=60)
    if addresses.count(address) >= _MAX_PAGES_PER_CLIENT:
        raise Overloaded(
            f"{_MAX_PAGES_PER_CLIENT} pages of the workbench are open from your address; close some", retry_after=60
        )


def _layout(address: ServerAddress) -> None:
    """The content is added once the browser has connected: only then is the tab's key known, and a request without a
    browser stays cheap."""
    request = ui.context.client.request
    host = request.headers.get("host", "")
    session = PageSession(address, request.cookies.get(key_cookie(host), ""), request.scope.get(USER_KEY, ""))
    cookie = request.cookies.get(cookie_name(host), "")
    if address.owner is not None and address.owner.has_cookie(cookie):
        session.client.owner = address.owner.token
    ui.context.client.on_delete(session.close)
    ui.colors(**BRAND_COLOURS)
    ui.add_css(CSS)
    ui.add_css(code_css())
    ui.add_body_html(f"<script>{SCRIPT.read_text()}</script>")
    navigation = ui.left_drawer(value=None, bordered=True).props("width=200 breakpoint=1100")
    theme, account = _header(session, navigation)
    _connection_banner(session)
    content = ui.column().classes("w-full gap-0 items-stretch content")

    async def connected() -> None:
        await session.read_clock()
        await theme.restore()
        _key_dialog(session)
        await session.find_role()
        _track_visibility(session)
        _handle_table_clicks(session)
        _show_navigation(session, navigation)
        _show_account(session, account)
        if not session.locked:
            with content:
                ui.sub_pages(_pages(session))

    ui.timer(0, connected, once=True)


def _pages(session: PageSession) -> dict[str, Callable[..., None]]:
    """All of them: one that the role does not have says so."""

    def admin(role: Role, show: Callable[..., None]) -> Callable[..., None]:
        return show if session.may(role) else lambda: page_heading("For administrators", _REFUSED[session.role])

    return {
        "/": lambda model="": chat.page(session, model),
        "/chat": lambda model="": chat.page(session, model),
        "/chat/{id}": lambda id: chat.page(session, id=id),
        "/usage": lambda: keys.usage_page(session),
        "/models": admin("local", lambda: models.page(session)),
        "/requests": admin("operator", lambda: requests.page(session)),
        "/requests/{id}": admin("operator", lambda id: requests.detail_page(session, id)),
        "/memory": admin("local", lambda: memory.page(session)),
        "/caches": admin("local", lambda: caches.page(session)),
        "/plots": admin("local", lambda: plots.page(session)),
        "/routes": admin("local", lambda: routes.page(session)),
        "/keys": admin("operator", lambda: keys.page(session)),
        "/logs": admin("operator", lambda: logs.page(session)),
        "/models/edit": admin("local", lambda name="": config_form.page(session, "models", name)),
        "/caches/edit": admin("local", lambda name="": config_form.page(session, "caches", name)),
        "/routes/edit": admin("local", lambda index="": config_form.page(session, "routes", index=index)),
    }


# --- header and navigation --------------------------------------------------------------------------------------------


def _header(session: PageSession, drawer: ui.left_drawer) -> tuple[ThemeButton, ui.element]:
    with ui.header().classes("items-center gap-3 px-4 py-2 no-wrap"):
        ui.button(icon="menu", on_click=drawer.toggle).props('flat round dense color=muted aria-label="Menu"')
        ui.label("Modelyard").classes("text-lg font-bold")
        ui.space()
        ui.label(session.client.url.partition("://")[2]).classes("muted gt-xs")
        account = ui.element("div").classes("line no-wrap")
        return ThemeButton(), account


def _show_account(session: PageSession, box: ui.element) -> None:
    """Who is logged in, and the way out. A server without keys knows no one."""
    if session.locked or not session.client.key:
        return

    async def log_out() -> None:
        await ui.run_javascript("return await modelyard.logout()", timeout=30)
        ui.navigate.to("/")
        ui.navigate.reload()

    with box, ui.button(session.key_name, icon="account_circle").props("flat dense no-caps") as button:
        button.classes("account muted").tooltip("Account")
        with ui.menu():
            ui.menu_item("Log out", log_out)


class ThemeButton:
    """Switches between light, dark, and the system's setting. The browser stores the choice."""

    def __init__(self) -> None:
        self._theme = "auto"
        self._dark = ui.dark_mode(None)
        self._button = ui.button(icon=_THEME_ICONS["auto"], on_click=self._next)
        self._button.props('flat round dense color=muted aria-label="Light or dark"')
        self._button.tooltip("Light, dark, or the system's setting")

    async def restore(self) -> None:
        stored = str(await ui.run_javascript(f"return localStorage.getItem('{_THEME_ITEM}')", timeout=10))
        if stored in _THEME_VALUES:
            self._set(stored)

    def _next(self) -> None:
        names = list(_THEME_VALUES)
        self._set(names[(names.index(self._theme) + 1) % len(names)])
        ui.run_javascript(f"localStorage.setItem('{_THEME_ITEM}', '{self._theme}')")

    def _set(self, theme: str) -> None:
        self._theme = theme
        self._dark.value = _THEME_VALUES[theme]
        self._button.props(f"icon={_THEME_ICONS[theme]}")


def _show_navigation(session: PageSession, drawer: ui.left_drawer) -> None:
    links: dict[str, ui.link] = {}
    with drawer.classes("px-0 py-3 gap-0"):
        with ui.element("nav").props('aria-label="Pages"'):
            for path, title, icon, role in NAVIGATION:
                if session.may(role) and not (path == "/usage" and session.may("operator")):  # the page of keys has all
                    with ui.link(target=path).classes("nav") as links[path]:
                        ui.icon(icon).classes("text-lg")
                        ui.label(title)
        if session.role == "local":
            ui.label(_VISITOR).classes("muted small visitor")
    router = ui.context.client.sub_pages_router

    def mark_active(path: str) -> None:
        top = "/" + path.partition("?")[0].strip("/").partition("/")[0]
        for target, link in links.items():
            link.classes(remove="active", add="active" if target == ("/" if top == "/chat" else top) else "")

    router.on_path_changed(mark_active)
    mark_active(router.current_path)


def _connection_banner(session: PageSession) -> None:
    banner = ui.label("").classes("banner").props("role=alert")
    banner.set_visibility(False)
    session.on_connection = lambda error: show_notice(banner, f"{error}. Trying again…" if error else "")


# --- key dialog and events of the browser -----------------------------------------------------------------------------


def _key_dialog(session: PageSession) -> None:
    with ui.dialog().props("persistent") as dialog, ui.card().classes("card w-96"):
        ui.label("Log in").classes("name").props("role=heading aria-level=1")
        ui.label(_LOGIN).classes("muted small")
        field = ui.input("API key", password=True).props("outlined autofocus").classes("w-full")
        reason = ui.label("").classes("error small text").props("role=alert")
        reason.set_visibility(False)

        async def submit() -> None:
            refused = await session.unlock((field.value or "").strip())
            show_notice(reason, refused)
            if not refused:
                ui.navigate.reload()

        field.on("keydown.enter", submit)
        ui.button("Log in", on_click=submit).props("unelevated no-caps").classes("self-end")

    def ask(refused: str) -> None:
        show_notice(reason, refused)
        dialog.open()

    session.on_locked = ask


def _track_visibility(session: PageSession) -> None:
    """A hidden tab does not poll."""

    ui.on("modelyard-hidden", lambda event: setattr(session, "hidden", bool(event.args)))
    ui.run_javascript(
        "document.addEventListener('visibilitychange', () => emitEvent('modelyard-hidden', document.hidden))"
    )


def _handle_table_clicks(session: PageSession) -> None:
    """The table of requests emits its clicks as events. The handler is registered once, not at every visit."""

    async def clicked(event: Any) -> None:
        id = str(event.args["id"])
        if event.args["act"]:
            await session.perform(session.client.post("requests", id, "cancel"), "Cancelled")
        else:
            ui.navigate.to(f"/requests/{id}")

    ui.on("modelyard-request", clicked)
