"""The thread in which vLLM lives, with an event loop of its own: what it computes never waits for the gateway's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Grammars are tried out in this thread, and the compiler goes as deep as their rules refer to each other. Memory that
# is never touched costs nothing.
_STACK = 1 << 28


class Home:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"<Home {self._thread.name}>"

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        usual = threading.stack_size(_STACK)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _live(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, act: Callable[..., object], *arguments: Any) -> None:
        """From any thread, in the order of the calls."""
        self.loop.call_soon_threadsafe(act, *arguments)

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that is done there. Whoever stops waiting for it does not end it."""
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop)))

    async def end(self) -> None:
        """Nothing may be running there any more."""
        if self.is_open:
            self.call(self.loop.stop)
            await asyncio.to_thread(self._thread.join)
        if not self.loop.is_closed():
            self.loop.close()
