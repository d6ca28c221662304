"""Dice thrown together give what each gives alone."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.numpy_sampler import BatchSampler, NumpySampler

ALL = [
    Sampling(top_k=40),
    Sampling(top_k=40, top_p=0.9, temperature=0.7),
    Sampling(top_k=5, temperature=2.0),
    Sampling(top_k=60, min_p=0.2, temperature=1.3),
    Sampling(top_k=20, top_p=0.5, min_p=0.1),
    Sampling(top_k=20, top_p=0.0),
    Sampling(top_k=20, min_p=1.0),
]


def rows(spread: float, vocab: int = 6000, seed: int = 3) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).normal(0, spread, (len(ALL), vocab)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("vocab", [6000, 1000, 50], ids=["blocks", "no blocks", "fewer than are asked for"])
def test_each_gets_the_token_that_it_would_get_alone(spread: float, vocab: int) -> None:
    together, alone = ([NumpySampler(sampling, seed) for seed, sampling in enumerate(ALL)] for _ in range(2))
    throw = BatchSampler(together)
    for seed in range(30):
        held = rows(spread, vocab, seed)
        assert throw.pick(held) == [dice.pick(row) for dice, row in zip(alone, held, strict=True)]


def test_a_row_with_few_possible_tokens_is_drawn_from_all_the_same() -> None:
    held = rows(2.0)
    held[1] = -inf
    held[1, [7, 70]] = 1.0
    throw = BatchSampler([NumpySampler(sampling, 1) for sampling in ALL])
    assert {throw.pick(held)[1] for _ in range(30)} == {7, 70}


@pytest.mark.parametrize("broken", [nan, inf, -inf])
def test_a_row_that_is_no_numbers_disturbs_no_other(broken: float) -> None:
    held = rows(2.0)
    expected = [dice.pick(row) for dice, row in zip([NumpySampler(sampling, 1) for sampling in ALL], held, strict=True)]
    held[2] = broken
    found = BatchSampler([NumpySampler(sampling, 1) for sampling in ALL]).pick(held)
    assert found[:2] + found[3:] == expected[:2] + expected[3:]
    assert 0 <= found[2] < held.shape[1]
