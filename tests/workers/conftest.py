from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

Closing = Callable[[Any], Any]


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Closes what it was given when the test is over, also one that has failed: an open socket is another's error."""
    things: list[Any] = []

    def keep(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield keep
    for thing in reversed(things):
        await thing.close()
