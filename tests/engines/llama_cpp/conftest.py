"""An engine with the default model that the tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from modelyard.core.engine import Control
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.helpers import running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded_engine() -> AsyncIterator[LlamaCppEngine]:
    async with running() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def engine(loaded_engine: LlamaCppEngine) -> LlamaCppEngine:
    """Empty. A test that uses it needs `helpers.shared_loop`."""
    await loaded_engine.control(Control("evict"))
    return loaded_engine
