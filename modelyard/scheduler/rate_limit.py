"""What one API key may ask for: requests and tokens a minute, and how many at a time. Pure: time is an argument.

A bucket a limit: it holds a minute's worth, refills evenly, and is drawn from before the work is done. Output tokens
are drawn when they are known, so a bucket may be in debt; the next request waits until the debt is paid. A prompt that
is larger than the whole bucket passes when the bucket is full, or it could never pass.
"""

from __future__ import annotations

from msgspec import Struct

from modelyard.core.errors import RateLimited

_DUST = 1e-6  # of a request or token: what rounding leaves


class KeyLimits(Struct, frozen=True, kw_only=True):
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class TokenBucket:
    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much may be drawn; 0 is now."""
        short = min(amount, self.per_minute) - self._fill(now)
        return short * 60.0 / self.per_minute if short > _DUST else 0.0

    def draw(self, amount: float, now: float) -> None:
        self._level = self._fill(now) - amount

    def _fill(self, now: float) -> float:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now
        return self._level


class KeyRateLimiter:
    """One key's limits and what it has used of them."""

    def __init__(self, name: str, limits: KeyLimits, now: float) -> None:
        self.name, self.limits = name, limits
        self.active = 0
        self._requests = TokenBucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self._tokens = TokenBucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def check(self, tokens: int, now: float, service_s: float | None) -> None:
        """Raise RateLimited where one more request of so many prompt tokens is too much. Nothing is drawn yet."""
        most = self.limits.max_concurrent
        if most is not None and self.active >= most:
            retry = max(1.0, service_s or 1.0)
            raise RateLimited(f"the key {self.name!r} may have {most} requests at a time", retry_after=retry)
        self._check(self._requests, 1, now, "requests")
        self._check(self._tokens, tokens, now, "tokens")

    def _check(self, bucket: TokenBucket | None, amount: int, now: float, what: str) -> None:
        if bucket is not None and (wait := bucket.wait(amount, now)) > 0:
            message = f"the key {self.name!r} may use {bucket.per_minute} {what} a minute"
            raise RateLimited(message, retry_after=max(1.0, wait))

    def enter(self, tokens: int, now: float) -> None:
        if self._requests is not None:
            self._requests.draw(1, now)
        self.spend(tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        if self._tokens is not None and tokens:
            self._tokens.draw(tokens, now)
