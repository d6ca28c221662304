"""What a job says after a row: the token, and why it was the last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core.errors import Timeout
from modelyard.engines.llama_cpp import job as speech
from modelyard.engines.llama_cpp.job import LlamaCppJob
from tests.engines.llama_cpp.helpers import id_prompt


def speaker(window: int = 64, **fields: Any) -> LlamaCppJob:
    job = LlamaCppJob(id_prompt([1, 2, 3], **fields), asyncio.get_running_loop(), 1)
    job.begin(1, window)
    return job


@pytest.mark.parametrize(
    ("window", "fields", "token", "ending"),
    [
        pytest.param(64, {}, 9, None, id="it goes on"),
        pytest.param(64, {"stop_ids": (9,)}, 9, "stop", id="a stop"),
        pytest.param(64, {}, -1, "stop", id="no token at all"),
        pytest.param(64, {"max_tokens": 1}, 9, "length", id="its last token"),
        pytest.param(4, {"max_tokens": 8}, 9, "window", id="the end of the window"),
        pytest.param(4, {"max_tokens": 1}, 9, "length", id="both: what it asked for is what ends it"),
    ],
)
async def test_why_a_token_was_the_last(window: int, fields: dict[str, Any], token: int, ending: str | None) -> None:
    job = speaker(window, **fields)
    said = speech.new_output(job)
    assert speech.append_token(job, token, said) == (None if ending is None else (ending, None))
    assert said.ids == job.ids[3:].tolist() == ([] if ending == "stop" else [9])


async def test_odds_are_gathered_only_where_they_are_asked_for() -> None:
    assert speech.new_output(speaker(logprobs=None)).logprobs is None
    assert speech.new_output(speaker(logprobs=0)).logprobs == []


async def test_an_end_counts_what_was_read_kept_and_said() -> None:
    job, late = speaker(), Timeout("late")
    job.prefilled()
    speech.append_token(job, 9, speech.new_output(job))
    found = speech.end(job, "error", late)
    assert (found.reason, found.error) == ("error", late)
    assert (found.usage.prompt, found.usage.cached, found.usage.output) == (3, 1, 1)
    assert found.timings.decode is not None
    assert found.timings.total is not None
    assert found.timings.total >= found.timings.decode


async def test_one_that_said_nothing_has_no_time_to_its_first_token() -> None:
    found = speech.end(speaker(), "cancelled", None)
    assert found.timings.first_token is None
    assert found.timings.total is not None
