"""State of one open browser page: the API client, the key, the chat, and the connection state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from modelyard.core.chat import Chat
from modelyard.core.errors import Forbidden, ModelyardError, Unauthenticated
from modelyard.workbench.api_client import ApiClient, ServerUnreachable
from modelyard.workbench.peer_proxy import ServerAddress

_KEY_ITEM = "modelyard-key"  # in sessionStorage: it is deleted with the tab and never sent automatically


class PageSession:
    """`on_connection` gets "" if the server answers, else the reason. `on_locked` is called if a key is needed, with
    the reason why the present key is refused."""

    def __init__(self, address: ServerAddress) -> None:
        self.client = ApiClient(address.url, verify=address.verify, socket=address.socket)
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
        if isinstance(error, Unauthenticated) or (isinstance(error, Forbidden) and error.code == "admin_key_required"):
            self.locked = True
            self.on_locked(error.message if self.client.key else "")
        elif isinstance(error, ServerUnreachable):
            self._set_connection(error.message)

    def _set_connection(self, error: str) -> None:
        if error != self._connection_error:
            self._connection_error = error
            self.on_connection(error)

    # --- the key ------------------------------------------------------------------------------------------------------

    async def restore_key(self) -> None:
        """Use the key that was entered in this tab before it was reloaded, and read the browser's clock."""
        script = f"return [sessionStorage.getItem('{_KEY_ITEM}'), -60 * new Date().getTimezoneOffset()]"
        key, self.utc_offset_s = await ui.run_javascript(script, timeout=10)
        self.client.key = str(key or "")

    async def unlock(self, key: str) -> str:
        """Try the key. Returns why it is refused, or ""."""
        self.client.key = key
        try:
            await self.client.rows("models")
        except ModelyardError as error:
            return error.message
        self.locked = False
        # JSON is a JavaScript string; "<" is escaped because it could end the script element.
        value = json.dumps(key).replace("<", "\\u003c")
        ui.run_javascript(f"sessionStorage.setItem('{_KEY_ITEM}', {value})")
        return ""

    # --- the chat -----------------------------------------------------------------------------------------------------

    async def store(self, chat: Chat) -> None:
        """One version after the other: each is based on the one before."""
        async with self._store_lock:
            chat.revision = await self.client.store_chat(chat)

    async def close(self) -> None:
        await asyncio.gather(*self.saving, return_exceptions=True)
        await self.client.close()
