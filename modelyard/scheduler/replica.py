"""One engine's life: opened, watched, reopened after a death, closed. It reports; the scheduler decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from modelyard.core.engine import Engine
from modelyard.core.errors import Internal, ModelyardError

log = logging.getLogger(__name__)

MakeEngine = Callable[[], Engine]


class Replica:
    """Slow work runs in its own task and comes back through the three callbacks, always on the loop's thread."""

    def __init__(
        self,
        make: MakeEngine,
        *,
        on_ready: Callable[[Engine], None],
        on_failed: Callable[[ModelyardError], None],
        on_lost: Callable[[ModelyardError], None],
        on_progress: Callable[[float, str], None],
    ) -> None:
        self._make = make
        self._on_ready, self._on_failed, self._on_lost, self._on_progress = on_ready, on_failed, on_lost, on_progress
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, delay: float = 0.0) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live(delay))

    async def _live(self, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        try:
            self._engine = engine = self._make()
            await engine.open(self._on_progress)
        except ModelyardError as error:
            await self._discard()
            self._on_failed(error)
            return
        except Exception as error:
            await self._discard()
            self._on_failed(Internal(f"{type(error).__name__}: {error}", id="load"))
            return
        self._on_ready(engine)
        lost = await engine.lost
        await self._discard()
        self._on_lost(lost)

    async def _discard(self) -> None:
        """An engine that cannot even be closed must not keep its successor from being opened."""
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                await engine.close()
            except Exception:
                log.exception("an engine could not be closed")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._discard()
