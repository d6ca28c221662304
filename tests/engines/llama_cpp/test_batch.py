"""The plan of a mixed step, and the batch of a uniform one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.batch import (
    FAIR_S,
    BatchSlice,
    DecodeBatch,
    PromptRows,
    SequenceWork,
    plan_batch,
    step_target_s,
)
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.logit_columns import best_tokens
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


BOB, GAP_S = ("main", "bob"), 0.15


def stream(owner: tuple[str, str]) -> SequenceWork:
    return SequenceWork(0, 1, True, 1, owner=owner)


def prompt(owner: tuple[str, str], tokens: int = 900) -> SequenceWork:
    return SequenceWork(1, tokens, False, 2, owner=owner)


@pytest.mark.parametrize(
    ("jobs", "bare_s", "shared", "expected"),
    [
        pytest.param([prompt(ANN)], 0.01, False, inf, id="nothing streams"),
        pytest.param([prompt(ANN)], 0.01, True, GAP_S, id="another key may come back any moment"),
        pytest.param([stream(ANN), prompt(ANN)], 0.01, False, GAP_S, id="a key's own stream: the gap"),
        pytest.param([stream(ANN), prompt(ANN)], 0.2, False, 0.4, id="a slow model reads half of the time"),
        pytest.param([stream(ANN), prompt(EVE)], 0.03, True, 0.06, id="two keys, half of the time each"),
        pytest.param([stream(ANN), stream(BOB), prompt(EVE)], 0.06, True, 0.09, id="three keys, a third each"),
        pytest.param([stream(ANN), stream(EVE), prompt(EVE)], 0.06, True, 0.09, id="who streams may read, too"),
        pytest.param([stream(ANN), prompt(EVE)], 0.0, True, FAIR_S, id="streams were not measured yet"),
        pytest.param([stream(ANN), *[prompt(("main", str(n))) for n in range(9)]], 0.05, True, GAP_S, id="many read"),
    ],
)
def test_a_step_takes_the_time_that_streams_and_keys_leave_it(
    jobs: list[SequenceWork], bare_s: float, shared: bool, expected: float
) -> None:
    assert step_target_s(jobs, bare_s, GAP_S, shared=shared) == pytest.approx(expected)


def paced(machine: Callable[[int], float], jobs: list[SequenceWork], steps: int = 12) -> list[float]:
    """The seconds of steps that read a long prompt on a machine that takes so long for so many rows."""
    rows, seconds = PromptRows(512, GAP_S), []
    for now in range(steps):
        count = rows.budget(jobs, float(now))
        seconds.append(machine(count))
        rows.took(count, seconds[-1])
    return seconds


@pytest.mark.parametrize(
    ("fixed_s", "row_s", "least", "most"),
    [
        pytest.param(0.01, 0.0012, 0.13, 0.17, id="as many rows as take the gap"),
        pytest.param(0.012, 0.0035, 0.23, 0.25, id="SmolLM2 on a core: 64 rows, fewer cost twice as much"),
        pytest.param(0.02, 0.009, 0.13, 0.2, id="64 rows would take more than three gaps"),
        pytest.param(0.002, 0.0001, 0.05, 0.06, id="a GPU reads whole micro-batches"),
        pytest.param(0.05, 0.03, 0.29, 0.33, id="too slow: the fewest rows"),
    ],
)
def test_slices_of_a_prompt_beside_a_stream_take_the_gap(
    fixed_s: float, row_s: float, least: float, most: float
) -> None:
    seconds = paced(lambda rows: fixed_s + row_s * rows, [stream(ANN), prompt(ANN)])
    assert all(least <= each <= most for each in seconds[8:])


def test_a_disturbed_step_is_forgotten_after_a_few() -> None:
    disturbed = iter([0.0, 0.0, 0.0, 0.0, 4.0, *[0.0] * 7])
    seconds = paced(lambda rows: 0.0035 * rows + next(disturbed), [stream(ANN), prompt(ANN)])
    assert max(seconds[5:]) == seconds[3] == seconds[-1] == pytest.approx(0.0035 * 66)
    assert min(seconds[5:]) < GAP_S


def test_slices_become_64_again_where_fewer_cost_twice_as_much_a_row() -> None:
    """As behind 2,000 tokens: once below, the time of a row says that 64 would take too long."""
    disturbed = iter([0.0, 0.0, 0.0, 0.0, 0.5, *[0.0] * 95])
    seconds = paced(
        lambda rows: (0.005 if rows >= 64 else 0.0105) * rows + next(disturbed), [stream(ANN), prompt(ANN)], 100
    )
    assert seconds[-1] == pytest.approx(0.005 * 66)


def test_whole_micro_batches_are_read_when_nothing_streams_and_with_no_gap() -> None:
    rows = PromptRows(512, GAP_S)
    for _ in range(9):
        rows.took(512, 8.0)
    assert rows.budget([prompt(ANN)], 0.0) == rows.budget([stream(ANN)], 0.0) == 512  # a stream's drafts need room
    assert rows.budget([stream(ANN), prompt(ANN)], 0.0) < 64
    assert PromptRows(512, 0).budget([stream(ANN), prompt(ANN)], 0.0) == 512


def test_contexts_and_sequences_that_step_in_turn_share_the_gap() -> None:
    rows, jobs = PromptRows(512, GAP_S), [stream(ANN), prompt(ANN)]
    for _ in range(9):
        rows.took(512, 0.5)
    assert rows.budget(jobs, 0.0, turns=2) - 1 == pytest.approx((rows.budget(jobs, 0.0) - 1) / 2, abs=1)


def test_prompts_are_read_in_smaller_slices_for_a_while_after_another_key() -> None:
    rows = PromptRows(512, GAP_S)
    assert rows.budget([stream(ANN), prompt(EVE)], 0.0) < 100
    assert rows.budget([prompt(EVE)], 1.0) < 512  # the stream's key may come back
    assert rows.budget([prompt(EVE)], PromptRows.SHARED_S) == 512


def test_a_short_prompt_is_read_at_once_beside_a_long_one_of_another_key() -> None:
    rows, work = PromptRows(512, GAP_S), [stream(ANN), prompt(EVE)]
    work.append(SequenceWork(2, 40, False, 3, owner=BOB))
    for _ in range(9):
        rows.took(rows.budget(work, 0.0), 4.0)
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
        pytest.param([Sampling(top_k=40), GREEDY], True, id="one is greedy"),
        pytest.param([Sampling(top_k=40), Sampling(top_k=40, logit_bias={1: 2.0})], True, id="one has a bias"),
        pytest.param([Sampling(top_k=40), Sampling(mirostat=2)], False, id="one has a chain of llama.cpp's samplers"),
    ],
)
async def test_jobs_are_sampled_together_if_their_samplers_alone_decide(
    samplings: list[Sampling], together: bool
) -> None:
    found, _ = decode_batch(*(generating_job(sampling=sampling) for sampling in samplings))
    assert (found.sampler is not None) == together


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.8])
async def test_biases_penalties_and_forbidden_ends_count_for_jobs_that_are_sampled_together(temperature: float) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"logit_bias": {7: 50.0, 8: -50.0}},
        {"repetition_penalty": 100.0},
        {"ignore_eos": True},
        {"min_tokens": 2, "frequency_penalty": 40.0, "seed": 1},
    ]
    jobs = [
        generating_job(sampling=Sampling(temperature=temperature, **change), max_tokens=30, stop_ids=(9,))
        for change in changes
    ]
    found, _ = decode_batch(*jobs)
    assert found.is_greedy == (temperature == 0)
    seen = []
    for _ in range(3):
        rows = np.zeros((len(jobs), 256), np.float32)
        rows[:, [9, 8, 3, 7]] = 40.0, 30.0, 25.0, 20.0
        found.change(rows)
        tokens = best_tokens(rows) if found.sampler is None else found.sampler.sample(rows)
        found.count(tokens)
        found.append(tokens)
        seen.append(tokens)
    plain, biased, penalized, endless, late = map(list, zip(*seen, strict=True))
    assert (plain, biased) == ([9, 9, 9], [7, 7, 7])
    assert penalized == [9, 8, 3], "each once it was chosen"
    assert endless == [8, 8, 8], "never the end"
    assert late == [8, 9, 3], "the end after two tokens, of which one was there"
