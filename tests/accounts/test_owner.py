"""Roles, and the token, codes and cookie of the user who runs a server."""

from __future__ import annotations

from modelyard.accounts.owner import OwnerProof


def test_a_code_is_valid_once_and_for_an_hour() -> None:
    owner = OwnerProof()
    first, second, late = (owner.new_code(1000.0) for _ in range(3))
    assert owner.redeem(first, 1001.0)
    assert not owner.redeem(first, 1001.0)
    assert owner.redeem(second, 4599.0)
    assert not owner.redeem(late, 4601.0)
    assert not owner.redeem(late, 1001.0), "it has been seen"


def test_another_server_has_other_codes_and_another_cookie() -> None:
    owner, other = OwnerProof(), OwnerProof()
    assert not other.redeem(owner.new_code(0.0), 1.0)
    assert not other.has_cookie(owner.cookie)
    assert owner.has_cookie(OwnerProof(owner.token).cookie)
    assert owner.token not in repr(owner)


def test_garbage_is_no_code() -> None:
    owner = OwnerProof()
    assert not any(owner.redeem(code, 0.0) for code in ("", "-", "--", "a-b-c", "\udc80", "1" * 5000))
