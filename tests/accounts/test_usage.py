"""Usage and budgets by day, key and model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from modelyard.accounts.keys import Key
from modelyard.accounts.usage import DAY_S, Price, UsageCounts, UsageLedger, day_of, period
from modelyard.core.errors import QuotaExceeded
from modelyard.core.events import Usage

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
TODAY = day_of(NOON)


def budget_key(**rules: Any) -> Key:
    return Key(id="key_1", name="team", digest=b"", **rules)


def unix(*date: int) -> float:
    return datetime(*date, tzinfo=UTC).timestamp()  # type: ignore[misc]


# --- cost -------------------------------------------------------------------------------------------------------------


def test_cached_and_fresh_prompt_tokens_and_output_have_their_prices() -> None:
    price = Price(input=3.0, cached_input=0.3, output=15.0)
    assert price.cost(Usage(1_000_000, 400_000, 200_000, 100_000)) == pytest.approx(0.6 * 3 + 0.4 * 0.3 + 0.2 * 15)


def test_a_request_adds_to_its_day_key_and_model() -> None:
    ledger = UsageLedger()
    ledger.prices = {"m": Price(1.0, 1.0, 2.0)}
    cost = ledger.add("team", "m", Usage(100, 40, 10, 5), NOON)
    ledger.add("team", "m", Usage(1, 0, 0), NOON + 1, failed=True)
    ledger.add("team", "other", Usage(7, 0, 7), NOON)
    assert cost == pytest.approx(120e-6)
    assert ledger.pending[TODAY, "team", "m"] == UsageCounts(2, 1, 101, 40, 10, 5, pytest.approx(121e-6), NOON + 1)
    assert ledger.pending[TODAY, "team", "other"].cost == 0.0, "a model without a price costs nothing"


def test_what_could_not_be_written_is_not_lost() -> None:
    ledger = UsageLedger()
    ledger.add("team", "m", Usage(10, 0, 1), NOON)
    taken = ledger.take()
    ledger.add("team", "m", Usage(5, 0, 1), NOON)
    ledger.put_back(taken)
    assert ledger.pending[TODAY, "team", "m"].prompt == 15
    taken = ledger.take()
    ledger.wrote(taken)
    ledger.add("team", "m", Usage(1, 0, 1), NOON + DAY_S)
    assert ledger.totals()["team", "m"].prompt == 16, "metrics never go back, whatever the day"


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "since", "resets"),
    [
        ("day", unix(2026, 11, 16), unix(2026, 11, 17)),
        ("month", unix(2026, 11, 1), unix(2026, 12, 1)),
        ("total", 0.0, None),
    ],
)
def test_a_period_begins_and_ends_at_midnight_utc(kind: Any, since: float, resets: float | None) -> None:
    assert period(kind, NOON) == (day_of(since), resets)


def test_december_ends_with_the_year() -> None:
    assert period("month", unix(2026, 12, 31)) == (day_of(unix(2026, 12, 1)), unix(2027, 1, 1))


def test_a_key_is_refused_once_its_tokens_are_used_and_admitted_when_the_day_ends() -> None:
    ledger = UsageLedger()
    ledger.set_keys([budget_key(token_budget=100, budget_period="day")], NOON)
    ledger.add("team", "m", Usage(90, 0, 9), NOON)
    ledger.check_budget("team", NOON)
    ledger.add("team", "m", Usage(1, 0, 0), NOON)
    with pytest.raises(QuotaExceeded) as caught:
        ledger.check_budget("team", NOON)
    assert "100 tokens a day" in caught.value.message
    assert "2026-11-17T00:00:00Z" in caught.value.message
    assert caught.value.retry_after == 12 * 3600
    ledger.check_budget("other", NOON)
    ledger.check_budget("team", NOON + 12 * 3600)


def test_a_total_budget_never_comes_back() -> None:
    ledger = UsageLedger()
    ledger.prices = {"m": Price(output=1.0)}
    ledger.set_keys([budget_key(cost_budget=1.0, budget_period="total")], NOON)
    ledger.add("team", "m", Usage(0, 0, 1_000_000), NOON)
    with pytest.raises(QuotaExceeded) as caught:
        ledger.check_budget("team", NOON + 400 * DAY_S)
    assert caught.value.retry_after is None
    assert "does not reset" in caught.value.message


def test_what_other_processes_have_used_counts() -> None:
    ledger = UsageLedger()
    ledger.set_keys([budget_key(token_budget=100, budget_period="day")], NOON)
    ledger.add("team", "m", Usage(10, 0, 0), NOON)
    taken, periods = ledger.take(), ledger.periods(NOON)
    ledger.add("team", "m", Usage(5, 0, 0), NOON)  # while the file is written
    ledger.wrote(taken)
    ledger.read({"team": (periods["team"], UsageCounts(prompt=80))})  # 10 of them are ours
    assert ledger.budgets["team"].tokens == 85


def test_a_changed_budget_keeps_what_was_used_unless_its_period_changes() -> None:
    ledger = UsageLedger()
    ledger.set_keys([budget_key(token_budget=100, budget_period="day")], NOON)
    ledger.add("team", "m", Usage(60, 0, 0), NOON)
    ledger.set_keys([budget_key(token_budget=50, budget_period="day")], NOON)
    with pytest.raises(QuotaExceeded):
        ledger.check_budget("team", NOON)
    ledger.set_keys([], NOON)
    ledger.check_budget("team", NOON)
