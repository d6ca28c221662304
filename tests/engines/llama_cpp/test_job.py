"""One generation: its next token, why it ends, and what its End reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core.engine import ReasoningBounds, ReasoningBudget
from modelyard.core.errors import Timeout
from modelyard.engines.llama_cpp.job import LlamaCppJob, ReasoningLimit
from tests.engines.llama_cpp.helpers import id_prompt


def started_job(window: int = 64, **fields: Any) -> LlamaCppJob:
    """A prompt of three tokens, one of them cached."""
    job = LlamaCppJob(id_prompt([1, 2, 3], **fields), asyncio.get_running_loop(), "main", window, 1)
    job.start(1)
    return job


@pytest.mark.parametrize(
    ("window", "fields", "token", "reason"),
    [
        pytest.param(64, {}, 9, None, id="continues"),
        pytest.param(64, {"stop_ids": (9,)}, 9, "stop", id="stop token"),
        pytest.param(64, {}, -1, "stop", id="no token"),
        pytest.param(64, {"max_tokens": 1}, 9, "length", id="max_tokens"),
        pytest.param(4, {"max_tokens": 8}, 9, "window", id="full window"),
        pytest.param(4, {"max_tokens": 1}, 9, "length", id="max_tokens wins over the window"),
    ],
)
async def test_a_token_ends_the_job_for_the_right_reason(
    window: int, fields: dict[str, Any], token: int, reason: str | None
) -> None:
    job = started_job(window, **fields)
    output = job.new_output()
    assert job.accept(token, output) == (None if reason is None else (reason, None))
    assert output.ids == job.ids[3:].tolist() == ([] if reason == "stop" else [9])


async def test_logprobs_are_collected_only_if_requested() -> None:
    assert started_job(logprobs=None).new_output().logprobs is None
    assert started_job(logprobs=0).new_output().logprobs == []


async def test_the_end_reports_usage_timings_and_error() -> None:
    job, error = started_job(), Timeout("late")
    job.mark_prefilled()
    job.accept(9, job.new_output())
    end = job.end("error", error)
    assert (end.reason, end.error) == ("error", error)
    assert (end.usage.prompt, end.usage.cached, end.usage.output) == (3, 1, 1)
    assert end.timings.decode is not None
    assert end.timings.total is not None
    assert end.timings.total >= end.timings.decode


async def test_a_job_without_output_has_no_time_to_first_token() -> None:
    end = started_job().end("cancelled")
    assert end.timings.first_token is None
    assert end.timings.total is not None


async def test_the_array_grows_with_the_output() -> None:
    job = started_job(window=5000, max_tokens=4000)
    for token in range(3000):
        job.append(token)
    assert job.ids.tolist() == [1, 2, 3, *range(3000)]
    assert (job.last_token, job.n_output, job.pending) == (2999, 3000, 3002)


WORDS = ["a", "b", "<think>", "</think>", "\n", "<th", "ink>", "</think>\n", "é".encode()[:1], "é".encode()[1:]]
A, B, THINK, END, NEWLINE, THINK_1, THINK_2, END_NEWLINE, HALF, REST = range(len(WORDS))
THINKING = ReasoningBounds("<think>", ("</think>",), (NEWLINE, END))


def run(tokens: int, model: list[int], opened: int | None = None) -> list[int]:
    """What is generated if the model would generate these tokens, as far as it is free."""
    limit = ReasoningLimit(ReasoningBudget(tokens, (THINKING,), opened), token_bytes)
    wanted, output = iter(model), list[int]()
    while True:
        forced = limit.next_token()
        token = forced if forced is not None else next(wanted, None)
        if token is None:
            return output
        output.append(token)
        limit.read(token)


def token_bytes(token: int) -> bytes:
    word = WORDS[token]
    return word if isinstance(word, bytes) else word.encode()


@pytest.mark.parametrize(
    ("tokens", "model", "opened", "output"),
    [
        pytest.param(2, [A, A, A, B], 0, [A, A, NEWLINE, END, A, B], id="closed when the budget is spent"),
        pytest.param(0, [A, B], 0, [NEWLINE, END, A, B], id="no reasoning at all"),
        pytest.param(9, [A, END, B, B], 0, [A, END, B, B], id="the model is faster"),
        pytest.param(1, [A, END_NEWLINE, B, B], 0, [A, NEWLINE, END, END_NEWLINE, B, B], id="at the same time"),
        pytest.param(2, [A, A, A], None, [A, A, A], id="text is not counted"),
        pytest.param(1, [THINK, A, A, B], None, [THINK, A, NEWLINE, END, A, B], id="opened by the model"),
        pytest.param(1, [THINK_1, THINK_2, A, B], None, [THINK_1, THINK_2, A, NEWLINE, END, B], id="of several tokens"),
        pytest.param(3, [A, END_NEWLINE, B, B, B], 0, [A, END_NEWLINE, B, B, B], id="the end inside a token"),
        pytest.param(1, [HALF, REST, B], 0, [HALF, REST, NEWLINE, END, B], id="not inside a character"),
        pytest.param(1, [A, THINK, B], 0, [A, NEWLINE, END, THINK, NEWLINE, END, B], id="opened again"),
    ],
)
def test_reasoning_ends_with_its_budget(tokens: int, model: list[int], opened: int | None, output: list[int]) -> None:
    assert run(tokens, model, opened) == output
