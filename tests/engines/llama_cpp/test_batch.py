"""The plan of a mixed step, and the batch of a uniform one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.batch import (
    SHORT_PROMPT,
    BatchSlice,
    DecodeBatch,
    PromptRows,
    SequenceWork,
    plan_batch,
)
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.sampler import Sampler
from modelyard.engines.llama_cpp.sampler_chain import DrySamplers
from modelyard.engines.llama_cpp.sequences import SequenceSlot
from tests.engines.llama_cpp.helpers import GREEDY, id_prompt


@pytest.mark.parametrize(
    ("work", "budget", "expected"),
    [
        pytest.param([], 8, [], id="nothing to do"),
        pytest.param([SequenceWork(0, 5, False, 1)], 8, [BatchSlice(0, 5, True)], id="a short prompt at once"),
        pytest.param([SequenceWork(0, 20, False, 1)], 8, [BatchSlice(0, 8, False)], id="a long prompt in slices"),
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
            [SequenceWork(0, 90, False, 1, owner=("main", "")), SequenceWork(1, 90, False, 2, owner=("fast", ""))],
            8,
            [BatchSlice(0, 4, False), BatchSlice(1, 4, False)],
            id="the prompts of two caches are read side by side",
        ),
        pytest.param(
            [SequenceWork(0, 90, False, 1, owner=("main", "")), SequenceWork(1, 2, False, 2, owner=("fast", ""))],
            8,
            [BatchSlice(0, 6, False), BatchSlice(1, 2, True)],
            id="rows that a cache does not need go to the other",
        ),
        pytest.param(
            [SequenceWork(0, 90, False, 1, owner=("main", "eve")), SequenceWork(1, 2, False, 2, owner=("main", "ann"))],
            16,
            [BatchSlice(0, 14, False), BatchSlice(1, 2, True)],
            id="a short prompt of another key at once",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=4)],
            8,
            [BatchSlice(0, 1, True, 4)],
            id="drafts follow the stream's own token",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=4)], 3, [BatchSlice(0, 1, True, 2)], id="drafts fill the room"
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=4), SequenceWork(1, 9, False, 2)],
            8,
            [BatchSlice(0, 1, True), BatchSlice(1, 7, False)],
            id="prompts come before drafts",
        ),
        pytest.param(
            [
                SequenceWork(0, 1, True, 1, drafted=4),
                SequenceWork(1, 1, True, 2, drafted=3),
                SequenceWork(2, 1, True, 3),
            ],
            16,
            [BatchSlice(0, 1, True, 3), BatchSlice(1, 1, True, 3), BatchSlice(2, 1, True)],
            id="drafts have one length",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, drafted=8), SequenceWork(1, 1, True, 2, drafted=1)],
            16,
            [BatchSlice(0, 1, True, 8), BatchSlice(1, 1, True)],
            id="a short draft does not shorten a long one",
        ),
    ],
)
def test_slices_follow_the_plan(work: list[SequenceWork], budget: int, expected: list[BatchSlice]) -> None:
    assert plan_batch(work, budget) == expected


WORK = st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 8)), max_size=8).map(
    lambda rows: [
        SequenceWork(i, 1 if streams else n, streams, i, g * streams) for i, (n, streams, g) in enumerate(rows)
    ]
)


@given(WORK, st.integers(1, 32))
def test_every_stream_advances_within_the_budget_and_the_oldest_prompt_is_read(
    work: list[SequenceWork], budget: int
) -> None:
    slices = plan_batch(work, budget)
    by_sequence = {piece.sequence: piece for piece in slices}
    streams = [need for need in work if need.generating]
    prompts = [need for need in work if not need.generating]
    assert all(by_sequence[need.sequence].count == 1 and by_sequence[need.sequence].last for need in streams)
    assert sum(piece.count + piece.drafted for piece in slices) <= max(budget, len(streams) + 1)
    assert all(piece.drafted <= work[piece.sequence].drafted for piece in slices)
    assert len({piece.drafted for piece in slices if piece.drafted}) <= 1
    assert not prompts or min(prompts, key=lambda need: need.arrival).sequence in by_sequence
    assert [piece.sequence for piece in slices] == sorted(by_sequence)
    for piece in slices:
        assert 0 < piece.count <= work[piece.sequence].pending
        assert piece.last == (piece.count == work[piece.sequence].pending)


EVE, ANN = ("main", "eve"), ("main", "ann")


def test_prompts_are_read_in_small_slices_while_another_keys_stream_waits() -> None:
    rows, stream = PromptRows(512), SequenceWork(0, 1, True, 1, owner=ANN)
    own, other = SequenceWork(1, 900, False, 2, owner=ANN), SequenceWork(1, 900, False, 2, owner=EVE)
    assert rows.budget([stream, own], 0.0) == rows.budget([other], 0.0) == 512
    for _ in range(9):
        rows.took(rows.budget([stream, other], 0.0), 4.0)  # a slow machine
    assert rows.budget([stream, other], 0.0) == PromptRows.LEAST + 1
    assert rows.budget([other], 1.0) == SHORT_PROMPT  # the stream's key may come back
    assert rows.budget([other], PromptRows.CONTENDED_S) == 512
    for _ in range(9):
        rows.took(rows.budget([stream, other], 0.0), 0.002)  # a fast one
    assert rows.budget([stream, other], 0.0) == 512
    rows.took(1, 4.0)  # says nothing about prompts
    assert rows.budget([stream, other], 0.0) == 512


def test_a_short_prompt_is_read_at_once_beside_a_long_one_of_another_key() -> None:
    rows = PromptRows(512)
    for _ in range(9):
        rows.took(512, 4.0)
    work = [SequenceWork(0, 1, True, 1, owner=ANN), SequenceWork(1, 900, False, 2, owner=EVE)]
    work.append(SequenceWork(2, 40, False, 3, owner=("main", "bob")))
    plan = plan_batch(work, rows.budget(work, 0.0))
    assert plan == [BatchSlice(0, 1, True), BatchSlice(1, 8, False), BatchSlice(2, 40, True)]


@given(WORK, st.integers(1, 32))
def test_all_prompts_are_read_eventually(work: list[SequenceWork], budget: int) -> None:
    pending = {need.sequence: need.pending for need in work if not need.generating}
    steps = 0
    while pending:
        left = [
            SequenceWork(n.sequence, pending.get(n.sequence, 1), n.sequence not in pending, n.arrival) for n in work
        ]
        for piece in plan_batch(left, budget):
            if piece.sequence in pending:
                pending[piece.sequence] -= piece.count
        pending = {sequence: count for sequence, count in pending.items() if count}
        steps += 1
        assert steps <= sum(need.pending for need in work)


def test_a_prompt_pauses_at_its_checkpoint() -> None:
    work = [SequenceWork(0, 40, False, 1, limit=10), SequenceWork(1, 40, False, 2)]
    assert plan_batch(work, 32) == [BatchSlice(0, 10, False), BatchSlice(1, 22, False)]
    assert plan_batch([SequenceWork(0, 10, False, 1, limit=10)], 32) == [BatchSlice(0, 10, True)]


# --- uniform batches --------------------------------------------------------------------------------------------------

WINDOW = 64
SAMPLED = Sampling(temperature=1.0)


def generating_job(window: int = WINDOW, **fields: Any) -> LlamaCppJob:
    """With a prompt of three tokens and one generated token."""
    prompt = id_prompt([1, 2, 3], **({"logprobs": None} | fields))
    job = LlamaCppJob(prompt, asyncio.get_running_loop(), "main", window, 1)
    job.sampler = Sampler(prompt.sampling, DrySamplers(None), 256, window)
    job.start(0)
    job.n_past = 3
    job.append(4)
    return job


def decode_batch(*jobs: LlamaCppJob) -> tuple[DecodeBatch, list[SequenceSlot]]:
    for index, job in enumerate(jobs):
        job.slot = SequenceSlot(index, np.zeros(0, np.int32))
    return DecodeBatch(dict(enumerate(jobs))), [job.slot for job in jobs]


async def test_a_stop_token_of_any_job_ends_a_round() -> None:
    found, _ = decode_batch(generating_job(stop_ids=(7,)), generating_job())
    assert not found.finishes_with([5, 6])
    assert found.finishes_with([7, 6])
    assert found.finishes_with([5, 7]), "which job it ends is decided later"


async def test_the_last_allowed_token_ends_a_round() -> None:
    found, _ = decode_batch(generating_job(max_tokens=3), generating_job(max_tokens=30))
    assert not found.finishes_with([5, 5])
    found.append([5, 5])
    assert found.finishes_with([6, 6])


async def test_a_full_window_ends_a_round() -> None:
    found, _ = decode_batch(generating_job(window=6, max_tokens=100))
    assert not found.finishes_with([5])
    found.append([5])
    assert found.finishes_with([6])


async def test_a_cancelled_or_late_job_stops_the_batch() -> None:
    quiet, leaving = generating_job(), generating_job()
    found, _ = decode_batch(quiet, leaving)
    assert not found.must_stop
    leaving.cancel()
    assert found.must_stop
    assert not decode_batch(generating_job(deadline=time.monotonic() + 3600))[0].must_stop
    assert decode_batch(generating_job(), generating_job(deadline=time.monotonic() - 1))[0].must_stop


async def test_tokens_are_appended_and_slots_hold_evaluated_tokens() -> None:
    jobs = generating_job(), generating_job()
    found, slots = decode_batch(*jobs)
    found.append([8, 9])
    found.update_slots()
    assert [job.ids.tolist() for job in jobs] == [[1, 2, 3, 4, 8], [1, 2, 3, 4, 9]]
    assert [slot.tokens.tolist() for slot in slots] == [[1, 2, 3, 4]] * 2
    assert [job.pending for job in jobs] == [1, 1]
    assert all(slot.last_used is not None for slot in slots)


@pytest.mark.parametrize(
    ("fields", "simple", "greedy"),
    [
        pytest.param({"sampling": GREEDY}, True, True, id="greedy"),
        pytest.param({"sampling": SAMPLED}, True, False, id="sampled"),
        pytest.param({"sampling": GREEDY, "logprobs": 0}, False, False, id="with logprobs"),
    ],
)
async def test_a_batch_is_simple_or_greedy_only_if_all_its_jobs_are(
    fields: dict[str, Any], simple: bool, greedy: bool
) -> None:
    found, _ = decode_batch(generating_job(), generating_job(**fields))
    assert (found.is_simple, found.is_greedy) == (simple, greedy)


@pytest.mark.parametrize(
    ("samplings", "together"),
    [
        pytest.param([Sampling(top_k=40), Sampling(top_k=9, top_p=0.5)], True, id="each has a top_k"),
        pytest.param([Sampling(top_k=40)], True, id="a single job"),
        pytest.param([Sampling(), Sampling(temperature=0.5)], True, id="none limits its tokens"),
        pytest.param([Sampling(top_k=40), Sampling(min_p=0.1)], True, id="one samples alone"),
        pytest.param([Sampling(seed=1), Sampling(min_p=0.1)], True, id="one has a seed"),
        pytest.param([Sampling(top_k=40), GREEDY], False, id="one is greedy"),
        pytest.param([Sampling(top_k=40), Sampling(top_k=40, logit_bias={1: 2.0})], False, id="one has a bias"),
    ],
)
async def test_jobs_are_sampled_together_if_their_samplers_alone_decide(
    samplings: list[Sampling], together: bool
) -> None:
    found, _ = decode_batch(*(generating_job(sampling=sampling) for sampling in samplings))
    assert (found.sampler is not None) == together
