"""The file of keys and usage."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from modelyard.accounts.file import AccountsFile
from modelyard.accounts.keys import Key
from modelyard.accounts.settings import KeyRules
from modelyard.accounts.usage import UsageCounts
from modelyard.core.errors import Conflict, NotFound, Unavailable


def made_key(name: str, created: float = 1.0) -> Key:
    return Key(id=f"key_{name}", name=name, digest=name.encode(), hint="…abcd", created=created, models=("a*",))


@pytest.fixture
def file(tmp_path: Path) -> AccountsFile:
    return AccountsFile(tmp_path / "folder" / "accounts.sqlite")


def test_it_is_created_by_the_first_write_and_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "accounts.sqlite"
    file = AccountsFile(path)
    assert file.all_keys() == []
    assert file.usage((), 0, 10) == []
    assert not path.exists()
    file.add(made_key("a"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_come_back_as_they_were_written(file: AccountsFile) -> None:
    first, second = made_key("a"), made_key("b", created=2.0)
    file.add(second)
    file.add(first)
    assert file.all_keys() == [first, second]
    file.update("key_a", KeyRules(admin=True))
    file.revoke("key_b", 5.0)
    changed, revoked = file.all_keys()
    assert (changed.admin, changed.models, revoked.revoked) == (True, (), 5.0)


def test_a_name_is_given_once_and_a_revoked_key_does_not_change(file: AccountsFile) -> None:
    file.add(made_key("a"))
    with pytest.raises(Conflict):
        file.add(made_key("a"))
    file.revoke("key_a", 5.0)
    for change in (lambda: file.revoke("key_a", 6.0), lambda: file.update("key_a", KeyRules())):
        with pytest.raises(NotFound):
            change()


def test_usage_of_several_processes_is_summed(tmp_path: Path) -> None:
    one, two = AccountsFile(tmp_path / "a.sqlite"), AccountsFile(tmp_path / "a.sqlite")
    one.add_usage({(5, "k", "m"): UsageCounts(1, 0, 10, 5, 2, 1, 0.5, 100.0)})
    two.add_usage({(5, "k", "m"): UsageCounts(1, 1, 10, 5, 2, 1, 0.5, 90.0), (6, "k", "n"): UsageCounts(1)})
    assert one.usage(("day",), 0, 10) == [
        ((5,), UsageCounts(2, 1, 20, 10, 4, 2, 1.0, 100.0)),
        ((6,), UsageCounts(1)),
    ]
    assert one.usage(("key", "model"), 6, 6) == [(("k", "n"), UsageCounts(1))]
    assert one.usage(("key",), 0, 10, model="m") == [(("k",), UsageCounts(2, 1, 20, 10, 4, 2, 1.0, 100.0))]
    assert one.usage_since({"k": 6, "nobody": 0}) == {"k": (6, UsageCounts(1)), "nobody": (0, UsageCounts())}


def test_a_file_of_another_program_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(Unavailable, match=r"a\.sqlite.*accounts\.path"):
        AccountsFile(tmp_path / "a.sqlite").all_keys()
