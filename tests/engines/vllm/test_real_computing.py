"""Fields that change how a real vLLM computes, on the CPU: what it says stays the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core.engine import Chunk, EngineStats
from modelyard.workers.process_engine import ProcessTextEngine
from tests.engines.reading import assert_alike, read
from tests.engines.vllm import real
from tests.engines.vllm.real import Lent, running
from tests.engines.vllm.test_real import prompt

pytestmark = pytest.mark.vllm
WAIT_S = 240.0
REPEATED = "Say three times: the river runs through the old town and under the old bridge."
GUESSERS: dict[str, dict[str, Any]] = {
    "out of the text": {"vllm_speculative_method": "ngram", "vllm_num_speculative_tokens": 4},
    "by a draft model": {
        "vllm_speculative_method": "draft_model",
        "vllm_speculative_model": "smollm2-hf",
        "vllm_num_speculative_tokens": 3,
    },
}


async def answer(engine: ProcessTextEngine | Lent) -> list[Chunk]:
    async with asyncio.timeout(WAIT_S):
        return await read(engine.generate(prompt(REPEATED, max_tokens=40, logprobs=2)))


async def plain() -> list[Chunk]:
    engine = Lent(real.spec())
    try:
        await engine.open(lambda *_: None)
        return await answer(engine)
    finally:
        await engine.close()


async def counted(engine: ProcessTextEngine) -> EngineStats:
    """As soon as its process has told of a guess."""
    async with asyncio.timeout(WAIT_S):
        while not engine.stats().guessed_tokens:  # noqa: ASYNC110  it is another process that tells
            await asyncio.sleep(0.05)
    return engine.stats()


@pytest.mark.parametrize("how", GUESSERS)
async def test_guesses_change_nothing_that_is_said(how: str) -> None:
    async with running(**GUESSERS[how]) as engine:
        assert_alike(await plain(), await answer(engine))
        stats = await counted(engine)
        assert 0 < stats.accepted_tokens <= stats.guessed_tokens
