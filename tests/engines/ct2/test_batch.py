"""One batch while it runs: whose tokens are told, and when the loop is woken for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from modelyard.core.engine import CacheInfo, Chunk, End, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines.ct2.batch import Ct2Batch, Ct2Job
from modelyard.engines.ct2.options import Ct2Options

WORDS = [f"word{id}" for id in range(10)]


class Generator:
    """Gives every row that has not ended one token a step, row after row, as CTranslate2 does."""

    def generate_batch(
        self, prompts: list[list[str]], *, max_length: int, callback: Callable[[Any], bool], **_: Any
    ) -> None:
        rows = list(range(len(prompts)))
        for step in range(max_length):
            rows = [row for row in rows if not callback(SimpleNamespace(step=step, batch_id=row, token_id=7))]


def job(most: int) -> Ct2Job:
    asked = Prompt(parts=(TokenRun([1, 2]),), sampling=Sampling(temperature=0), max_tokens=most, cache="main")
    made = Ct2Job(asked, asyncio.get_running_loop(), lambda: None)
    made.fit(CacheInfo(64, 4), Ct2Options(path="nowhere"))
    return made


def ran(jobs: list[Ct2Job]) -> list[str]:
    """What happened, in order: who spoke, who ended, and that the loop was woken."""
    told: list[str] = []

    def emit(to: Ct2Job, chunks: list[Chunk], last: bool) -> None:
        (chunk,) = chunks
        assert last == isinstance(chunk, End)
        told.append(f"{'said' if isinstance(chunk, Tokens) else 'end'} {jobs.index(to)}")

    Ct2Batch(jobs, WORDS, emit, lambda: told.append("wake")).run(Generator())
    return told


async def test_loop_is_woken_once_a_step_after_the_last_row() -> None:
    told = ran([job(2), job(2)])
    first, second = ["said 0", "said 1", "wake"], ["said 0", "end 0", "said 1", "end 1", "wake"]
    assert told == first + second


async def test_loop_is_woken_after_the_last_row_that_is_left() -> None:
    told = ran([job(3), job(1)])
    assert told == ["said 0", "said 1", "end 1", "wake", "said 0", "wake", "said 0", "end 0", "wake"]


async def test_job_that_is_not_wanted_any_more_ends_and_is_told() -> None:
    gone = job(5)
    gone.cancel()
    assert ran([job(1), gone]) == ["said 0", "end 0", "end 1", "wake"]
