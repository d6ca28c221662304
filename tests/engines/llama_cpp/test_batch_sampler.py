"""Several jobs sampled together: the tokens of each alone where a seed or top_k decides, else by their probability."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from msgspec.structs import replace

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.logit_columns import Row, Rows
from modelyard.engines.llama_cpp.sampler import BatchSampler, Sampler, nucleus
from modelyard.engines.llama_cpp.sampler_chain import DrySamplers

SEEDED = [
    Sampling(top_k=40, seed=1),
    Sampling(top_k=40, top_p=0.9, temperature=0.7, seed=1),
    Sampling(top_k=5, temperature=2.0, seed=1),
    Sampling(top_k=60, min_p=0.2, temperature=1.3, seed=1),
    Sampling(top_k=20, top_p=0.0, seed=1),
    Sampling(top_p=0.9, temperature=0.7, seed=1),
    Sampling(top_p=0.5, min_p=0.1, seed=1),
    Sampling(seed=1),
    Sampling(min_p=0.1, seed=1),
]


def drawing(sampling: Sampling) -> Sampler:
    found = Sampler(sampling, DrySamplers(None), 100, 64)
    assert found.is_batched
    return found


def logits(spread: float, rows: int, vocab: int = 9_001, seed: int = 3) -> Rows:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


def nucleus_by_sorting(row: Row, share: float) -> set[int]:
    order = np.argsort(-row, kind="stable")
    weights = np.exp((row[order] - row.max()).astype(np.float64))
    return set(order[weights.cumsum() - weights < share * weights.sum()].tolist())


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("vocab", [9_001, 1_000, 50], ids=["columns", "no columns", "fewer than are asked for"])
def test_a_batch_samples_what_each_seeded_job_samples_alone(spread: float, vocab: int) -> None:
    batch = BatchSampler([drawing(replace(kind, seed=seed)) for seed, kind in enumerate(SEEDED)])
    alone = [BatchSampler([drawing(replace(kind, seed=seed))]) for seed, kind in enumerate(SEEDED)]
    for seed in range(15):
        rows = logits(spread, len(SEEDED), vocab, seed)
        assert batch.sample(rows) == [each.sample(row[None])[0] for each, row in zip(alone, rows, strict=True)]


def test_jobs_of_all_kinds_are_sampled_together() -> None:
    kinds = [Sampling(), *SEEDED, Sampling(top_p=0.9), Sampling(min_p=0.1)]
    batch, alone = BatchSampler([drawing(kind) for kind in kinds]), [BatchSampler([drawing(k)]) for k in SEEDED]
    for seed in range(10):
        rows = logits(3.0, len(kinds), seed=seed)
        found = batch.sample(rows)
        assert found[1:-2] == [each.sample(row[None])[0] for each, row in zip(alone, rows[1:], strict=False)]
        assert found[-2] in nucleus_by_sorting(rows[-2], 0.9)
        assert rows[-1, found[-1]] >= rows[-1].max() + np.log(0.1) - 1e-5


@pytest.mark.parametrize("broken", [nan, inf, -inf])
@pytest.mark.parametrize("kind", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=40)], ids=["open", "top_p", "top_k"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_that_is_not_finite_does_not_affect_others(broken: float, kind: Sampling, place: int) -> None:
    batch = BatchSampler([drawing(kind) for _ in range(3)])
    rows = logits(2.0, 3)
    rows[:, 7] = 100.0
    rows[place] = broken
    for _ in range(3):
        found = batch.sample(rows)
        assert 0 <= found.pop(place) < rows.shape[1]
        assert found == [7, 7]


KINDS = {
    "temperature": Sampling(temperature=0.7),
    "hot": Sampling(temperature=2.0),
    "top_p": Sampling(top_p=0.9),
    "cool top_p": Sampling(temperature=0.6, top_p=0.7),
    "hot top_p": Sampling(temperature=2.0, top_p=0.95),
    "min_p": Sampling(min_p=0.02),
    "top_p min_p": Sampling(temperature=0.8, top_p=0.95, min_p=0.05),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("spread", [0.3, 2.0, 5.0], ids=["flat", "some hundreds", "few"])
def test_each_token_is_drawn_by_its_probability(kind: Sampling, spread: float) -> None:
    """Tokens in eight groups of equal probability among those that are left: chi-squared with seven degrees."""
    jobs, draws = 4, 400
    rows = np.repeat(logits(spread, 1), jobs, axis=0)
    batch = BatchSampler([drawing(kind) for _ in range(jobs)])
    found = np.array([batch.sample(rows) for _ in range(draws // jobs)]).ravel()
    row = rows[0].astype(np.float64)
    weights = np.exp((row - row.max()) / (kind.temperature or 1.0))
    if kind.top_p is not None:
        kept = np.zeros(len(row), bool)
        kept[list(nucleus_by_sorting(rows[0], kind.top_p))] = True
        weights[~kept] = 0
    if kind.min_p is not None:
        weights[row < row.max() + np.log(kind.min_p)] = 0
    assert (weights[found] > 0).all()
    order = np.argsort(-weights)
    groups = np.minimum(8 * (weights[order].cumsum() - weights[order] / 2) / weights.sum(), 7).astype(int)
    expected = np.bincount(groups, weights[order], 8) / weights.sum() * draws
    place = np.empty(len(row), int)
    place[order] = groups
    counted = np.bincount(place[found], minlength=8)
    assert ((counted - expected) ** 2 / np.maximum(expected, 1.0)).sum() < 30


def test_tokens_that_a_mask_forbids_are_never_drawn() -> None:
    kinds = [Sampling(), Sampling(top_p=0.9), Sampling(min_p=0.01), Sampling(top_k=40), Sampling(seed=1)]
    batch = BatchSampler([drawing(kind) for kind in kinds])
    rows = np.full((len(kinds), 32_000), -inf, np.float32)
    rows[:, [5, 31_999]] = 1.0
    found = [batch.sample(rows) for _ in range(30)]
    assert all(set(tokens) == {5, 31_999} for tokens in zip(*found, strict=True))


def test_a_nucleus_of_equally_likely_tokens_has_all_of_them() -> None:
    rows = np.zeros((2, 9_001), np.float32)
    batch = BatchSampler([drawing(Sampling(top_p=0.5)) for _ in range(2)])
    assert len({token for _ in range(20) for token in batch.sample(rows)}) > 35
    assert len(nucleus(rows[0], 0.5)) in (4_501, 9_001)


def test_a_tiny_temperature_is_greedy() -> None:
    rows = logits(3.0, 2)
    assert BatchSampler([drawing(Sampling(temperature=1e-30))] * 2).sample(rows) == rows.argmax(1).tolist()


def test_numbers_that_are_drawn_ahead_are_used() -> None:
    batch, rows = BatchSampler([drawing(Sampling(temperature=2.0)) for _ in range(3)]), logits(0.5, 3)
    found = []
    for _ in range(20):
        found.append(tuple(batch.sample(rows)))
        batch.prepare()
    assert len(set(found)) == 20
