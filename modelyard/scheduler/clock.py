"""Where the scheduler gets its time from: the event loop's, or a test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never jumps."""
        ...

    def unix(self) -> float: ...
    def later(self, delay: float, deed: Callable[[], None]) -> TimerHandle: ...


class LoopClock:
    now = staticmethod(time.monotonic)
    unix = staticmethod(time.time)

    def later(self, delay: float, deed: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, delay), deed)
