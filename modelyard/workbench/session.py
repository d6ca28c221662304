"""One open page: the server it works with, the key that was typed in, and whether the server answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from modelyard.core.errors import Forbidden, ModelyardError, Unauthenticated
from modelyard.workbench.client import Client, Lost
from modelyard.workbench.mount import Address
from modelyard.workbench.talk import Talk

_STORED = "modelyard-key"  # in the tab's own storage: gone with the tab, and never sent by itself


class Session:
    """`on_state` hears whether the server answers (and why not); `on_locked` that a key is needed (and why)."""

    def __init__(self, address: Address) -> None:
        self.client = Client(address.url, verify=address.verify, socket=address.socket)
        self.talk = Talk()
        self.hidden = self.locked = False
        self.on_state: Callable[[str], None] = lambda _: None
        self.on_locked: Callable[[str], None] = lambda _: None
        self._trouble = ""

    # --- looking and acting -------------------------------------------------------------------------------------------

    def watch(self, every_s: float, look: Callable[[], Awaitable[None]]) -> None:
        """Looks again and again while the page is open, seen and unlocked."""

        async def tick() -> None:
            if not (self.hidden or self.locked):
                await self._looked(look)

        ui.timer(every_s, tick)

    async def _looked(self, look: Callable[[], Awaitable[None]]) -> None:
        try:
            await look()
            self._told("")
        except ModelyardError as error:
            self._failed(error)

    async def act(self, work: Awaitable[Any], done: str = "") -> bool:
        """An order that somebody gave: what came of it is said on the page."""
        try:
            await work
        except ModelyardError as error:
            self._failed(error)
            if not self.locked:
                ui.notify(error.message, type="negative", multi_line=True, close_button="Close")
            return False
        if done:
            ui.notify(done, type="positive")
        return True

    def _failed(self, error: ModelyardError) -> None:
        if isinstance(error, Unauthenticated) or (isinstance(error, Forbidden) and error.code == "admin_key_required"):
            self.locked = True
            self.on_locked(error.message if self.client.key else "")
        elif isinstance(error, Lost):
            self._told(error.message)

    def _told(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self.on_state(trouble)

    # --- the key ------------------------------------------------------------------------------------------------------

    async def recall(self) -> None:
        """The key that this tab was given before it was loaded anew."""
        found = await ui.run_javascript(f"return sessionStorage.getItem('{_STORED}')", timeout=10)
        self.client.key = str(found or "")

    async def unlock(self, key: str) -> str:
        """Tries the key; why it is refused, or nothing."""
        self.client.key = key
        try:
            await self.client.models()
        except ModelyardError as error:
            return error.message
        self.locked = False
        ui.run_javascript(f"sessionStorage.setItem('{_STORED}', {script_string(key)})")
        return ""

    async def forget(self) -> None:
        await self.client.close()


def script_string(text: str) -> str:
    """A JavaScript string of any text: JSON, and nothing in it that ends a script element."""
    return json.dumps(text).replace("<", "\\u003c")
