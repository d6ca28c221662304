"""NiceGUI brought up inside the running server: the first module that imports it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from nicegui import Client, app, core, ui
from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard.core.errors import Overloaded
from modelyard.workbench.frame import frame
from modelyard.workbench.mount import Address

_MOST_PAGES = 200  # one that is not connected is forgotten after a minute


@asynccontextmanager
async def opened(address: Address, prefix: str) -> AsyncIterator[ASGIApp]:
    if address.socket:  # several processes share the port, and a socket would stay with any one of them
        app.config.socket_io_js_transports = ["polling"]
    shell = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(
        shell,
        root=lambda: frame(address),
        title="Modelyard",
        favicon="🏗️",
        dark=None,
        mount_path=prefix,
        binding_refresh_interval=None,
        reconnect_timeout=10,
        show_welcome_message=False,
    )
    async with shell.router.lifespan_context(shell):
        yield Bounded(shell)
        await _hang_up()


async def _hang_up() -> None:
    """Pages that wait for news get none: their questions end here, and they ask again when there is a server."""
    for socket in list(core.sio.eio.sockets.values()):
        await socket.close(wait=False)  # one whose page is gone would be waited for without end


class Bounded:
    """The page is open to whoever reaches the port, key or not: it must not be made to hold pages without end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "/_nicegui" not in scope["path"] and len(Client.instances) >= _MOST_PAGES:
            raise Overloaded(f"{_MOST_PAGES} pages of the workbench are open; close some", retry_after=60)
        await self._app(scope, receive, send)
