"""The accounts of a running server and their file: written in the background, and never lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modelyard.accounts.accounts import Accounts
from modelyard.accounts.file import AccountsFile
from modelyard.accounts.settings import NewKey
from modelyard.core.errors import Conflict
from modelyard.core.events import Usage


def used(path: Path) -> int:
    file = AccountsFile(path)
    try:
        return sum(counts.prompt for _, counts in file.usage(("key",), 0, 100_000))
    finally:
        file.close()


async def test_what_was_used_is_in_the_file_after_the_end(tmp_path: Path) -> None:
    accounts = Accounts(file=AccountsFile(tmp_path / "a.sqlite"))
    accounts.open()
    accounts.add("team", "m", Usage(5))
    await accounts.sync()
    accounts.add("team", "m", Usage(7))
    await accounts.close()
    assert used(tmp_path / "a.sqlite") == 12
    assert accounts.ledger.totals()["team", "m"].prompt == 12


async def test_a_cancelled_reader_loses_nothing(tmp_path: Path) -> None:
    accounts = Accounts(file=AccountsFile(tmp_path / "a.sqlite"))
    accounts.add("team", "m", Usage(5))
    reading = asyncio.create_task(accounts.sync())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await accounts.close()
    assert used(tmp_path / "a.sqlite") == 5


async def test_a_file_that_cannot_be_written_ends_no_request_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    accounts = Accounts(file=AccountsFile(blocked / "a.sqlite"))
    accounts.add("team", "m", Usage(5))
    await accounts.sync()
    await accounts.sync()
    assert accounts.ledger.totals()["team", "m"].prompt == 5
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "accounts.path" in caplog.text
    blocked.unlink()
    await accounts.close()
    assert used(blocked / "a.sqlite") == 5, "written when it is possible again"


async def test_a_server_for_one_command_keeps_nothing() -> None:
    accounts = Accounts()
    accounts.open()
    accounts.add("", "m", Usage(5))
    with pytest.raises(Conflict):
        await accounts.create(NewKey(name="a", admin=True), open_to_all=True)
    await accounts.close()


async def test_a_change_is_announced_once_and_a_revocation_by_name(tmp_path: Path) -> None:
    first = Accounts(file=AccountsFile(tmp_path / "a.sqlite"))
    second = Accounts(file=AccountsFile(tmp_path / "a.sqlite"))
    changes, revoked = list[int](), list[str]()
    second.on_change, second.on_revoked = lambda: changes.append(1), revoked.append
    key, _ = await first.create(NewKey(name="boss", admin=True), open_to_all=True)
    await second.sync()
    await second.sync()
    assert (len(changes), revoked) == (1, [])
    await first.revoke(key.id, may_open=True)
    await second.sync()
    assert (len(changes), revoked) == (2, ["boss"])
    await first.close()
    await second.close()
