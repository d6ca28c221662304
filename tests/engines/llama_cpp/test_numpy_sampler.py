"""Sampling with numpy: truncation as in llama.cpp, probabilities as in the model."""

from __future__ import annotations

import ctypes
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.logit_columns import Row
from modelyard.engines.llama_cpp.sampler import Sampler, nucleus, top_tokens
from modelyard.engines.llama_cpp.sampler_chain import DrySamplers
from tests.engines.llama_cpp.logit_rows import ROWS, VOCAB, normal


def seeded(sampling: Sampling, seed: int) -> Sampler:
    return Sampler(replace(sampling, seed=seed), DrySamplers(None), VOCAB, 64)


def truncated_by_llama_cpp(row: Row, sampling: Sampling) -> set[int]:
    """What llama.cpp's samplers leave of the row."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
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
        Sampling(top_p=0.9),
        Sampling(top_p=0.0),
        Sampling(top_p=0.7, min_p=0.2),
        Sampling(min_p=0.05),
        Sampling(min_p=1.0),
    ],
    ids=lambda s: f"{s.top_p}-{s.min_p}",
)
def test_truncation_leaves_what_llama_cpp_leaves(row: Row, sampling: Sampling) -> None:
    ids, gaps = seeded(sampling, 1).truncate(row)
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
        Sampling(top_p=0.9),
        Sampling(min_p=0.1),
    ],
    ids=lambda s: f"{s.temperature}-{s.top_p}-{s.min_p}",
)
@pytest.mark.parametrize("count", [12, 700])
def test_tokens_are_sampled_by_their_probability(sampling: Sampling, count: int) -> None:
    row = np.full(count, -30, np.float32)
    row[:: count // 12] = normal(1.0, len(row[:: count // 12]))
    sampler, draws = seeded(sampling, 7), 1500
    kept, _ = sampler.truncate(row) if sampler.truncates else (np.arange(count), None)
    weights = np.zeros(count)
    weights[kept] = np.exp((row[kept] - row.max()).astype(np.float64) / (sampling.temperature or 1.0))
    expected = weights / weights.sum()
    found = np.bincount([sampler.sample_row(row) for _ in range(draws)], minlength=count) / draws
    assert np.abs(found - expected).max() < 0.04
    assert not found[expected < 1e-9].any()


def test_impossible_tokens_are_never_sampled() -> None:
    row = np.full(3000, -inf, np.float32)
    row[[5, 1234, 2999]] = [1.0, 2.0, 0.5]
    for sampling in (Sampling(), Sampling(top_p=0.999), Sampling(min_p=0.01)):
        sampler = seeded(sampling, 3)
        assert {sampler.sample_row(row) for _ in range(200)} == {5, 1234, 2999}


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-30), Sampling(temperature=1e-30, top_p=0.9)])
def test_a_tiny_temperature_is_greedy(sampling: Sampling) -> None:
    row = normal(3.0)
    assert seeded(sampling, 1).sample_row(row) == row.argmax()


def test_a_seed_reproduces_tokens() -> None:
    row = normal(1.0)
    runs = [
        [sampler.sample_row(row) for _ in range(20)] for sampler in (seeded(Sampling(), seed) for seed in (1, 1, 2))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("broken", [nan, inf, -inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(min_p=0.1)], ids=str)
def test_logits_that_are_not_finite_give_some_token(broken: float, sampling: Sampling) -> None:
    assert 0 <= seeded(sampling, 1).sample_row(np.full(1000, broken, np.float32)) < 1000
