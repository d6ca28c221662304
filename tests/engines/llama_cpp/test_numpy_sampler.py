"""Sampling with numpy: truncation as in llama.cpp, probabilities as in the model."""

from __future__ import annotations

import ctypes
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp import numpy_sampler
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.numpy_sampler import BatchSampler, NumpySampler, Row, nucleus, top_tokens

VOCAB = 5000


def normal(spread: float, count: int = VOCAB, seed: int = 1) -> Row:
    return np.random.default_rng(seed).normal(0, spread, count).astype(np.float32)


ROWS = {
    "flat": normal(0.1),
    "usual": normal(2.0),
    "peaked": normal(6.0),
    "masked": np.where(np.arange(VOCAB) % 97 == 3, normal(2.0), -inf).astype(np.float32),
    "small": normal(2.0, 40),
}


def truncated_by_llama_cpp(row: Row, sampling: Sampling) -> set[int]:
    """What llama.cpp's samplers leave of the row."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    if sampling.top_k:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p is not None:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(sampling.min_p, 1))
    try:
        return _applied(chain, row)
    finally:
        lib.llama_sampler_free(chain)


def _applied(chain: Any, row: Row) -> set[int]:
    data = (lib.llama_token_data * len(row))(*[(token, value, 0.0) for token, value in enumerate(row.tolist())])
    array = lib.llama_token_data_array(data, len(row), -1, False)
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    return {array.data[at].id for at in range(array.size) if array.data[at].logit > -inf}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=40),
        Sampling(top_k=300),
        Sampling(top_k=10**6),
        Sampling(top_k=40, top_p=0.8),
        Sampling(top_k=200, top_p=0.95, min_p=0.1),
        Sampling(top_p=0.9),
        Sampling(top_p=0.0),
        Sampling(top_p=0.7, min_p=0.2),
        Sampling(min_p=0.05),
        Sampling(min_p=1.0),
    ],
    ids=lambda s: f"{s.top_k}-{s.top_p}-{s.min_p}",
)
def test_truncation_leaves_what_llama_cpp_leaves(row: Row, sampling: Sampling) -> None:
    ids, gaps = NumpySampler(sampling, 1).truncate(row)
    left = {int(token) for token, gap in zip(ids, gaps, strict=True) if gap > -inf}
    expected = truncated_by_llama_cpp(row, sampling)
    # Both add up thousands of chances, in another order: the last token of a share may be on either side of it.
    assert len(left ^ expected) <= (1 if sampling.top_p and len(expected) > 256 else 0)
    assert left


@pytest.mark.parametrize("count", [1, 7, 40, 600, VOCAB, VOCAB + 5])
def test_top_tokens_are_ordered(count: int) -> None:
    row = normal(1.0)
    assert top_tokens(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()


def test_equal_tokens_are_neither_lost_nor_too_many() -> None:
    row = np.zeros(1000, np.float32)
    assert len(top_tokens(row, 40)) == 40
    assert len(nucleus(row, 0.5)) in (500, 1000), "all tokens that are as likely as the last one may stay"


@pytest.mark.parametrize("share", [0.3, 0.99, 0.9999999])
def test_a_nucleus_has_the_fewest_tokens_of_its_share(share: float) -> None:
    row = normal(0.5, 20000)
    chances = np.exp(row.astype(np.float64))
    chances /= chances.sum()
    kept = nucleus(row, share)
    assert chances[kept].sum() >= share - 1e-5
    assert chances[kept].sum() - chances[kept].min() <= share + 1e-5
    assert chances[kept].min() >= np.delete(chances, kept).max(initial=0.0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=1.5, top_k=8),
        Sampling(top_p=0.9),
        Sampling(min_p=0.1),
    ],
    ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.min_p}",
)
@pytest.mark.parametrize("count", [12, 700])
def test_tokens_are_sampled_by_their_probability(sampling: Sampling, count: int) -> None:
    row = np.full(count, -30, np.float32)
    row[:: count // 12] = normal(1.0, len(row[:: count // 12]))
    sampler, draws = NumpySampler(sampling, 7), 1500
    kept, _ = sampler.truncate(row) if sampler.truncates else (np.arange(count), None)
    weights = np.zeros(count)
    weights[kept] = np.exp((row[kept] - row.max()).astype(np.float64) / (sampling.temperature or 1.0))
    expected = weights / weights.sum()
    found = np.bincount([sampler.sample(row) for _ in range(draws)], minlength=count) / draws
    assert np.abs(found - expected).max() < 0.04
    assert not found[expected < 1e-9].any()


def test_impossible_tokens_are_never_sampled() -> None:
    row = np.full(3000, -inf, np.float32)
    row[[5, 1234, 2999]] = [1.0, 2.0, 0.5]
    for sampling in (Sampling(), Sampling(top_k=40), Sampling(top_p=0.999), Sampling(min_p=0.01)):
        sampler = NumpySampler(sampling, 3)
        assert {sampler.sample(row) for _ in range(200)} == {5, 1234, 2999}


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-30), Sampling(temperature=1e-30, top_p=0.9)])
def test_a_tiny_temperature_is_greedy(sampling: Sampling) -> None:
    row = normal(3.0)
    assert NumpySampler(sampling, 1).sample(row) == row.argmax()


def test_a_seed_reproduces_tokens() -> None:
    row = normal(1.0)
    runs = [
        [sampler.sample(row) for _ in range(20)] for sampler in (NumpySampler(Sampling(), seed) for seed in (1, 1, 2))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("broken", [nan, inf, -inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=40), Sampling(top_p=0.9), Sampling(min_p=0.1)], ids=str
)
def test_logits_that_are_not_finite_give_some_token(broken: float, sampling: Sampling) -> None:
    assert 0 <= NumpySampler(sampling, 1).sample(np.full(1000, broken, np.float32)) < 1000


# --- several samplers at once -----------------------------------------------------------------------------------------

ALL = [
    Sampling(top_k=40),
    Sampling(top_k=40, top_p=0.9, temperature=0.7),
    Sampling(top_k=5, temperature=2.0),
    Sampling(top_k=60, min_p=0.2, temperature=1.3),
    Sampling(top_k=20, top_p=0.5, min_p=0.1),
    Sampling(top_k=20, top_p=0.0),
    Sampling(top_k=20, min_p=1.0),
    Sampling(top_p=0.9, temperature=0.7),
    Sampling(top_p=0.5, min_p=0.1),
    Sampling(top_p=0.0),
]


def rows(spread: float, vocab: int = 6000, seed: int = 3) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).normal(0, spread, (len(ALL), vocab)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("vocab", [6000, 1000, 50], ids=["blocks", "no blocks", "fewer than are asked for"])
def test_a_batch_samples_what_each_sampler_samples_alone(spread: float, vocab: int) -> None:
    together, alone = ([NumpySampler(sampling, seed) for seed, sampling in enumerate(ALL)] for _ in range(2))
    batch = BatchSampler(together)
    for seed in range(30):
        held = rows(spread, vocab, seed)
        assert batch.sample(held) == [sampler.sample(row) for sampler, row in zip(alone, held, strict=True)]


def test_a_row_with_few_possible_tokens_is_sampled_in_a_batch() -> None:
    held = rows(2.0)
    held[1] = -inf
    held[1, [7, 70]] = 1.0
    batch = BatchSampler([NumpySampler(sampling, 1) for sampling in ALL])
    assert {batch.sample(held)[1] for _ in range(30)} == {7, 70}


@pytest.mark.parametrize("broken", [nan, inf, -inf])
def test_a_row_that_is_not_finite_does_not_affect_others(broken: float) -> None:
    held = rows(2.0)
    expected = [
        sampler.sample(row) for sampler, row in zip([NumpySampler(sampling, 1) for sampling in ALL], held, strict=True)
    ]
    held[2] = broken
    found = BatchSampler([NumpySampler(sampling, 1) for sampling in ALL]).sample(held)
    assert found[:2] + found[3:] == expected[:2] + expected[3:]
    assert 0 <= found[2] < held.shape[1]


# --- rows of logits together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [257, 9_000, 32_000, 128_256])
def test_the_top_of_several_rows_is_that_of_each(vocab: int) -> None:
    rows = np.random.default_rng(vocab).normal(0, 3, (5, vocab)).astype(np.float32)
    rows[1, : vocab // 2] = -np.inf
    rows[2, 7::16] = rows[2].max()  # ties
    top = numpy_sampler.top_of_rows(rows, 40)
    lines, ids, logits = top.lines, top.ids, top.logits
    assert (rows[lines, ids] == logits).all()
    for line, row in enumerate(rows):
        best = np.sort(row)[-40]
        assert set(np.flatnonzero(row > best)) <= set(ids[lines == line])
        assert (row[ids[lines == line]] >= best).sum() >= 40
    assert (np.diff(lines) >= 0).all()


def test_rows_together_draw_what_each_draws_alone() -> None:
    rows = np.random.default_rng(1).normal(0, 3, (7, 32_000)).astype(np.float32)
    samplers = [NumpySampler(Sampling(top_k=40, top_p=0.95), seed) for seed in range(7)]
    alone = [NumpySampler(Sampling(top_k=40, top_p=0.95), n).sample(row) for n, row in enumerate(rows)]
    assert BatchSampler(samplers).sample(rows) == alone


@pytest.mark.parametrize("spread", [0.3, 3.0, 6.0], ids=["too many to search", "some of both", "few"])
def test_nuclei_together_draw_what_each_draws_alone(spread: float) -> None:
    together, alone = ([NumpySampler(Sampling(top_p=0.9), seed) for seed in range(7)] for _ in range(2))
    batch = BatchSampler(together)
    assert batch.is_useful
    for seed in range(10):
        rows = np.random.default_rng(seed).normal(0, spread, (7, 32_000)).astype(np.float32)
        assert batch.sample(rows) == [sampler.sample(row) for sampler, row in zip(alone, rows, strict=True)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_a_batch_without_top_k_draws_each_token_by_its_probability(temperature: float, spread: float) -> None:
    """Tokens in eight groups by their logits: the most likely ones, and those behind the bound."""
    vocab, draws = 4200, 600
    rows = np.random.default_rng(3).normal(0, spread, (4, vocab)).astype(np.float32)
    sampler = BatchSampler([NumpySampler(Sampling(temperature=temperature), seed) for seed in range(4)])
    drawn = np.array([sampler.sample(rows) for _ in range(draws)])
    for row, found in zip(rows, drawn.T, strict=True):
        weights = np.exp((row - row.max()).astype(np.float64) / temperature)
        groups = np.searchsorted(np.quantile(row, [0.2, 0.5, 0.8, 0.9, 0.95, 0.99, 0.997]), row)
        expected = np.bincount(groups, weights, 8) / weights.sum() * draws
        counted = np.bincount(groups[found], minlength=8)
        assert ((counted - expected) ** 2 / np.maximum(expected, 1.0)).sum() < 40


def test_a_batch_of_all_kinds_gives_seeded_and_limited_jobs_what_they_get_alone() -> None:
    kinds = [Sampling(top_k=40), Sampling(), Sampling(seed=5), Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling()]
    together, alone = ([NumpySampler(kind, seed) for seed, kind in enumerate(kinds)] for _ in range(2))
    batch = BatchSampler(together)
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(0, 3, (6, 9_001)).astype(np.float32)
        found = batch.sample(rows)
        expected = [sampler.sample(row) for sampler, row in zip(alone, rows, strict=True)]
        assert [found[at] for at in (0, 2, 3, 4)] == [expected[at] for at in (0, 2, 3, 4)]
        assert all(0 <= found[at] < 9_001 for at in (1, 5))


def test_tokens_that_a_mask_forbids_are_never_drawn_without_top_k() -> None:
    rows = np.full((2, 32_000), -np.inf, np.float32)
    rows[:, :100] = np.arange(100, dtype=np.float32) / 50
    sampler = BatchSampler([NumpySampler(Sampling(), seed) for seed in range(2)])
    assert all(token < 100 for _ in range(50) for token in sampler.sample(rows))


def test_tokens_that_a_mask_forbids_are_never_drawn() -> None:
    rows = np.full((2, 32_000), -np.inf, np.float32)
    rows[:, [5, 31_999]] = 1.0
    sampler = BatchSampler([NumpySampler(Sampling(top_k=40), seed) for seed in range(2)])
    assert all(token in (5, 31_999) for _ in range(20) for token in sampler.sample(rows))
