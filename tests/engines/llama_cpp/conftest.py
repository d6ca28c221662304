"""An engine with the default model that the tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.helpers import running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaCppEngine]:
    """A test that uses it needs `helpers.shared_loop`. KV of earlier tests is reused."""
    async with running() as opened:
        yield opened
