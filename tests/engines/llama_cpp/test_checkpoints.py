"""Which states of a sequence are kept, and which one is taken up: tables and what holds for any of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.llama_cpp.sequences import (
    MIN_DISTANCE,
    Checkpoint,
    CheckpointLimits,
    Checkpoints,
    add_checkpoint,
    checkpoint_positions,
    checkpoints_within,
    is_checkpoint_useful,
    latest_checkpoint,
)


def at(*tokens: int, size: int = 10) -> Checkpoints:
    return tuple(Checkpoint(one, np.zeros(size, np.uint8)) for one in tokens)


def tokens(held: Checkpoints) -> list[int]:
    return [one.tokens for one in held]


@pytest.mark.parametrize(
    ("held", "keep", "expected"), [((), 9, None), ((5,), 4, None), ((5,), 5, 5), ((5, 9, 12), 11, 9), ((5, 9), 99, 9)]
)
def test_a_sequence_is_taken_up_at_the_last_place_before_the_cut(
    held: tuple[int, ...], keep: int, expected: int | None
) -> None:
    found = latest_checkpoint(at(*held), keep)
    assert (found.tokens if found else None) == expected


def test_a_cut_leaves_only_what_was_before_it() -> None:
    assert tokens(checkpoints_within(at(5, 9, 12), 9)) == [5, 9]


@pytest.mark.parametrize(
    ("held", "new", "expected"),
    [
        pytest.param((), 100, [100], id="the first"),
        pytest.param((100, 200), 300, [100, 200, 300], id="room for it"),
        pytest.param((100, 150, 300), 400, [100, 300, 400], id="the nearest to the one before goes"),
        pytest.param((30, 200, 400), 500, [200, 400, 500], id="the first is near to the start"),
        pytest.param((100, 300, 500), 510, [300, 500, 510], id="never the new one"),
        pytest.param((100, 300, 500), 300, [100, 300], id="what lies behind is not true any more"),
    ],
)
def test_the_one_goes_whose_loss_costs_the_fewest_tokens(held: tuple[int, ...], new: int, expected: list[int]) -> None:
    assert tokens(add_checkpoint(at(*held), at(new)[0], CheckpointLimits(3, 1000))) == expected


def test_bytes_are_bounded_too() -> None:
    assert tokens(add_checkpoint(at(100, 150, 300), at(400)[0], CheckpointLimits(9, 25))) == [300, 400]
    assert tokens(add_checkpoint(at(100), at(200, size=26)[0], CheckpointLimits(9, 25))) == [100]


@given(st.lists(st.integers(1, 500), unique=True, max_size=12), st.integers(0, 4), st.integers(0, 60))
def test_what_is_kept_is_in_order_and_within_its_bound(made: list[int], count: int, size: int) -> None:
    held: Checkpoints = ()
    for one in made:
        held = add_checkpoint(held, at(one)[0], CheckpointLimits(count, size))
        assert tokens(held) == sorted(set(tokens(held)))
        assert len(held) <= count
        assert sum(each.size for each in held) <= size


def test_one_near_to_another_is_not_worth_it() -> None:
    assert is_checkpoint_useful((), MIN_DISTANCE)
    assert not is_checkpoint_useful((), MIN_DISTANCE - 1)
    assert not is_checkpoint_useful(at(100), 100 + MIN_DISTANCE - 1)
    assert is_checkpoint_useful(at(100), 100 + MIN_DISTANCE)


@pytest.mark.parametrize(
    ("length", "start", "partings", "held", "expected"),
    [
        pytest.param(300, 0, [], (), [292], id="a little before the end"),
        pytest.param(300, 0, [100, 0, 300], (), [100, 292], id="and where others part"),
        pytest.param(300, 280, [100], (), [], id="nothing of what is not read"),
        pytest.param(300, 0, [100, 110], (), [100, 292], id="not two that are near"),
        pytest.param(300, 150, [200], (180,), [292], id="nor near one that is there"),
        pytest.param(20, 0, [10], (), [], id="nothing of a short one"),
    ],
)
def test_a_prompt_pauses_where_its_state_is_worth_keeping(
    length: int, start: int, partings: list[int], held: tuple[int, ...], expected: list[int]
) -> None:
    assert checkpoint_positions(length, start, partings, at(*held)) == expected
