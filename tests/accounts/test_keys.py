"""Keys by the hash of their secret, and what each may use."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.accounts.keys import Key, KeyRing, may_use, new_secret, secret_digest
from modelyard.core.errors import Unauthenticated


def made_key(secret: str, **fields: Any) -> Key:
    return Key(id=f"key_{secret}", name=secret, digest=secret_digest(secret), **fields)


def test_secrets_are_long_and_never_the_same() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(len(secret) >= 43 for secret in made)


def test_each_of_many_keys_is_found_by_its_whole_secret_only() -> None:
    ring = KeyRing([made_key(f"secret-{number}") for number in range(300)])
    for number in range(300):
        found = ring.match(["wrong", f"secret-{number}"])
        assert found is not None
        assert found.name == f"secret-{number}"
    assert ring.match(["secret-", "secret-300", "SECRET-1", ""]) is None


def test_a_created_key_cannot_take_the_place_of_a_configured_one() -> None:
    configured = Key(id="config:a", name="a", digest=secret_digest("one"))
    ring = KeyRing([configured])
    ring.set_created([Key(id="key_1", name="a", digest=secret_digest("two"), admin=True)])
    assert ring.keys == (configured,)
    assert ring.match(["two"]) is None


def test_a_key_expires_at_its_time() -> None:
    now = [99.0]
    ring = KeyRing([made_key("a", expires=100.0)], clock=lambda: now[0])
    assert ring.match(["a"]) is not None
    now[0] = 100.0
    with pytest.raises(Unauthenticated, match="expired"):
        ring.match(["a"])


def test_an_expired_admin_key_does_not_count() -> None:
    ring = KeyRing([made_key("a", admin=True, expires=100.0), made_key("b")], clock=lambda: 200.0)
    assert not ring.has_admin()


@pytest.mark.parametrize(
    ("allowed", "may"),
    [
        (("qwen*",), True),
        (("main",), True),
        (("claude-*",), True),
        (("claude-3",), False),
        (("other", "qwen3"), True),
        (("other",), False),
    ],
)
def test_models_and_caches_match_by_glob_and_routes_by_their_own_text(allowed: tuple[str, ...], may: bool) -> None:
    assert may_use(allowed, "qwen3", "main", ("claude-*",)) is may
