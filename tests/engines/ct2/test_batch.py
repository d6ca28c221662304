"""Which jobs share a batch, and when a running batch delivers tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from modelyard.core.engine import Chunk, End, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines.ct2.batch import Ct2Batch, Ct2Job, next_batch
from modelyard.engines.ct2.options import Ct2Options, generate_arguments

GREEDY = Sampling(temperature=0)


def create_job(length: int, max_tokens: int, sampling: Sampling = GREEDY) -> Ct2Job:
    prompt = Prompt(parts=(TokenRun([1] * length),), sampling=sampling, max_tokens=max_tokens)
    job = Ct2Job(prompt, asyncio.get_running_loop(), on_cancel=lambda: None)
    job.limit_output(4096)
    job.arguments = generate_arguments(prompt, job.max_output, Ct2Options(path="x"))
    return job


# --- choosing a batch -------------------------------------------------------------------------------------------------


def create_jobs(*lengths: int, sampling: Sequence[Sampling] = ()) -> list[Ct2Job]:
    return [
        create_job(length, 5 + index, sampling[index] if sampling else Sampling())
        for index, length in enumerate(lengths)
    ]


def batch_lengths(jobs: list[Ct2Job], slack: int) -> list[int]:
    return [job.prompt_tokens for job in next_batch(jobs, slack)]


async def test_jobs_of_nearly_the_same_length_share_a_batch_longest_first() -> None:
    assert batch_lengths(create_jobs(100, 104, 98), slack=16) == [104, 100, 98]


async def test_jobs_of_the_same_length_keep_their_order() -> None:
    waiting = create_jobs(50, 50, 50)
    assert next_batch(waiting, slack=16) == waiting


async def test_the_oldest_job_leads_and_jobs_of_another_length_wait() -> None:
    assert batch_lengths(create_jobs(100, 500, 110), slack=16) == [110, 100]


async def test_no_two_jobs_of_a_batch_differ_by_more_than_the_slack() -> None:
    assert batch_lengths(create_jobs(100, 110, 95), slack=10) == [110, 100]


async def test_without_slack_only_jobs_of_the_same_length_share_a_batch() -> None:
    assert batch_lengths(create_jobs(7, 8, 7), slack=0) == [7, 7]


async def test_jobs_with_other_sampling_get_another_batch() -> None:
    sampling = [Sampling(temperature=0.5), Sampling(temperature=0.6), Sampling(temperature=0.5)]
    waiting = create_jobs(10, 10, 10, sampling=sampling)
    assert next_batch(waiting, slack=16) == [waiting[0], waiting[2]]


async def test_output_limits_separate_beam_searches_only() -> None:
    assert len(next_batch(create_jobs(10, 10), slack=16)) == 2
    assert len(next_batch(create_jobs(10, 10, sampling=[Sampling(beam_size=2)] * 2), slack=16)) == 1


# --- running a batch --------------------------------------------------------------------------------------------------


class Generator:
    """Calls back once per step for each row that has not ended, row after row, like CTranslate2."""

    def generate_batch(
        self, prompts: list[list[str]], *, max_length: int, callback: Callable[[Any], bool], **_: Any
    ) -> None:
        rows = list(range(len(prompts)))
        for step in range(max_length):
            rows = [row for row in rows if not callback(SimpleNamespace(step=step, batch_id=row, token_id=7))]


class RecordingDispatch:
    """Records tokens, ends and flushes that deliver something."""

    def __init__(self, jobs: list[Ct2Job]) -> None:
        self.jobs, self.events = jobs, list[str]()

    def put(self, job: Ct2Job, chunks: list[Chunk], last: bool = False) -> None:
        (chunk,) = chunks
        assert last == isinstance(chunk, End)
        self.events.append(f"{'token' if isinstance(chunk, Tokens) else 'end'} {self.jobs.index(job)}")

    def flush(self) -> None:
        if self.events and self.events[-1] != "flush":
            self.events.append("flush")


def run(jobs: list[Ct2Job]) -> list[str]:
    dispatch = RecordingDispatch(jobs)
    Ct2Batch(jobs, [f"word{id}" for id in range(10)], dispatch).run(Generator())  # type: ignore[arg-type]
    return dispatch.events


async def test_tokens_are_flushed_once_per_step_after_the_last_row() -> None:
    events = run([create_job(2, max_tokens=2), create_job(2, max_tokens=2)])
    first, second = ["token 0", "token 1", "flush"], ["token 0", "end 0", "token 1", "end 1", "flush"]
    assert events == first + second


async def test_flush_follows_the_last_row_that_still_runs() -> None:
    events = run([create_job(2, max_tokens=3), create_job(2, max_tokens=1)])
    assert events == ["token 0", "token 1", "end 1", "flush", "token 0", "flush", "token 0", "end 0", "flush"]


async def test_cancelled_job_ends_without_a_token() -> None:
    cancelled = create_job(2, max_tokens=5)
    cancelled.cancel()
    assert run([create_job(2, max_tokens=1), cancelled]) == ["token 0", "end 0", "end 1", "flush"]
