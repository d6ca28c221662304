"""How far llama.cpp is from itself, without our engine: what the comparisons of other tests stand on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.engines.llama_cpp import reference
from tests.engines.llama_cpp.exact import VOCAB, exact_model, recurrent_model, sliding_model
from tests.engines.llama_cpp.stage import model_file, prompt
from tests.engines.reading import ROUNDED, TOLERANCE

CHUNKINGS = ([16], [1], [512], [30, 10], [8, 15, 1])


def run(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(40)]


MODELS = [exact_model, sliding_model, recurrent_model]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_unquantized_weights_give_the_same_numbers_in_any_batch(model: Callable[[], Path], seed: int) -> None:
    found = reference.logprobs(model(), run(seed), CHUNKINGS)
    assert np.abs(found - found[0]).max() < TOLERANCE / 2


@pytest.mark.parametrize("model", MODELS)
def test_one_other_token_anywhere_moves_them_further_than_the_tolerance(model: Callable[[], Path]) -> None:
    """Nearly always already the next token; what is compared elsewhere are answers of several."""
    moved = [_moved_by_one(model(), run(seed), place) for seed in range(10) for place in (0, 5, 20, 30)]
    assert np.quantile(moved, 0.1) > TOLERANCE
    assert np.median(moved) > 10 * TOLERANCE


def _moved_by_one(file: Path, ids: list[int], place: int) -> float:
    other = [*ids[:place], (ids[place] + 1) % VOCAB, *ids[place + 1 :]]
    one, two = (reference.logprobs(file, each, [[512]])[0] for each in (ids, other))
    return float(abs(one.max() - two[one.argmax()]))


def test_quantized_weights_agree_coarsely_on_the_best_tokens() -> None:
    found = reference.logprobs(model_file(), prompt("Who are you?").ids, CHUNKINGS)
    best = np.argsort(-found[0])[:2]
    assert np.abs(found - found[0])[:, best].max() < ROUNDED
