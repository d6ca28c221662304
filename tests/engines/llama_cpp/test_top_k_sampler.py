"""A top_k: llama.cpp draws one of the tokens that numpy finds, the one that it would draw from all of them."""

from __future__ import annotations

import ctypes
from math import inf, nan

import numpy as np
import pytest

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.logit_columns import Row
from modelyard.engines.llama_cpp.sampler import Sampler
from modelyard.engines.llama_cpp.sampler_chain import DrySamplers
from tests.engines.llama_cpp.logit_rows import ROWS, VOCAB, normal

KINDS = [
    Sampling(top_k=40),
    Sampling(top_k=300),
    Sampling(top_k=2**31 - 1),
    Sampling(top_k=40, top_p=0.8),
    Sampling(top_k=200, top_p=0.95, min_p=0.1, temperature=0.7),
    Sampling(top_k=5, temperature=2.0),
    Sampling(top_k=60, min_p=0.2, temperature=1.3),
    Sampling(top_k=20, top_p=0.0),
    Sampling(top_k=20, min_p=1.0),
]


def sampler_of(sampling: Sampling, count: int = VOCAB) -> Sampler:
    return Sampler(sampling, DrySamplers(None), count, 64)


def drawn_by_llama_cpp(row: Row, sampling: Sampling, draws: int) -> list[int]:
    """With the list of all tokens."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for each in (
        lib.llama_sampler_init_top_k(sampling.top_k),
        lib.llama_sampler_init_top_p(1.0 if sampling.top_p is None else sampling.top_p, 1),
        lib.llama_sampler_init_min_p(sampling.min_p or 0.0, 1),
        lib.llama_sampler_init_temp(1.0 if sampling.temperature is None else sampling.temperature),
        lib.llama_sampler_init_dist(sampling.seed),
    ):
        lib.llama_sampler_chain_add(chain, each)
    found = []
    for _ in range(draws):
        possible = np.flatnonzero(row > -inf).tolist()
        data = (lib.llama_token_data * len(possible))(*[(token, row[token], 0.0) for token in possible])
        array = lib.llama_token_data_array(data, len(possible), -1, False)
        lib.llama_sampler_apply(chain, ctypes.byref(array))
        found.append(array.data[array.selected].id)
    lib.llama_sampler_free(chain)
    return found


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda s: f"{s.top_k}-{s.top_p}-{s.min_p}-{s.temperature}")
def test_the_tokens_of_a_seed_are_those_of_llama_cpp(row: Row, kind: Sampling) -> None:
    seeded = Sampling(kind.temperature, kind.top_p, kind.top_k, kind.min_p, seed=7)
    sampler = sampler_of(seeded, len(row))
    assert [sampler.sample(None, 0, row) for _ in range(6)] == drawn_by_llama_cpp(row, seeded, 6)
    sampler.close()


def test_tokens_are_drawn_by_their_probability() -> None:
    row = np.full(VOCAB, -30, np.float32)
    row[:: VOCAB // 12] = normal(1.0, len(row[:: VOCAB // 12]))
    sampler, draws = sampler_of(Sampling(temperature=1.5, top_k=8, seed=3)), 1500
    kept = np.argsort(-row)[:8]
    expected = np.zeros(VOCAB)
    expected[kept] = np.exp(row[kept] / 1.5) / np.exp(row[kept] / 1.5).sum()
    found = np.bincount([sampler.sample(None, 0, row) for _ in range(draws)], minlength=VOCAB) / draws
    assert np.abs(found - expected).max() < 0.04
    assert not found[expected == 0].any()


def test_a_tiny_temperature_is_greedy() -> None:
    row = normal(3.0)
    assert sampler_of(Sampling(temperature=1e-30, top_k=40)).sample(None, 0, row) == row.argmax()


@pytest.mark.parametrize("broken", [nan, inf, -inf])
def test_logits_that_are_not_finite_give_some_token(broken: float) -> None:
    sampler = sampler_of(Sampling(top_k=40))
    assert 0 <= sampler.sample(None, 0, np.full(VOCAB, broken, np.float32)) < VOCAB
    some = normal(1.0)
    some[5] = inf
    assert 0 <= sampler.sample(None, 0, some) < VOCAB


def test_many_equally_likely_tokens_are_all_possible() -> None:
    sampler = sampler_of(Sampling(top_k=VOCAB))
    assert len({sampler.sample(None, 0, np.zeros(VOCAB, np.float32)) for _ in range(50)}) > 40


def test_a_closed_sampler_is_freed_once() -> None:
    sampler = sampler_of(Sampling(top_k=40))
    sampler.close()
    sampler.close()
