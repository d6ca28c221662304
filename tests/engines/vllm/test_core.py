"""vLLM's side of the engine: how what it says reaches the reader's loop."""

from __future__ import annotations

import asyncio
from typing import Any

from modelyard.core.engine import Tokens
from modelyard.engines.vllm.async_llm import AsyncLlmRunner, VllmJob
from tests.engines.vllm.stage import prompt


async def test_what_one_step_says_to_all_jobs_wakes_the_reader_once() -> None:
    posted: list[Any] = []
    core = AsyncLlmRunner(None, lambda _, parcels: posted.append(parcels), lambda _: None, lambda _: None)  # type: ignore[arg-type]
    jobs = [VllmJob(f"{n}", prompt(), asyncio.get_running_loop(), lambda _: None) for n in range(8)]
    for step in range(2):
        for job in jobs:  # each in a task of its own, all woken in the same round
            core._emit(job, [Tokens([step])])
        assert len(posted) == step
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(posted) == step + 1
    assert [len(parcels) for parcels in posted] == [8, 8]
