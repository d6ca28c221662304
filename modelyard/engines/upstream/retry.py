"""Second tries: whether a request that was refused before its first byte is sent once more, and after how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import Struct

from modelyard.core.errors import ModelyardError

_PASSING = frozenset({"rate_limited", "overloaded", "unavailable", "timeout", "internal"})
_FIRST, _LONGEST = 0.5, 30.0  # seconds


class Refused(Exception):
    """Nothing has been answered yet. `named`: the upstream said when to come back."""

    def __init__(self, error: ModelyardError, named: bool = False) -> None:
        super().__init__(error.message)
        self.error, self.named = error, named


class Patience(Struct, frozen=True):
    """`tries` more after the first; a pause that the upstream asks for is kept, unless it is longer than `longest`."""

    tries: int = 0
    longest: float = _LONGEST

    def pause(self, refused: Refused, tried: int) -> float | None:
        """Seconds until the next try, None: give up. `tried` counts from 1. Without the upstream's word it doubles."""
        error = refused.error
        if tried > self.tries or error.kind not in _PASSING or error.code == "upstream_auth_failed":
            return None
        told = error.retry_after if refused.named else None
        wanted = _FIRST * 2 ** (tried - 1) if told is None else told
        return wanted if wanted <= self.longest else None


async def patiently(attempt: Callable[[], Awaitable[None]], patience: Patience) -> None:
    """Attempts until one is not Refused; the last refusal is raised as the error that it holds."""
    tried = 1
    while True:
        try:
            await attempt()
            return
        except Refused as refused:
            pause = patience.pause(refused, tried)
            if pause is None:
                raise refused.error from refused.__cause__
        await asyncio.sleep(pause)
        tried += 1
