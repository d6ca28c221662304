"""The planner of a step: a table, and what holds for any set of needs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.batch import BatchSlice, DecodeBatch, SequenceWork, plan_batch
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.sampler import JobSampler
from modelyard.engines.llama_cpp.sequences import SequenceSlot
from tests.engines.llama_cpp.helpers import GREEDY, id_prompt


@pytest.mark.parametrize(
    ("needs", "budget", "expected"),
    [
        pytest.param([], 8, [], id="nothing to do"),
        pytest.param([SequenceWork(0, 5, False, 1)], 8, [BatchSlice(0, 5, True)], id="a short prompt at once"),
        pytest.param([SequenceWork(0, 20, False, 1)], 8, [BatchSlice(0, 8, False)], id="a long one in slices"),
        pytest.param(
            [SequenceWork(0, 20, False, 1), SequenceWork(1, 1, True, 0)],
            8,
            [BatchSlice(0, 7, False), BatchSlice(1, 1, True)],
            id="a stream comes before a prompt",
        ),
        pytest.param(
            [SequenceWork(0, 9, False, 2), SequenceWork(1, 5, False, 1)],
            8,
            [BatchSlice(0, 3, False), BatchSlice(1, 5, True)],
            id="the earlier prompt comes first, rows stay ordered by sequence",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1), SequenceWork(1, 1, True, 2), SequenceWork(2, 9, False, 3)],
            2,
            [BatchSlice(0, 1, True), BatchSlice(1, 1, True), BatchSlice(2, 1, False)],
            id="streams that fill the budget do not starve a prompt",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=4)],
            8,
            [BatchSlice(0, 1, True, 4)],
            id="what is drafted is read behind the stream",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=4)], 3, [BatchSlice(0, 1, True, 2)], id="as far as there is room"
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=4), SequenceWork(1, 9, False, 2)],
            8,
            [BatchSlice(0, 1, True), BatchSlice(1, 7, False)],
            id="what is certain comes first",
        ),
        pytest.param(
            [
                SequenceWork(0, 1, True, 1, drafted=4),
                SequenceWork(1, 1, True, 2, drafted=3),
                SequenceWork(2, 1, True, 3),
            ],
            16,
            [BatchSlice(0, 1, True, 3), BatchSlice(1, 1, True, 3), BatchSlice(2, 1, True)],
            id="guesses are of one length",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=8), SequenceWork(1, 1, True, 2, drafted=1)],
            16,
            [BatchSlice(0, 1, True, 8), BatchSlice(1, 1, True)],
            id="a short guess does not cut a long one",
        ),
    ],
)
def test_plan(needs: list[SequenceWork], budget: int, expected: list[BatchSlice]) -> None:
    assert plan_batch(needs, budget) == expected


NEEDS = st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 8)), max_size=8).map(
    lambda rows: [
        SequenceWork(i, 1 if streams else n, streams, i, g * streams) for i, (n, streams, g) in enumerate(rows)
    ]
)


@given(NEEDS, st.integers(1, 32))
def test_every_stream_moves_the_budget_is_kept_and_somebody_is_read(needs: list[SequenceWork], budget: int) -> None:
    slices = plan_batch(needs, budget)
    by_sequence = {piece.sequence: piece for piece in slices}
    streams = [need for need in needs if need.generating]
    prompts = [need for need in needs if not need.generating]
    assert all(by_sequence[need.sequence].count == 1 and by_sequence[need.sequence].last for need in streams)
    assert sum(piece.count + piece.drafted for piece in slices) <= max(budget, len(streams) + 1)
    assert all(piece.drafted <= needs[piece.sequence].drafted for piece in slices)
    assert len({piece.drafted for piece in slices if piece.drafted}) <= 1
    assert not prompts or min(prompts, key=lambda need: need.arrival).sequence in by_sequence
    assert [piece.sequence for piece in slices] == sorted(by_sequence)
    for piece in slices:
        assert 0 < piece.count <= needs[piece.sequence].pending
        assert piece.last == (piece.count == needs[piece.sequence].pending)


@given(NEEDS, st.integers(1, 32))
def test_prompts_are_all_read_in_the_end(needs: list[SequenceWork], budget: int) -> None:
    pending = {need.sequence: need.pending for need in needs if not need.generating}
    steps = 0
    while pending:
        left = [
            SequenceWork(n.sequence, pending.get(n.sequence, 1), n.sequence not in pending, n.arrival) for n in needs
        ]
        for piece in plan_batch(left, budget):
            if piece.sequence in pending:
                pending[piece.sequence] -= piece.count
        pending = {sequence: count for sequence, count in pending.items() if count}
        steps += 1
        assert steps <= sum(need.pending for need in needs)


def test_a_prompt_pauses_where_it_is_told_and_is_not_done_then() -> None:
    needs = [SequenceWork(0, 40, False, 1, limit=10), SequenceWork(1, 40, False, 2)]
    assert plan_batch(needs, 32) == [BatchSlice(0, 10, False), BatchSlice(1, 22, False)]
    assert plan_batch([SequenceWork(0, 10, False, 1, limit=10)], 32) == [BatchSlice(0, 10, True)]


# Jobs that all speak: what ends one of them, what disturbs them, and what they hold.

WINDOW = 64
SAMPLED = Sampling(temperature=1.0)


def generating_job(window: int = WINDOW, **fields: Any) -> LlamaCppJob:
    """Has read its prompt of three tokens and said one."""
    prompt = id_prompt([1, 2, 3], **({"logprobs": None} | fields))
    job = LlamaCppJob(prompt, asyncio.get_running_loop(), 1)
    job.sampler = JobSampler(prompt.sampling, None, 256, window)
    job.limit_output(window)
    job.start(0)
    job.n_past = 3
    job.append(4)
    return job


def decode_batch(*jobs: LlamaCppJob) -> tuple[DecodeBatch, list[SequenceSlot]]:
    slots = [SequenceSlot(index, np.zeros(0, np.int32)) for index in range(len(jobs))]
    return DecodeBatch(dict(enumerate(jobs)), slots), slots


async def test_a_stop_of_anybody_ends_a_round() -> None:
    found, _ = decode_batch(generating_job(stop_ids=(7,)), generating_job())
    assert not found.finishes_with([5, 6])
    assert found.finishes_with([7, 6])
    assert found.finishes_with([5, 7]), "which of them it stops is looked at later"


async def test_the_last_token_that_one_may_say_ends_a_round() -> None:
    found, _ = decode_batch(generating_job(max_tokens=3), generating_job(max_tokens=30))
    assert not found.finishes_with([5, 5])
    found.append([5, 5])
    assert found.finishes_with([6, 6])


async def test_the_end_of_the_window_ends_a_round() -> None:
    found, _ = decode_batch(generating_job(window=6, max_tokens=100))
    assert not found.finishes_with([5])
    found.append([5])
    assert found.finishes_with([6])


async def test_it_is_disturbed_by_one_that_is_cancelled_or_late() -> None:
    quiet, leaving = generating_job(), generating_job()
    found, _ = decode_batch(quiet, leaving)
    assert not found.must_stop
    leaving.cancel()
    assert found.must_stop
    assert not decode_batch(generating_job(deadline=time.time() + 3600))[0].must_stop
    assert decode_batch(generating_job(), generating_job(deadline=time.time() - 1))[0].must_stop


async def test_what_is_said_is_written_down_and_what_was_read_is_held() -> None:
    jobs = generating_job(), generating_job()
    found, slots = decode_batch(*jobs)
    found.append([8, 9])
    found.update_slots()
    assert [job.ids.tolist() for job in jobs] == [[1, 2, 3, 4, 8], [1, 2, 3, 4, 9]]
    assert [slot.tokens.tolist() for slot in slots] == [[1, 2, 3, 4]] * 2
    assert [job.pending for job in jobs] == [1, 1]
    assert all(slot.last_used is not None for slot in slots)


@pytest.mark.parametrize(
    ("fields", "plain", "best"),
    [
        pytest.param({"sampling": GREEDY}, True, True, id="greedy"),
        pytest.param({"sampling": SAMPLED}, True, False, id="sampled"),
        pytest.param({"sampling": GREEDY, "logprobs": 0}, False, False, id="somebody asks for odds"),
    ],
)
async def test_all_must_be_plain_for_the_short_way(fields: dict[str, Any], plain: bool, best: bool) -> None:
    found, _ = decode_batch(generating_job(), generating_job(**fields))
    assert (found.is_simple, found.is_greedy) == (plain, best)


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
    found, _ = decode_batch(*(generating_job(sampling=sampling) for sampling in samplings))
    assert (found.sampler is not None) == together
