"""State of one open browser page: the API client, the key, the chat, and the connection state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from modelyard.accounts.owner import Role, includes
from modelyard.core.chat import Chat
from modelyard.core.errors import ModelyardError, Unauthenticated
from modelyard.workbench.api_client import ApiClient, ServerUnreachable
from modelyard.workbench.peer_proxy import ServerAddress


class PageSession:
    """Of a page whose browser has this `key` (a login's), or that is opened by this `user` of a server without keys.
    `on_connection` gets "" if the server answers, else the reason. `on_locked` is called if a key is needed, with the
    reason why the present one is refused."""

    def __init__(self, address: ServerAddress, key: str = "", user: str = "") -> None:
        self.client = ApiClient(address.url, key, verify=address.verify, socket=address.socket)
        if address.owner is not None:
            self.client.visitor = user, address.owner.token
        self.keeps_chats = not user or address.owner is not None  # else they would be those of the page's server
        self.role: Role = "member"
        self.key_name = ""
        self.mcp_servers: list[str] = []  # that requests may name
        self.chat = Chat()
        self.saving: list[asyncio.Task[None]] = []
        self._store_lock = asyncio.Lock()
        self.hidden = self.locked = False
        self.utc_offset_s = 0.0  # of the browser's clock
        self.on_connection: Callable[[str], None] = lambda _: None
        self.on_locked: Callable[[str], None] = lambda _: None
        self._connection_error = ""

    def poll(self, interval_s: float, update: Callable[[], Awaitable[None]]) -> None:
        """Call `update` repeatedly while the page is open, visible and unlocked."""

        async def tick() -> None:
            if self.hidden or self.locked:
                return
            try:
                await update()
                self._set_connection("")
            except ModelyardError as error:
                self._handle(error)

        ui.timer(interval_s, tick)

    async def perform(self, action: Awaitable[Any], success: str = "") -> bool:
        """Await an action of the user and show its outcome on the page."""
        try:
            await action
        except ModelyardError as error:
            self.show_error(error)
            return False
        if success:
            ui.notify(success, type="positive")
        return True

    def show_error(self, error: ModelyardError) -> None:
        self._handle(error)
        if not self.locked:
            ui.notify(error.message, type="negative", multi_line=True, close_button="Close")

    def _handle(self, error: ModelyardError) -> None:
        if isinstance(error, Unauthenticated):
            self.locked = True
            self.on_locked(error.message if self.client.key else "")
        elif isinstance(error, ServerUnreachable):
            self._set_connection(error.message)

    def _set_connection(self, error: str) -> None:
        if error != self._connection_error:
            self._connection_error = error
            self.on_connection(error)

    async def find_role(self) -> None:
        try:
            who = await self.client.who()
        except ModelyardError as error:
            self._handle(error)
            return
        self.role, self.key_name, self.mcp_servers = who["role"], str(who["key"]), who["mcp_servers"]

    def may(self, role: Role) -> bool:
        return not self.locked and includes(self.role, role)

    # --- the key ------------------------------------------------------------------------------------------------------

    async def read_clock(self) -> None:
        self.utc_offset_s = await ui.run_javascript("return -60 * new Date().getTimezoneOffset()", timeout=10)

    async def unlock(self, key: str) -> str:
        """Log this browser in. Returns why the key is refused, or ""."""
        # JSON is a JavaScript string; "<" is escaped because it could end the script element.
        value = json.dumps(key).replace("<", "\\u003c")
        refused = str(await ui.run_javascript(f"return await modelyard.login({value})", timeout=30))
        if not refused:
            self.client.key, self.locked = key, False
            await self.find_role()
        return refused

    # --- the chat -----------------------------------------------------------------------------------------------------

    async def store(self, chat: Chat) -> None:
        """One version after the other: each is based on the one before."""
        async with self._store_lock:
            chat.revision = await self.client.store_chat(chat)

    async def close(self) -> None:
        await asyncio.gather(*self.saving, return_exceptions=True)
        await self.client.close()
