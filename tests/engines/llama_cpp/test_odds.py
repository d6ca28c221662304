"""When guessing pays: tables of costs and chances, with steps whose seconds are given and not measured."""

from __future__ import annotations

import pytest

from modelyard.engines.llama_cpp.speculation import AcceptanceRate, DraftCost, draft_length


@pytest.mark.parametrize(
    ("acceptance", "price", "expected"),
    [
        pytest.param(0.5, 0.3, 1, id="the second of two would cost more than it brings"),
        pytest.param(0.9, 0.42, 8, id="a CPU, a text that repeats itself"),
        pytest.param(0.4, 0.42, 0, id="a CPU, a text that does not"),
        pytest.param(0.5, 0.02, 5, id="a GPU, where rows are cheap"),
        pytest.param(0.95, 0.85, 3, id="many streams: a batch is full of certain rows"),
        pytest.param(1.0, 0.5, 8, id="never a miss"),
        pytest.param(0.0, 0.5, 0, id="never a hit"),
        pytest.param(0.9, 0.0, 8, id="rows for nothing"),
        pytest.param(1.0, 1.0, 0, id="rows as dear as steps"),
    ],
)
def test_width(acceptance: float, price: float, expected: int) -> None:
    assert draft_length(acceptance, price, 8) == expected


def test_more_rows_never_follow_from_worse_odds() -> None:
    chances = [step / 20 for step in range(21)]
    for price in chances:
        widths = [draft_length(chance, price, 8) for chance in chances]
        assert widths == sorted(widths)
    for chance in chances:
        widths = [draft_length(chance, price, 8) for price in chances]
        assert widths == sorted(widths, reverse=True)


def learned(plain: float, wide: float, *, streams: int = 1, guessed: int = 4, steps: int = 60) -> DraftCost:
    price = DraftCost()
    for _ in range(steps):
        price.observe(streams, 0, plain)
        price.observe(streams, guessed, wide)
    return price


@pytest.mark.parametrize(
    ("price", "streams", "expected"),
    [
        pytest.param(learned(0.008, 0.008 + 4 * 0.0034), 1, 0.42, id="a CPU"),
        pytest.param(learned(0.010, 0.0102), 1, 0.005, id="a GPU"),
        pytest.param(learned(0.031, 0.031 + 8 * 0.0034, streams=8, guessed=8), 8, 0.87, id="many streams"),
        pytest.param(learned(0.010, 0.100), 1, 1.0, id="a row that costs more than a step"),
        pytest.param(learned(0.010, 0.009), 1, 0.0, id="a row that seems to win time"),
    ],
)
def test_price_is_what_was_measured(price: DraftCost, streams: int, expected: float) -> None:
    assert price.of(streams) == pytest.approx(expected, abs=0.02)


def test_nothing_is_tried_before_a_step_without_guesses_was_seen() -> None:
    price = DraftCost()
    assert price.of(1) == 1.0
    price.observe(1, 3, 0.010)  # nothing to hold it against
    assert price.of(1) == 1.0
    price.observe(1, 0, 0.008)
    assert 0 < price.of(1) < 0.5
    assert price.of(2) == 1.0


def test_one_stalled_step_does_not_turn_guessing_off() -> None:
    price = learned(0.010, 0.012)
    price.observe(1, 4, 3.0)
    assert draft_length(0.7, price.of(1), 8) > 0


def test_dear_rows_are_tried_again_after_a_while() -> None:
    price = learned(0.010, 0.060)
    assert draft_length(0.9, price.of(1), 8) == 0
    for _ in range(1000):
        price.observe(1, 0, 0.010)
    assert draft_length(0.9, price.of(1), 8) > 0


def test_record_follows_what_became_of_the_guesses() -> None:
    record = AcceptanceRate()
    assert record.acceptance == 0.5
    for _ in range(60):
        record.note(4, 4)
    assert record.acceptance > 0.98
    for _ in range(60):
        record.note(4, 0)
    assert record.acceptance < 0.1


def test_guesses_behind_a_miss_do_not_count() -> None:
    one, other = AcceptanceRate(), AcceptanceRate()
    one.note(8, 2)
    other.note(3, 2)
    assert one.acceptance == other.acceptance


def test_bad_record_is_forgotten_by_and_by() -> None:
    record = AcceptanceRate()
    for _ in range(60):
        record.note(1, 0)
    for _ in range(1500):
        record.rest()
    assert record.acceptance > 0.4
