"""Jobs that all speak: what ends one of them, what disturbs them, and what they hold."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.batch import DecodeBatch
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.sampler import JobSampler
from modelyard.engines.llama_cpp.sequences import SequenceSlot
from tests.engines.llama_cpp.stage import GREEDY, id_prompt

WINDOW = 64
SAMPLED = Sampling(temperature=1.0)


def singer(window: int = WINDOW, **fields: Any) -> LlamaCppJob:
    """Has read its prompt of three tokens and said one."""
    prompt = id_prompt([1, 2, 3], **({"logprobs": None} | fields))
    job = LlamaCppJob(prompt, asyncio.get_running_loop(), 1)
    job.chain = JobSampler(prompt.sampling, None, 256, window)
    job.begin(0, window)
    job.done = 3
    job.append(4)
    return job


def choir(*jobs: LlamaCppJob) -> tuple[DecodeBatch, list[SequenceSlot]]:
    slots = [SequenceSlot(index, np.zeros(0, np.int32)) for index in range(len(jobs))]
    return DecodeBatch(dict(enumerate(jobs)), slots), slots


async def test_a_stop_of_anybody_ends_a_round() -> None:
    found, _ = choir(singer(stop_ids=(7,)), singer())
    assert not found.ends_with([5, 6])
    assert found.ends_with([7, 6])
    assert found.ends_with([5, 7]), "which of them it stops is looked at later"


async def test_the_last_token_that_one_may_say_ends_a_round() -> None:
    found, _ = choir(singer(max_tokens=3), singer(max_tokens=30))
    assert not found.ends_with([5, 5])
    found.say([5, 5])
    assert found.ends_with([6, 6])


async def test_the_end_of_the_window_ends_a_round() -> None:
    found, _ = choir(singer(window=6, max_tokens=100))
    assert not found.ends_with([5])
    found.say([5])
    assert found.ends_with([6])


async def test_it_is_disturbed_by_one_that_is_cancelled_or_late() -> None:
    quiet, leaving = singer(), singer()
    found, _ = choir(quiet, leaving)
    assert not found.is_disturbed
    leaving.cancel()
    assert found.is_disturbed
    assert not choir(singer(deadline=time.time() + 3600))[0].is_disturbed
    assert choir(singer(), singer(deadline=time.time() - 1))[0].is_disturbed


async def test_what_is_said_is_written_down_and_what_was_read_is_held() -> None:
    jobs = singer(), singer()
    found, slots = choir(*jobs)
    found.say([8, 9])
    found.hold()
    assert [job.ids.tolist() for job in jobs] == [[1, 2, 3, 4, 8], [1, 2, 3, 4, 9]]
    assert [slot.tokens.tolist() for slot in slots] == [[1, 2, 3, 4]] * 2
    assert [job.pending for job in jobs] == [1, 1]
    assert all(slot.at is not None for slot in slots)


@pytest.mark.parametrize(
    ("fields", "plain", "best"),
    [
        pytest.param({"sampling": GREEDY}, True, True, id="greedy"),
        pytest.param({"sampling": SAMPLED}, True, False, id="sampled"),
        pytest.param({"sampling": GREEDY, "logprobs": 0}, False, False, id="somebody asks for odds"),
    ],
)
async def test_all_must_be_plain_for_the_short_way(fields: dict[str, Any], plain: bool, best: bool) -> None:
    found, _ = choir(singer(), singer(**fields))
    assert (found.is_plain, found.takes_the_best) == (plain, best)


@pytest.mark.parametrize(
    ("samplings", "together"),
    [
        pytest.param([Sampling(top_k=40), Sampling(top_k=9, top_p=0.5)], True, id="each has a top_k"),
        pytest.param([Sampling(top_k=40)], False, id="one alone"),
        pytest.param([Sampling(top_k=40), SAMPLED], False, id="one has none"),
        pytest.param([Sampling(top_k=40), GREEDY], False, id="one takes the best"),
        pytest.param([Sampling(top_k=40), Sampling(top_k=40, logit_bias={1: 2.0})], False, id="one has its own row"),
    ],
)
async def test_tokens_are_drawn_together_where_all_of_them_can_be(samplings: list[Sampling], together: bool) -> None:
    found, _ = choir(*(singer(sampling=sampling) for sampling in samplings))
    assert (found.throw is not None) == together
