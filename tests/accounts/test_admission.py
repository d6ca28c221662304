"""What requests reserve before they work: memory for all and for each key, and tokens of budgets."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.accounts.accounts import Accounts
from modelyard.accounts.admission import Admission
from modelyard.accounts.keys import Key
from modelyard.accounts.usage import Price
from modelyard.core.errors import KeyLimited, Overloaded, QuotaExceeded, TooLarge
from modelyard.core.events import Usage

MIB = 1 << 20


def accounts(limit: int | None = None, **rules: Any) -> Accounts:
    made = Accounts([Key(id="key_1", name="team", digest=b"", **rules)], clock=lambda: 1_800_000_000.0)
    made.admission.limit = limit
    return made


def admission(limit: int = 120 * MIB) -> Admission:
    return accounts(limit).admission


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_too_large_and_reserves_nothing() -> None:
    ledger = admission()
    with pytest.raises(TooLarge, match=r"would take 66 MiB .* at most 60 MiB"):
        ledger.open("ada").grow(11 * MIB)
    assert (ledger.total, dict(ledger.reserved)) == (0, {})


def test_a_key_may_take_half_and_another_one_the_rest() -> None:
    ledger = admission()
    mine = [ledger.open("eve") for _ in range(2)]
    for reservation in mine:
        reservation.grow(5 * MIB)
    with pytest.raises(KeyLimited, match="wait for one of them"):
        ledger.open("eve").grow(MIB)
    ledger.open("ada").grow(9 * MIB)
    with pytest.raises(Overloaded, match="try again later"):
        ledger.open("bob").grow(2 * MIB)
    mine[0].release()
    mine[0].release()
    ledger.open("bob").grow(2 * MIB)
    ledger.open("eve").grow(MIB)


def test_a_server_without_keys_may_take_all() -> None:
    admission().open("").grow(20 * MIB)


def test_all_is_returned() -> None:
    ledger = admission()
    reservations = [ledger.open(name) for name in ("ada", "bob", "")]
    for reservation in reservations:
        reservation.grow(MIB)
        reservation.grow(MIB)
    assert ledger.total == 36 * MIB
    for reservation in reservations:
        reservation.release()
    assert (ledger.total, dict(ledger.reserved)) == (0, {})


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_parallel_requests_share_what_is_left_of_a_budget() -> None:
    of = accounts(token_budget=500)
    first, second = of.admission.open("team"), of.admission.open("team")
    assert first.hold("m", prompt=100, output=300) == 300
    assert second.hold("m", prompt=40, output=300) == 60, "an answer gets what is left"
    with pytest.raises(KeyLimited, match="send a smaller max_tokens"):
        of.admission.open("team").hold("m", prompt=1, output=1)
    of.add("team", "m", Usage(100, 0, 10))
    first.release()
    assert of.admission.open("team").hold("m", prompt=90, output=1000) == 200
    second.release()


def test_a_prompt_beyond_the_budget_is_told_how_much_is_left() -> None:
    of = accounts(token_budget=500)
    of.add("team", "m", Usage(300, 0, 50))
    with pytest.raises(QuotaExceeded, match="budget of 500 tokens a month but 150, and the prompt has 151"):
        of.admission.open("team").hold("m", prompt=151, output=10)


def test_several_replies_and_the_next_round_count_as_what_they_are() -> None:
    of = accounts(token_budget=500)
    reservation = of.admission.open("team")
    assert reservation.hold("m", prompt=100, output=300, choices=4) == 100
    assert reservation.hold("m", prompt=200, output=300) == 300, "a second round replaces the first"
    reservation.release()
    assert of.ledger.budgets["team"].held_tokens == 0


def test_a_budget_of_money_holds_by_the_price_of_output() -> None:
    of = accounts(cost_budget=1.0)
    of.ledger.prices = {"m": Price(1.0, 1.0, 10.0)}
    assert of.admission.open("team").hold("m", prompt=500_000, output=80_000) == 50_000
    assert of.admission.open("team").hold("free", prompt=500_000, output=80_000) == 80_000
    with pytest.raises(KeyLimited):
        of.admission.open("team").hold("m", prompt=1000, output=10)


def test_a_key_without_a_budget_is_not_limited() -> None:
    assert accounts().admission.open("team").hold("m", prompt=10**9, output=10**9) == 10**9


def test_inputs_without_an_answer_take_their_tokens() -> None:
    of = accounts(token_budget=500)
    assert of.admission.open("team").hold("m", prompt=400, output=0) == 0
    with pytest.raises(KeyLimited):
        of.admission.open("team").hold("m", prompt=400, output=0)
