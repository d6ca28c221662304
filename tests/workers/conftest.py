from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

Closing = Callable[[Any], Any]


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Closes its arguments after the test, even if it failed: an open socket would fail another test."""
    things: list[Any] = []

    def keep(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield keep
    for thing in reversed(things):
        await thing.close()
