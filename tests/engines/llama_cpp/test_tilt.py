"""Biases and penalties: what llama.cpp's own samplers make of a row, and the row as it was afterwards."""

from __future__ import annotations

import ctypes
from math import inf

import numpy as np
import pytest

from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.sampler import PENALTY_WINDOW, LogitProcessor, Penalties, Row

VOCAB = 300


def a_row(seed: int = 1) -> Row:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def as_llama_cpp(row: Row, biases: dict[int, float], strengths: tuple[float, float, float], said: list[int]) -> Row:
    data = (lib.llama_token_data * VOCAB)(*[(token, value, 0.0) for token, value in enumerate(row.tolist())])
    array = lib.llama_token_data_array(data, VOCAB, -1, False)
    pairs = (lib.llama_logit_bias * len(biases))(*biases.items())
    for sampler in (
        lib.llama_sampler_init_logit_bias(VOCAB, len(biases), pairs),
        lib.llama_sampler_init_penalties(VOCAB, PENALTY_WINDOW, *strengths),
    ):
        for token in said:
            lib.llama_sampler_accept(sampler, token)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        lib.llama_sampler_free(sampler)
    return np.array([array.data[at].logit for at in range(VOCAB)], np.float32)


def seen(tilt: LogitProcessor, row: Row) -> Row:
    """The row as whoever chooses finds it."""
    found: list[Row] = []
    tilt.pick(row, lambda changed: (found.append(changed.copy()), 5)[1])
    return found[0]


@pytest.mark.parametrize("biases", [{}, {3: 4.0, 299: -inf, 7: -2.5}])
@pytest.mark.parametrize("strengths", [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.4, 0.7), (1.2, -0.5, -1.0)])
@pytest.mark.parametrize("count", [0, 10, 100])
def test_a_row_is_changed_as_llama_cpp_changes_it(
    biases: dict[int, float], strengths: tuple[float, float, float], count: int
) -> None:
    said = np.random.default_rng(2).integers(0, 40, count).tolist()
    tilt, row = LogitProcessor(biases, Penalties(*strengths, said)), a_row()
    expected = as_llama_cpp(row, biases, strengths, said)
    np.testing.assert_allclose(seen(tilt, row), expected, rtol=1e-5, atol=1e-5)


def test_the_row_is_as_it_was_afterwards_also_where_choosing_fails() -> None:
    tilt, row = LogitProcessor({3: 4.0, 5: -inf}, Penalties(1.5, 0.1, 0.1, [3, 5, 9])), a_row()
    tilt.pick(row, lambda changed: int(changed.argmax()))
    assert (row == a_row()).all()

    def fail(changed: Row) -> int:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 ours
        tilt.pick(row, fail)
    assert (row == a_row()).all()


def test_what_is_chosen_counts_from_then_on_and_is_forgotten_again() -> None:
    tilt, row = LogitProcessor({}, Penalties(1.0, 0.0, 10.0, [])), a_row()
    assert seen(tilt, row)[5] == row[5]  # and says 5
    assert seen(tilt, row)[5] == pytest.approx(row[5] - 10)
    for _ in range(PENALTY_WINDOW):
        tilt.pick(row, lambda _: 6)
    assert seen(tilt, row)[5] == row[5]
