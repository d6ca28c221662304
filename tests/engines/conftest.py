"""A test module may run its tests on several event loops: those of its `EVENT_LOOPS`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

NewLoop = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, NewLoop]:
    module: Any = getattr(item, "module", None)
    loops: Mapping[str, NewLoop] = getattr(module, "EVENT_LOOPS", {"asyncio": asyncio.new_event_loop})
    return loops
