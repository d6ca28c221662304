"""What requests reserve before they work: memory for all and for each key, and tokens of budgets."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from modelyard.accounts.accounts import Accounts
from modelyard.accounts.admission import Admission
from modelyard.accounts.file import AccountsFile
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


async def test_parallel_requests_share_what_is_left_of_a_budget() -> None:
    of = accounts(token_budget=500)
    first, second = of.admission.open("team"), of.admission.open("team")
    assert await first.hold("m", prompt=100, output=300) == 300
    assert await second.hold("m", prompt=40, output=300) == 60, "an answer gets what is left"
    with pytest.raises(KeyLimited, match="send a smaller max_tokens"):
        await of.admission.open("team").hold("m", prompt=1, output=1)
    of.add("team", "m", Usage(100, 0, 10))
    first.release()
    assert await of.admission.open("team").hold("m", prompt=90, output=1000) == 200
    second.release()


async def test_a_prompt_beyond_the_budget_is_told_how_much_is_left() -> None:
    of = accounts(token_budget=500)
    of.add("team", "m", Usage(300, 0, 50))
    with pytest.raises(QuotaExceeded, match="budget of 500 tokens a month but 150, and the prompt has 151"):
        await of.admission.open("team").hold("m", prompt=151, output=10)


async def test_several_replies_and_the_next_round_count_as_what_they_are() -> None:
    of = accounts(token_budget=500)
    reservation = of.admission.open("team")
    assert await reservation.hold("m", prompt=100, output=300, choices=4) == 100
    assert await reservation.hold("m", prompt=200, output=300) == 300, "a second round replaces the first"
    reservation.release()
    assert of.ledger.budgets["team"].held_tokens == 0


async def test_a_budget_of_money_holds_by_the_price_of_output() -> None:
    of = accounts(cost_budget=1.0)
    of.ledger.prices = {"m": Price(1.0, 1.0, 10.0)}
    assert await of.admission.open("team").hold("m", prompt=500_000, output=80_000) == 50_000
    assert await of.admission.open("team").hold("free", prompt=500_000, output=80_000) == 80_000
    with pytest.raises(KeyLimited):
        await of.admission.open("team").hold("m", prompt=1000, output=10)


async def test_a_key_without_a_budget_is_not_limited() -> None:
    assert await accounts().admission.open("team").hold("m", prompt=10**9, output=10**9) == 10**9


async def test_inputs_without_an_answer_take_their_tokens() -> None:
    of = accounts(token_budget=500)
    assert await of.admission.open("team").hold("m", prompt=400, output=0) == 0
    with pytest.raises(KeyLimited):
        await of.admission.open("team").hold("m", prompt=400, output=0)


# --- several processes ------------------------------------------------------------------------------------------------


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def processes(tmp_path: Path, count: int, clock: Clock) -> list[Accounts]:
    key = Key(id="key_1", name="team", digest=b"", token_budget=500)
    return [Accounts([key], AccountsFile(tmp_path / "accounts.sqlite"), clock=clock) for _ in range(count)]


async def test_a_budget_is_held_for_all_processes_with_the_same_file(tmp_path: Path) -> None:
    one, two = processes(tmp_path, 2, Clock())
    first, second = one.admission.open("team"), two.admission.open("team")
    assert await first.hold("m", prompt=100, output=300) == 300
    assert await second.hold("m", prompt=40, output=300) == 60
    with pytest.raises(KeyLimited, match="send a smaller max_tokens"):
        await two.admission.open("team").hold("m", prompt=1, output=1)
    one.add("team", "m", Usage(100, 0, 10))
    first.release()
    assert await two.admission.open("team").hold("m", prompt=90, output=1000) == 200, "used 110, holds 100"
    await one.close()
    await two.close()


async def test_what_a_request_did_not_use_is_free_in_the_next_process_at_once(tmp_path: Path) -> None:
    for_all = processes(tmp_path, 3, Clock())
    for number in range(9):
        accounts = for_all[number % 3]
        reservation = accounts.admission.open("team")
        assert await reservation.hold("m", prompt=10, output=1000) == 490 - 20 * number
        accounts.add("team", "m", Usage(10, 0, 10))
        reservation.release()
    for accounts in for_all:
        await accounts.close()


async def test_the_next_request_gets_all_that_the_last_one_did_not_use(tmp_path: Path) -> None:
    (one,) = processes(tmp_path, 1, Clock())
    first = one.admission.open("team")
    assert await first.hold("m", prompt=10, output=290) == 290
    one.add("team", "m", Usage(10, 0, 40))
    first.release()
    assert await one.admission.open("team").hold("m", prompt=10, output=440) == 440
    await one.close()


async def test_what_a_dead_process_held_is_free_after_a_while(tmp_path: Path) -> None:
    clock = Clock()
    dead, alive = processes(tmp_path, 2, clock)
    await dead.admission.open("team").hold("m", prompt=100, output=400)
    clock.now += 20
    with pytest.raises(KeyLimited):
        await alive.admission.open("team").hold("m", prompt=1, output=1)
    clock.now += 11
    held = alive.admission.open("team")
    assert await held.hold("m", prompt=100, output=400) == 400
    for _ in range(3):
        clock.now += 20
        await alive.sync()
    with pytest.raises(KeyLimited):
        await dead.admission.open("team").hold("m", prompt=1, output=1)
    await alive.close()
    await dead.close()


async def test_a_request_that_is_cancelled_while_it_reserves_holds_nothing(tmp_path: Path) -> None:
    (one,) = processes(tmp_path, 1, Clock())
    reserving = asyncio.create_task(one.admission.open("team").hold("m", prompt=100, output=400))
    await asyncio.sleep(0)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    assert await one.admission.open("team").hold("m", prompt=100, output=400) == 400
    await one.close()


async def test_a_file_that_cannot_be_used_leaves_each_process_its_own_count(tmp_path: Path) -> None:
    (one,) = processes(tmp_path, 1, Clock())
    (tmp_path / "accounts.sqlite").write_bytes(b"no database" * 100)
    assert await one.admission.open("team").hold("m", prompt=100, output=300) == 300
    assert await one.admission.open("team").hold("m", prompt=40, output=300) == 60
    await one.close()


async def test_requests_do_not_wait_for_a_locked_file_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(*args: Any) -> tuple[int, int, float]:
        waits.append(args)
        return held(*args)

    monkeypatch.setattr("modelyard.database._LOCK_TIMEOUT_S", 0.05)
    (one,) = processes(tmp_path, 1, Clock())
    await one.admission.open("team").hold("m", prompt=1, output=1)
    waits: list[tuple[Any, ...]] = []
    held = AccountsFile.hold
    monkeypatch.setattr(AccountsFile, "hold", hold)
    with closing(sqlite3.connect(tmp_path / "accounts.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        requests = [one.admission.open("team") for _ in range(9)]
        assert await asyncio.gather(*(each.hold("m", prompt=1, output=9) for each in requests)) == [9] * 9
        assert len(waits) == 1
        other.execute("ROLLBACK")
    await one.sync()
    assert await one.admission.open("team").hold("m", prompt=1, output=9) == 9
    assert len(waits) == 2, "the file is used again"
    await one.close()
