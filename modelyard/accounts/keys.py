"""API keys in memory: those of the configuration and the created ones, found by the hash of their secret."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from modelyard.accounts.settings import BudgetPeriod, KeyRole, KeyRules, KeySettings
from modelyard.core.errors import InvalidRequest, Unauthenticated

KeyState = Literal["active", "expired", "revoked"]

_CONFIGURED = "config:"  # begins the id of a key of the configuration
_PREFIX = "my-"  # of secrets: scanners for leaked keys can tell what it is
LOGIN_S = 30 * 86400.0
_HINT_CHARS = 4


class Key(Struct, frozen=True, kw_only=True):
    """The fields from `admin` to `expires` are those of `KeyRules`. Times are unix times."""

    id: str
    name: str
    digest: bytes  # SHA-256 of the secret
    hint: str | None = None  # the end of the secret
    created: float | None = None
    revoked: float | None = None
    admin: bool = False
    role: KeyRole = "member"
    allow_remote: bool | None = None
    models: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    token_budget: int | None = None
    cost_budget: float | None = None
    budget_period: BudgetPeriod = "month"
    expires: float | None = None

    @property
    def is_configured(self) -> bool:
        return self.id.startswith(_CONFIGURED)

    def state(self, now: float) -> KeyState:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "active"

    def rules(self) -> KeyRules:
        return KeyRules(**{name: getattr(self, name) for name in KeyRules.model_fields})


class KeyLogin(Struct, frozen=True):
    """A browser that has sent a key once: its cookie has a secret of its own. It ends with the key, also if the key's
    secret is changed."""

    digest: bytes  # of the cookie's secret
    key: bytes  # the digest of the key's
    until: float


def make_key(
    id: str,
    name: str,
    digest: bytes,
    rules: KeyRules,
    *,
    hint: str | None = None,
    created: float | None = None,
    revoked: float | None = None,
) -> Key:
    fields = {field: getattr(rules, field) for field in KeyRules.model_fields}
    fields["models"] = tuple(rules.models)
    return Key(id=id, name=name, digest=digest, hint=hint, created=created, revoked=revoked, **fields)


def new_secret() -> str:
    """256 random bits: a fast hash of it is as good as a slow one."""
    return _PREFIX + secrets.token_urlsafe(32)


def secret_hint(secret: str) -> str:
    return "…" + secret[-_HINT_CHARS:]


def secret_digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def read_keys(settings: Iterable[KeySettings], env: Mapping[str, str] = os.environ) -> tuple[Key, ...]:
    """The keys of the configuration."""
    return tuple(make_key(_CONFIGURED + s.name, s.name, _configured_digest(s, env), s) for s in settings)


def _configured_digest(key: KeySettings, env: Mapping[str, str]) -> bytes:
    if key.hash is not None:
        return bytes.fromhex(key.hash.removeprefix("sha256:"))
    secret = key.key if key.key is not None else env.get(key.env or "")
    if not secret:
        raise InvalidRequest(f"keys.{key.name}: the environment variable {key.env} is not set")
    return hashlib.sha256(secret.encode()).digest()


class KeyRing:
    """All keys that can be sent. Expired ones are among them, so that their owners learn why they are refused."""

    def __init__(self, configured: Sequence[Key] = (), clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._configured, self._created = tuple(configured), tuple[Key, ...]()
        self._logins: tuple[KeyLogin, ...] = ()
        self._index()

    def __repr__(self) -> str:
        return f"<KeyRing [{', '.join(key.name for key in self.keys)}]>"

    def configure(self, keys: Sequence[Key]) -> None:
        """The keys of a new configuration."""
        self._configured = tuple(keys)
        self._index()

    def set_created(self, keys: Iterable[Key], logins: Iterable[KeyLogin] = ()) -> None:
        """All created keys; revoked ones are left out, and those whose name the configuration has taken."""
        self._created, self._logins = tuple(key for key in keys if key.revoked is None), tuple(logins)
        self._index()

    def _index(self) -> None:
        taken = {key.name for key in self._configured}
        self.keys = (*self._configured, *(key for key in self._created if key.name not in taken))
        self.by_name = {key.name: key for key in self.keys}
        self._by_digest = {key.digest: key for key in reversed(self.keys)}
        self._by_login = {each.digest: each for each in self._logins}

    def match(self, found: Sequence[str]) -> Key | None:
        """The key of the first known one of these secrets. Raises if that one has expired.

        The time that it takes tells nothing about other secrets: digests are compared in a table whose hash function is
        keyed anew in each process, and a client cannot choose the digest of what it sends.
        """
        for secret in found:
            digest = secret_digest(secret)
            key = self._by_digest.get(digest)
            if key is None and (login := self._by_login.get(digest)) is not None and self._clock() < login.until:
                key = self._by_digest.get(login.key)
            if key is not None:
                if key.expires is not None and self._clock() >= key.expires:
                    raise Unauthenticated(f"the API key {key.name!r} has expired: get a new one", code="key_expired")
                return key
        return None

    def has_secret(self, secret: str) -> bool:
        """Whether it is that of a key, and not of a login."""
        return secret_digest(secret) in self._by_digest

    def has_admin(self, *, without: str = "") -> bool:
        """Whether an active key other than the one with the id `without` is an admin key."""
        now = self._clock()
        return any(key.admin and key.id != without and key.state(now) == "active" for key in self.keys)


@lru_cache(maxsize=4096)
def may_use(allowed: tuple[str, ...], model: str, cache: str, route: tuple[str, ...]) -> bool:
    """Whether a key with these `models` may use a target. `route` is the `match` of the route that led to it. The name
    that a client sends does not count: a glob would also cover names that lead elsewhere."""
    return any(fnmatchcase(model, pattern) or fnmatchcase(cache, pattern) or pattern in route for pattern in allowed)
